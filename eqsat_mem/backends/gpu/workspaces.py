"""The scratch that NVIDIA's libraries allocate while a program runs and XLA does not report: from a table, not from the compiler.

XLA allocates the scratch of its own kernels and of cuBLAS at compile time, so ``memory_analysis()`` includes it. cuSOLVER and cuFFT
report their needs at run time, and their scratch is then taken from the allocator. CUB, which sorts, reports its needs when XLA
compiles on the card; without the card XLA sorts with its own kernels, which need less.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from eqsat_mem.backends.gpu.targets import MiB, Target
from eqsat_mem.backends.hlo import itemsize

UNTUNED = 4 * MiB
"""The bytes of scratch that XLA allocates for a product by cuBLASLt without a card: read from compiled programs."""
ROOMY_SINCE, ROOMY = (9, 0), 32 * MiB
"""From this compute capability on it allocates so many where it tries products on the card: read from compiled programs of JAX 0.11.2 on
an H100, and in XLA's source, GemmConfig::kHopperWorkspace."""


@dataclass(frozen=True)
class Workspace:
    """The scratch of a library for one call.

    Attributes:
        routine: the library and its routine.
        bytes: the bytes of scratch.
        source: the source of the figure.
    """

    routine: str
    bytes: int
    source: str

    def __str__(self) -> str:
        return f"{self.routine}: {self.bytes} B, which XLA does not report, from a table ({self.source})"


UNMEASURED = "guessed from what LAPACK's documentation asks for the same routine, in blocks of 64; not measured"
CUFFT = "cuFFT documentation: the size of the data, eight times that for lengths with a prime factor above 127"
CUB = "the table of CUB 3.1.2's scratch that XLA 2026 compiles with for an H100, read at 30 sizes and rounded up"

Elements = Callable[[int, int], float]
BLOCK = 64
"""Columns of a block in factorisations: guessed, as is what follows from it."""

SOLVERS: Mapping[str, Elements] = MappingProxyType(
    {
        "potrf": lambda k, n: BLOCK * n,
        "getrf": lambda k, n: BLOCK * (k + n),
        "geqrf": lambda k, n: BLOCK * (k + n),
        "orgqr": lambda k, n: BLOCK * (k + n),
        "sytrd": lambda k, n: BLOCK * n,
        "syevd": lambda k, n: 2 * n**2 + (6 + BLOCK) * n,
        "gesvd": lambda k, n: k**2 + BLOCK * (k + n),
        "gesvdj": lambda k, n: 2 * k * n + k**2 + BLOCK * (k + n),
        "gesvdp": lambda k, n: 3 * k * n + 3 * k**2,
        "csrlsvqr": lambda k, n: BLOCK * n,
    }
)
"""The elements of scratch of cuSOLVER's routines for a matrix, from its smaller and its larger extent."""


def workspaces(compiled_text: str, target: Target) -> list[Workspace]:
    """Return the library scratch of a compiled program that XLA does not report.

    Args:
        compiled_text: the program's optimised HLO.
        target: the card for which it was compiled.

    Returns:
        One :class:`Workspace` per call that has any, largest first. Calls run one at a time, so only the first adds to the peak.
    """
    found = [*_solvers(compiled_text), *_transforms(compiled_text), *_sorts(compiled_text, target)]
    return sorted((w for w in found if w.bytes), key=lambda w: -w.bytes)


def cublaslt(target: Target) -> int:
    """Return the scratch that XLA allocates for a product by cuBLASLt on the card, in bytes."""
    return ROOMY if target.capability >= ROOMY_SINCE else UNTUNED


def cublaslt_bytes(compiled_text: str) -> list[int]:
    """Return the scratch of each product by cuBLASLt in a program's optimised HLO, in bytes; XLA reports it."""
    return [int(size) for size in _CUBLASLT.findall(compiled_text)]


def library_bytes(compiled_text: str, target: Target) -> int:
    """Return the largest library scratch of a compiled program, in bytes; XLA does not report it.

    Sorts count with the scratch of CUB, which sorts on the card, although XLA's own kernels need less.

    Args:
        compiled_text: the program's optimised HLO.
        target: the card for which it was compiled.
    """
    return max((w.bytes for w in workspaces(compiled_text, target)), default=0)


_SHAPE = r"(?P<type>[a-z]+\d*)\[(?P<shape>[\d,]*)\]"
_SOLVER = re.compile(rf'= \(?{_SHAPE}[^\n]*? custom-call\([^\n]*?custom_call_target="cusolver_(?P<routine>[a-z]+)_ffi"')
_CUBLASLT = re.compile(r"s8\[(\d+)\][^\n]*? custom-call\([^\n]*?custom_call_target=\"__cublas\$lt\$matmul")
_FFT = re.compile(rf"= {_SHAPE}\S* fft\([^\n]*?fft_type=(?P<kind>\w+), fft_length=\{{(?P<length>[\d,]+)\}}")
_SORT = re.compile(
    r"%(?P<name>[\w.\-]+) = (?P<results>\(.*?\)|\S+) sort\([^\n]*?dimensions=\{(?P<axis>\d+)\}[^\n]*?to_apply=%?(?P<order>[\w.\-]+)"
)


def _solvers(text: str) -> Iterator[Workspace]:
    for call in _SOLVER.finditer(text):
        k, n = sorted(_extents(call["shape"])[-2:])
        routine = call["routine"]
        elements = SOLVERS.get(routine)
        if elements is not None:
            yield Workspace(f"cuSOLVER {routine}", int(elements(k, n) * itemsize(call["type"])), UNMEASURED)


LARGEST_FACTOR = 127
"""Fourier transforms of lengths with a larger prime factor are computed by another, longer transform: cuFFT's documentation."""


def _transforms(text: str) -> Iterator[Workspace]:
    for call in _FFT.finditer(text):
        complex_bytes = 16 if call["type"] in ("f64", "c128") else 8
        yield Workspace("cuFFT", transform_bytes(complex_bytes, _extents(call["shape"]), _extents(call["length"])), CUFFT)


def transform_bytes(complex_bytes: int, shape: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the scratch of cuFFT in bytes, for a result of a shape, transforms of such lengths, and complex numbers of so many bytes."""
    times = 1 if all(_largest_factor(n) <= LARGEST_FACTOR for n in lengths) else 8
    return times * complex_bytes * math.prod(shape)


LARGE_SORT, LONG_ROW, MANY_ROWS = 2**14, 2**12, 26
"""XLA passes sorts to CUB above about these numbers of elements: of a single row, or of each row if there are more rows than the last
of the three. XLA's thresholds depend on the width of the elements and the card; these are below all of them, read from compiled
programs: benchmarks/gpu_model.py --only selection shows some."""
TUNED = {(8, 0), (9, 0), (10, 0), (12, 0)}
"""The compute capabilities for which XLA's thresholds depend on rows; for others they depend on the number of all elements:
read from compiled programs."""
SCRATCH_SHARE, SCRATCH_BYTES = 1.046, 2**14
"""CUB's scratch is at most this multiple of the bytes that it sorts, plus this number of bytes: read from compiled programs
at 30 sizes and rounded up."""


def _sorts(text: str, target: Target) -> Iterator[Workspace]:
    """Yield the scratch of the sorts that CUB would do on the card: of one array, or of one together with another, along the last axis.

    If zeros and NaNs of either sign are to compare equal, as in JAX's sorts of floating-point numbers, CUB sorts keys made of their
    bits, which are two more arrays, and sorts only a single array so.
    """
    for sort in _SORT.finditer(text):
        arrays = [(m["type"], _extents(m["shape"])) for m in re.finditer(_SHAPE, sort["results"])]
        if len(arrays) > 1 and not _is_read(text, sort["name"], len(arrays) - 1):
            arrays.pop()  # the positions that XLA adds for a stable sort without CUB
        shape, sizes = arrays[0][1], [itemsize(kind) for kind, _ in arrays]
        by_keys = "constant(nan)" in _body(text, sort["order"])
        if int(sort["axis"]) != len(shape) - 1 or len(arrays) > (1 if by_keys else 2) or not is_sorted_by_cub(shape, target):
            continue
        elements = math.prod(shape)
        keys = sizes[0] if by_keys else 0
        scratch = SCRATCH_SHARE * elements * (sum(sizes) + keys) + SCRATCH_BYTES
        yield Workspace("CUB radix sort", int(2 * elements * keys + scratch), CUB)


def _is_read(text: str, name: str, position: int) -> bool:
    """Whether a program reads an array of an instruction's result, which may be the result of the fusion that contains it."""
    computation = re.search(
        rf"^(ENTRY )?%?([\w.\-]+) \([^\n]*\{{\n(?:(?!^\}}).)*?^ *ROOT %{re.escape(name)} = ", text, re.MULTILINE | re.DOTALL
    )
    if computation is not None:
        if computation[1]:
            return True
        fusion = re.search(rf"(ROOT )?%([\w.\-]+) = [^\n]* calls=%?{re.escape(computation[2])}\b", text)
        if fusion is None or fusion[1]:
            return True
        name = fusion[2]
    return f"get-tuple-element(%{name}), index={position}" in text


def is_sorted_by_cub(shape: Sequence[int], target: Target) -> bool:
    """Whether XLA gives a sort along the last axis to CUB on a card."""
    if not shape:
        return False
    row, rows = shape[-1], math.prod(shape[:-1])
    if target.capability not in TUNED:
        return row * rows > LARGE_SORT
    return row > LARGE_SORT if rows == 1 else row > LONG_ROW and rows > MANY_ROWS


def _body(text: str, name: str) -> str:
    """Return the text of the instructions of a computation."""
    found = re.search(rf"^%?{re.escape(name)} \([^\n]*\{{\n(.*?)^\}}", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def _extents(text: str) -> list[int]:
    return [int(extent) for extent in text.split(",") if extent]


def _largest_factor(n: int) -> int:
    largest, factor = 1, 2
    while factor * factor <= n:
        while n % factor == 0:
            largest, n = factor, n // factor
        factor += 1
    return max(largest, n)
