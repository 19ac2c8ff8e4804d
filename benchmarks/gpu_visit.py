"""All that wants a GPU, in one command that can be stopped and begun again: ``make gpu``, or

    python -m benchmarks.gpu_visit [--results FOLDER] [--only STAGE ...] [--seconds 450] [--scale full|tiny] [--again]

Stages, each of which writes ``STAGE.json`` as it goes and stops after so many seconds:

    probe      versions, the device, one product
    calibrate  the device's profile
    times      the small programs of benchmarks.gpu_times
    programs   each of benchmarks.gpu_programs as written and as planned: compiled, run, timed, values compared; the autotuner's choices
    peaks      what they hold: predicted, by XLA:GPU without the card, by XLA on it, and by its allocator in a process that only runs
    paper      the experiments of paper_repro at the paper's scale, beside KeOps
    tiles      the same programs planned without and with tile kernels: seconds of both, values compared

What a stage has is kept, so that a second command goes on where the first stopped. On a machine without a GPU ``--scale tiny`` rehearses
all of it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "gpu"
SECONDS = 450.0
PATIENCE_S = {"full": 120.0, "tiny": 60.0}
"""Seconds after which one program, or one point of an experiment, is given up."""
TINY = 40
"""By how much extents above it are divided at the tiny scale."""
TINY_PROGRAMS = ("gauss_product", "set_distance")
REPEATS = 5
Results = dict[str, Any]


@dataclass(frozen=True)
class Visit:
    """The folder of results, the scale, and the time until which a stage may run."""

    folder: Path
    scale: str
    deadline: float

    def kept(self, stage: str) -> Results:
        path = self.folder / f"{stage}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"complete": False}

    def keep(self, stage: str, results: Results) -> None:
        """Write a stage's results at once, and in one step: a command that is killed leaves them whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / f"{stage}.json.new"
        new.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        new.replace(self.folder / f"{stage}.json")

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def names(self) -> list[str]:
        from benchmarks.gpu_programs import PROGRAMS

        return [p.name for p in PROGRAMS if self.scale == "full" or p.name in TINY_PROGRAMS]


# --- stages: each adds to what it is given, and says at the end whether it is complete ------------------


def probe(visit: Visit, results: Results) -> None:
    import jax
    import jax.numpy as jnp

    from benchmarks.racing import machine

    results |= {"machine": machine(), "platform": jax.default_backend(), "devices": [str(d.device_kind) for d in jax.devices()]}
    if shutil.which("nvidia-smi"):
        told = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, timeout=60, check=False)
        results["nvidia-smi"] = told.stdout
    visit.keep("probe", results)
    n = 4096 if visit.scale == "full" else 64
    results["product"] = float(jax.jit(lambda a: (a @ a)[0, 0])(jnp.ones((n, n), jnp.float32)))
    results["complete"] = results["product"] == n


def calibrate(visit: Visit, results: Results) -> None:
    import jax

    from eqsat_mem.backends.calibrate import SHORTEST_S, measure
    from eqsat_mem.backends.choose import built_in
    from eqsat_mem.backends.profiles import as_json

    backend = built_in(jax.default_backend())
    fields: list[list[Any]] = results.setdefault("begun_at", [])

    def report(field: str) -> None:
        fields.append([field, SECONDS - visit.left_s])
        visit.keep("calibrate", results)

    device = measure(backend, report, SHORTEST_S if visit.scale == "full" else 1e-5)
    results |= {"built_in": as_json(backend.device), "profile": as_json(device), "complete": True}


def times(visit: Visit, results: Results) -> None:
    from benchmarks.gpu_times import measured_s

    results |= {"seconds": measured_s(1 if visit.scale == "full" else TINY), "complete": True}


def programs(visit: Visit, results: Results) -> None:
    _each_program(visit, "programs", results)


def peaks(visit: Visit, results: Results) -> None:
    _each_program(visit, "peaks", results)


def paper(visit: Visit, results: Results) -> None:
    """The experiments go on where they stopped; with what they have this stage is as complete as their grids."""
    import jax

    on_gpu = jax.default_backend() == "gpu"
    scale = "paper" if visit.scale == "full" else "tiny"
    folder = visit.folder / "paper_repro"
    common = [f"--scale={scale}", f"--device={'gpu' if on_gpu else 'cpu'}", f"--results={folder}", "--at-most=1"]
    names = ("kernel_mvm", "knn", "transformer", "matmul_chains", "sgpr", "sgpr_reach") if visit.scale == "full" else ("matmul_chains",)
    rows: dict[str, list[dict[str, str]]] = results.setdefault("rows", {})
    for name in names:
        while visit.left_s > PATIENCE_S[visit.scale]:
            command = [sys.executable, "-m", "paper_repro", f"--only={name}", *common, f"--timeout={PATIENCE_S[visit.scale]:g}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=max(visit.left_s, 1), check=False)
            before = len(rows.get(name, ()))
            texts = [path.read_text(encoding="utf-8") for path in sorted(folder.rglob(f"{name}.csv"))]
            rows[name] = [row for text in texts for row in csv.DictReader(text.splitlines())]
            results.setdefault("errors", {})[name] = done.stderr[-2000:] if done.returncode else ""
            visit.keep("paper", results)
            if done.returncode or len(rows[name]) == before or visit.scale == "tiny":
                break
        else:
            return
    results["complete"] = not any(results["errors"].values())


def tiles(visit: Visit, results: Results) -> None:
    """Each program as planned with loops and XLA's kernels only, beside the plan that may have tile kernels."""
    _each_program(visit, "tiles", results)


EVERY = (probe, calibrate, times, programs, peaks, paper, tiles)
STAGES: dict[str, Callable[[Visit, Results], None]] = {stage.__name__: stage for stage in EVERY}


# --- programs, each in a process of its own -------------------------------------------------------------

FORMS = {"tiles": ("loops", "plan")}
"""The forms of a program that a stage measures; other stages the program as written beside its plan."""


def _each_program(visit: Visit, stage: str, results: Results) -> None:
    rows: Results = results.setdefault("rows", {})
    for name in visit.names():
        if name in rows:
            continue
        if visit.left_s < PATIENCE_S[visit.scale]:
            return
        rows[name] = _in_a_process(visit, stage, name)
        visit.keep(stage, results)
    results["complete"] = True


def _in_a_process(visit: Visit, stage: str, name: str) -> Results:
    """Compiled programs are kept between processes, so that what is run in the second is not tuned there: tuning takes memory, too."""
    environment = {
        **os.environ,
        "EQSAT_MEM_CACHE_DIR": "none",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(visit.folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    row: Results = {}
    for form in FORMS.get(stage, ("written", "plan")):
        choices = visit.folder / "autotuning" / f"{name}_{form}.txt"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_autotuning(choices)}".strip()
        command = [sys.executable, "-m", "benchmarks.gpu_visit", "--child", stage, name, form, "--scale", visit.scale]
        try:
            limit = min(PATIENCE_S[visit.scale], max(visit.left_s, 1.0))
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit, check=False)
            row[form] = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else {"error": done.stderr[-1000:]}
        except subprocess.TimeoutExpired:
            row[form] = {"error": "given up: took too long"}
        row[form]["autotuning"] = choices.read_text(encoding="utf-8") if choices.exists() else None
    return row


def _autotuning(choices: Path) -> str:
    """The flag by which XLA writes to a file which kernels it has chosen for products, or takes them from there where they are known.

    The file is made by programs that have any; XLA takes it as text because of its name.
    """
    choices.parent.mkdir(parents=True, exist_ok=True)
    return f"--xla_gpu_{'load_autotune_results_from' if choices.exists() else 'dump_autotune_results_to'}={choices.resolve()}"


def measured(stage: str, name: str, form: str, scale: str) -> Results:
    """The figures that one stage finds of one program in this process."""
    import jax

    import eqsat_mem
    from benchmarks.gpu_programs import PROGRAMS
    from eqsat_mem.backends.choose import backend_in_use
    from eqsat_mem.backends.xla import held_bytes
    from eqsat_mem.options import device_capacity

    program = next(p for p in PROGRAMS if p.name == name)
    if scale == "tiny":
        shapes = tuple((tuple(n // TINY if n > TINY else n for n in shape), dtype) for shape, dtype in program.shapes)
        program = replace(program, shapes=shapes, limit_bytes=2**20)
    jax.config.update("jax_enable_x64", program.x64)
    start = time.perf_counter()
    optimised = eqsat_mem.optimize(program.function, memory_limit=program.limit_bytes, tiles=form != "loops")
    plan = optimised.plan(*program.specs())
    row: Results = {"limit": program.limit_bytes, "planning_s": time.perf_counter() - start}
    planned = form != "written"
    row["predicted"] = plan.peak_bytes if planned else plan.original_peak_bytes
    row["predicted_s"] = plan.predicted_s if planned else plan.original_predicted_s
    function = plan.function if planned else lambda *args: jax.tree.leaves(program.function(*args))
    backend = backend_in_use()
    options = dict(plan.compiler_options if planned else backend.compiler_options)
    compiled = jax.jit(function).lower(*program.specs()).compile(options or None)
    row["compiled"] = held_bytes(compiled, backend)
    if row["compiled"] > device_capacity():
        return row | {"status": "does not fit the device"}
    args = jax.block_until_ready(program.arguments())
    out = jax.block_until_ready(compiled(*args))
    if stage == "peaks":
        allocator = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return row | {"deviceless": _deviceless(function, program), "allocator": allocator}
    row["seconds"] = statistics.median(_timed(compiled, args) for _ in range(REPEATS))
    row["sums"] = [float(abs(leaf).sum()) for leaf in jax.tree.leaves(out)]
    if stage == "tiles":
        row["tiles"] = plan.source.count("folded_pairs(") - 1 if "def folded_pairs(" in plan.source else 0
    return row | {"source": plan.source if planned else None}


def _timed(compiled: Any, args: Any) -> float:
    import jax

    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start


def _deviceless(function: Callable[..., Any], program: Any) -> Results | str:
    """Bytes that XLA:GPU holds for the usual card or the one in use, asked without it; the reason where its compiler is missing."""
    from eqsat_mem.backends.choose import backend_in_use
    from eqsat_mem.backends.gpu import deviceless
    from eqsat_mem.backends.gpu.backend import GpuBackend
    from eqsat_mem.backends.gpu.targets import USUAL, named
    from eqsat_mem.errors import DeviceCompilerError

    backend = backend_in_use()
    target = backend.target if isinstance(backend, GpuBackend) else named(USUAL)
    try:
        settings = deviceless.compile_for(function, program.specs(), target).settings
    except DeviceCompilerError as error:
        return str(error)
    return {"card": target.name, **{compiled.setting: compiled.held_bytes for compiled in settings}}


# --- the command ----------------------------------------------------------------------------------------


def stages_left(folder: Path, only: list[str] | None, again: bool) -> Iterator[str]:
    for stage in only or STAGES:
        path = folder / f"{stage}.json"
        if again and path.exists():
            path.unlink()
        if not path.exists() or not json.loads(path.read_text(encoding="utf-8"))["complete"]:
            yield stage


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=[*STAGES], metavar="STAGE")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each stage (default: %(default)g)")
    parser.add_argument("--scale", choices=PATIENCE_S, default="full")
    parser.add_argument("--again", action="store_true", help="forget what these stages have")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(measured(*options.child, options.scale)))
        return 0
    incomplete = []
    for stage in stages_left(options.results, options.only, options.again):
        visit = Visit(options.results, options.scale, time.monotonic() + options.seconds)
        results = visit.kept(stage)
        print(f"{stage} ...", flush=True)
        try:
            STAGES[stage](visit, results)
        except Exception as error:  # the stages after it are worth having
            results["error"] = f"{type(error).__name__}: {error}"
        visit.keep(stage, results)
        if not results["complete"]:
            incomplete.append(stage)
    print(f"results are in {options.results}" + (f"; run it again for {', '.join(incomplete)}" if incomplete else ""))
    return bool(incomplete)


if __name__ == "__main__":
    sys.exit(main())
