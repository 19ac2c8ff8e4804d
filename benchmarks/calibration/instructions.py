"""Machine instructions of elementwise operations on a GPU: writes ``eqsat_mem/backends/gpu/weights.py``.

    python -m benchmarks.calibration.instructions [--target h100] [--check]

Each operation is compiled by XLA:GPU as a kernel of its own; its PTX is assembled by ptxas and read back by
nvdisasm. What counts is the longest way through the kernel that neither calls a function nor runs a loop nor leaves
the straight code for a place behind its end, which is where compilers put what unusual arguments need; threads of a
warp that part run both sides. From that the same of a kernel that only adds is taken away. Needs no GPU, but the
extra ``gpu``, ``ptxas`` and ``nvdisasm``, from PATH or from the wheels nvidia-cuda-nvcc and nvidia-cuda-nvdisasm.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from eqsat_mem.backends.gpu import deviceless, thunks
from eqsat_mem.backends.gpu.targets import Target, named
from eqsat_mem.ir.ops.elementwise import MAPS

ELEMENTS = 2**20
INTEGERS = {"and", "or", "xor", "not", "shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz"}
PARAMETERS: dict[str, dict[str, Any]] = {
    "integer_pow": {"y": 2},
    "round": {"rounding_method": lax.RoundingMethod.TO_NEAREST_EVEN},
    "reduce_precision": {"exponent_bits": 8, "mantissa_bits": 7},
}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "lt_to", "le_to", "is_finite"}
OTHER = {4: (jnp.bfloat16, jnp.int32), 8: (jnp.float32, jnp.int64), 2: (jnp.float32, jnp.int16)}
"""By bytes of a number: the dtype that it is converted to, and the one that its bits are read as."""
DTYPES = {"single": jnp.float32, "double": jnp.float64, "narrow": jnp.bfloat16}
PAGE = Path(__file__).parents[2] / "eqsat_mem" / "backends" / "gpu" / "weights.py"


@dataclass(frozen=True)
class Issued:
    """Instructions that a thread issues for one element: all, those of the float64 lanes, those of the special-function unit."""

    all: float
    double: float
    special: float

    def less(self, base: Issued, adds: int, double: bool) -> Issued:
        """Without what a kernel of so many additions issues besides these."""
        return Issued(
            max(self.all - base.all + adds, 0.0),
            max(self.double - base.double + (adds if double else 0), 0.0),
            max(self.special - base.special, 0.0),
        )


DOUBLE = re.compile(r"^D(ADD|MUL|FMA|SETP|MNMX)\b")


def measured(function: Any, avals: list[Any], target: Target) -> Issued | None:
    """Instructions that the only kernel of a function issues for one element; None if there are several, or it has a loop."""
    there = jax.sharding.SingleDeviceSharding(deviceless.device(target))
    given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there) for a in avals]
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        compiled = jax.jit(function, out_shardings=there).lower(*given).compile(options)
        kernels = [text for path in Path(folder).glob("*.ptx") if ".entry" in (text := path.read_text())]
        launches = thunks.read(Path(folder), compiled.as_text())
        if len(kernels) != 1 or len(launches) != 1:
            return None
        (Path(folder) / "kernel.ptx").write_text(kernels[0])
        arch = re.search(r"\.target (\w+)", kernels[0])
        assert arch is not None
        cubin = Path(folder) / "kernel.cubin"
        subprocess.run([tool("ptxas"), f"-arch={arch[1]}", "-o", cubin, Path(folder) / "kernel.ptx"], check=True, capture_output=True)
        listing = subprocess.run([tool("nvdisasm"), "-c", cubin], check=True, capture_output=True, text=True).stdout
    return longest(listing, ELEMENTS / (launches[0].blocks * launches[0].threads))


def tool(name: str) -> str:
    """A program of the CUDA toolkit, from PATH or from NVIDIA's wheels."""
    found = shutil.which(name)
    if found is None:
        spec = importlib.util.find_spec("nvidia")
        places = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
        found = next((str(path) for place in places for path in place.glob(f"*/bin/{name}")), None)
    if found is None:
        sys.exit(f"{name} is missing: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm")
    return found


def longest(listing: str, each: float) -> Issued | None:
    """Instructions on the longest straight way through a kernel, in machine code as nvdisasm prints it; None if there is none.

    ``each``: the elements that one thread computes.
    """
    code, labels = instructions(listing)
    ends = {k for k, (predicate, text) in enumerate(code) if text.startswith("EXIT") and not predicate}
    loops = [(labels[m[1]], k) for k, (_, text) in enumerate(code) if (m := JUMP.match(text)) and labels[m[1]] <= k]
    inside = {k for start, end in loops if not ends & set(range(start, end)) for k in range(start, end + 1)}
    best: dict[int, tuple[int, int, int]] = {}
    for at in reversed(range(len(code))):
        predicate, text = code[at]
        following = [best[k] for k in ways(text, predicate, at, labels) if k > at and k in best]
        if at in inside or not (following or at in ends):
            continue
        all_, double, special = max(following, default=(0, 0, 0))
        best[at] = all_ + 1, double + bool(DOUBLE.match(text)), special + text.startswith("MUFU")
    return Issued(*(count / each for count in best[0])) if 0 in best else None


JUMP = re.compile(r"BRA\S*[^`]*`\((\.L_x_\w+)\)")


def instructions(listing: str) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The instructions, each with its predicate, and the positions of labels."""
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"\s*(\.L_x_\w+|\S+):\s*$", line):
            labels[label[1]] = len(code)
        elif found := re.match(r"\s*(?:/\*[0-9a-f]+\*/)\s*(@!?U?P\w+ )?\s*([^;]+?)\s*;", line):
            code.append(((found[1] or "").strip(), found[2]))
    return code, labels


def ways(text: str, predicate: str, at: int, labels: dict[str, int]) -> Iterator[int]:
    """The instructions to which control may go after one; none after a call, which would return."""
    jump = JUMP.match(text)
    if jump is not None:
        yield labels[jump[1]]
    stays = not text.startswith(("CALL", "EXIT", "RET")) or bool(predicate)
    if stays and (jump is None or predicate or re.match(r"BRA\S*\s+!?U?P", text)):
        yield at + 1


def count(op: str, dtype: Any, target: Target) -> Issued | None:
    """Instructions for one element of an operation. Truth values are neither read nor written: fused code has them in predicates."""
    row, double = MAPS[op], dtype == jnp.float64
    converted, bits = OTHER[jnp.dtype(dtype).itemsize]
    own = {"convert_element_type": converted, "bitcast_convert_type": bits}.get(op)
    parameters = PARAMETERS.get(op, {}) | ({"new_dtype": own} if own else {})
    arity = 2 if op == "select_n" else row.arity

    def function(*xs: Any) -> Any:
        if op == "select_n":
            return lax.select(xs[0] > 3, *xs)
        result = row.bind(*xs, **parameters)
        return lax.select(result, xs[0], jnp.full_like(xs[0], 3)) if op in COMPARISONS else result

    found = measured(function, [jax.ShapeDtypeStruct((ELEMENTS,), operand(op, dtype))] * arity, target)
    if found is None:
        return None
    found = found.less(additions(arity, dtype, target), max(arity - 1, 1), double)
    return found.less(Issued(1.0, float(double and op == "select_n"), 0.0), 0, False) if op in {*COMPARISONS, "select_n"} else found


@cache
def additions(operands: int, dtype: Any, target: Target) -> Issued:
    """Instructions of a kernel that adds so many arrays, or one and a number."""
    avals = [jax.ShapeDtypeStruct((ELEMENTS,), dtype)] * operands
    found = measured(lambda *xs: xs[0] + 1 if len(xs) == 1 else sum(xs[1:], xs[0]), avals, target)
    assert found is not None
    return found


def operand(op: str, dtype: Any) -> Any:
    """The dtype of the operands."""
    if op in ("real", "imag", "conj"):
        return jnp.complex128 if dtype == jnp.float64 else jnp.complex64
    return jnp.int32 if op in INTEGERS else dtype


def table(target: Target) -> dict[str, dict[str, Issued]]:
    """For each operation the counts by kind of number; without those that XLA refuses, or computes in loops."""
    found: dict[str, dict[str, Issued]] = {}
    for op in MAPS:
        for kind, dtype in DTYPES.items():
            if (op in INTEGERS and kind != "single") or (op in ("real", "imag", "conj", "complex") and kind == "narrow"):
                continue
            try:
                counted = count(op, dtype, target)
            except (TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
                print(f"{op} {kind}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
                continue
            if counted is not None:
                found.setdefault(op, {})[kind] = counted
        print(op, {kind: (c.all, c.double, c.special) for kind, c in found.get(op, {}).items()}, file=sys.stderr)
    return found


HEAD = '''"""Machine instructions of elementwise operations on a GPU, and their cost in additions.

``python -m benchmarks.calibration.instructions`` makes the table from machine code compiled by XLA:GPU of JAX {jax} for {target}
(compute capability {capability}), counting the longest straight-line path through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from eqsat_mem.backends.gpu.targets import Target

SPECIAL_LANES = 16
"""The elements of a special function (a hardware root, exponential or reciprocal) that a multiprocessor begins in a clock cycle:
CUDA C++ Programming Guide 13.0, throughput of native instructions."""

COUNTS: Mapping[str, tuple[tuple[float, float, float] | None, ...]] = MappingProxyType(
    {{
        # for float32, float64 and bfloat16: all instructions, those on the float64 lanes, those on the special-function unit
{rows}
    }}
)
"""Instructions per element, by operation; None if XLA has no kernel for it, or one with a loop. Operations on integers are counted
as float32."""


def weight(op: str, itemsize: int, target: Target) -> float | None:
    """Return the cost of one element in float32 additions of a card, or None if the table lacks it.

    Args:
        op: the name of the operation in the table of elementwise operations.
        itemsize: bytes of an element: 4, 8 or 2 (others count as 4).
        target: the card.
    """
    counts = COUNTS.get(op, (None, None, None))[{{8: 1, 2: 2}}.get(itemsize, 0)]
    if counts is None:
        return None
    issued, double, special = counts
    own = target.architecture
    return max(issued, double * own.lanes / own.double_lanes, special * own.lanes / SPECIAL_LANES)
'''


def page(found: dict[str, dict[str, Issued]], target: Target) -> str:
    """The source of the module."""
    rows = []
    for op, kinds in found.items():
        cells = [f"({c.all:g}, {c.double:g}, {c.special:g})" if (c := kinds.get(kind)) else "None" for kind in DTYPES]
        rows.append(f'        "{op}": ({", ".join(cells)}),')
    capability = ".".join(map(str, target.capability))
    return HEAD.format(jax=jax.__version__, target=target.name, capability=capability, rows="\n".join(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100", help="the card (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="say whether the module is what would be written; write nothing")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    target = named(options.target)
    text = page(table(target), target)
    if options.check:
        same = text == PAGE.read_text(encoding="utf-8")
        print("the same" if same else "different", Counter(text.splitlines()) - Counter(PAGE.read_text(encoding="utf-8").splitlines()))
        return int(not same)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
