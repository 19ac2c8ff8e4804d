"""Jobs of several processes on this machine: each case is a function that all of them run.

``start(case)`` runs one with two processes of four devices each and returns what they printed; ``python -m tests.oracles.processes CASE
PORT PROCESS`` is one of them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSES, DEVICES = 2, 4
LATE_S = 5.0
"""How long the late process waits, in seconds."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port: int = s.getsockname()[1]
        return port


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu", **more}


def start(case: str, timeout: float = 240.0) -> list[tuple[int, dict[str, Any], str]]:
    """The exit status of each process, the last line that it has printed as JSON, and its errors. None outlives the time."""
    port = str(free_port())
    commands = [["-m", "tests.oracles.processes", case, port, str(p)] for p in range(PROCESSES)]
    found = run_together(commands, [environment()] * PROCESSES, timeout)
    lines = [[line for line in out.splitlines() if line.startswith("{")] for _, out, _ in found]
    return [(status, json.loads(own[-1]) if own else {}, errors[-4000:]) for (status, _, errors), own in zip(found, lines, strict=True)]


def start_under_slurm(path: Path, timeout: float = 240.0) -> list[tuple[int, str, str]]:
    """The exit status, output and errors of each process that runs a program as Slurm would start it twice on this machine."""
    job = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(PROCESSES),
        "JAX_COORDINATOR_PORT": str(free_port()),
    }
    environments = [environment(**job, SLURM_PROCID=str(p), SLURM_LOCALID=str(p)) for p in range(PROCESSES)]
    return run_together([[str(path)]] * PROCESSES, environments, timeout)


def run_together(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]], timeout: float) -> list[tuple[int, str, str]]:
    """The exit status, output and errors of Python processes that run at once; none outlives the time."""
    running = [
        subprocess.Popen([sys.executable, *command], cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command, own in zip(commands, environments, strict=True)
    ]
    found, end = [], time.monotonic() + timeout
    try:
        for process in running:
            out, errors = process.communicate(timeout=max(end - time.monotonic(), 1.0))
            found.append((process.returncode, out, errors))
    finally:
        for process in running:
            process.kill()
    return found


# --- cases ----------------------------------------------------------------------------------------------


def matvec(x: Any, y: Any, v: Any) -> Any:
    import jax.numpy as jnp

    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


def _mesh() -> Any:
    import jax
    from jax.sharding import AxisType

    return jax.make_mesh((PROCESSES * DEVICES,), ("x",), axis_types=(AxisType.Auto,))


def _global(array: Any, mesh: Any) -> Any:
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P("x")), lambda where: array[where])


def _inputs(mesh: Any) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    here = [rng.standard_normal(shape).astype(np.float32) for shape in ((1024, 3), (512, 3), (512, 2))]
    return here, [_global(array, mesh) for array in here]


def agree() -> dict[str, Any]:
    """Values and gradients of global arrays, and the plans' sources; process 1 has a device profile of its own, which is not used."""
    import hashlib

    import jax
    import jax.numpy as jnp
    import numpy as np

    from eqsat_mem import optimize

    mesh = _mesh()
    here, there = _inputs(mesh)
    f = optimize(matvec, memory_limit="512KiB", mesh=mesh)
    plan = f.plan(*there)
    out = f(*there)
    want = np.asarray(matvec(*here))
    worst = max(float(np.abs(np.asarray(s.data) - want[s.index]).max()) for s in out.addressable_shards)
    loss = lambda x, y, v: jnp.sum(f(x, y, v) ** 2)  # noqa: E731
    slope = jax.grad(loss)(*there)
    exact = np.asarray(jax.grad(lambda x, y, v: jnp.sum(matvec(x, y, v) ** 2))(*here))
    steep = max(float(np.abs(np.asarray(s.data) - exact[s.index]).max()) for s in slope.addressable_shards)
    return {
        "source": hashlib.sha256(plan.source.encode()).hexdigest(),
        "worst": worst / float(np.abs(want).max()),
        "steep": steep / float(np.abs(exact).max()),
        "global": not out.is_fully_addressable,
        "fits": plan.compiled_peak_bytes <= plan.limit_bytes,
        "far": sorted(plan.schedule.ex.program.shares.devices.far),
    }


def limits() -> dict[str, Any]:
    """Each process names a limit of its own."""
    import jax

    return _refusal(matvec, memory_limit=f"{512 + jax.process_index()}KiB")


def functions() -> dict[str, Any]:
    """Each process plans a function of its own."""
    import jax

    other = lambda x, y, v: matvec(x, y, v) + 1.0  # noqa: E731
    return _refusal(other if jax.process_index() else matvec, memory_limit="512KiB")


def profiles() -> dict[str, Any]:
    """Each process names the file of a profile, and these differ."""
    import tempfile
    from dataclasses import replace

    import jax

    from eqsat_mem.backends.choose import backend_in_use
    from eqsat_mem.backends.profiles import as_json

    device = backend_in_use().device
    other = replace(device, matrix_cores=device.matrix_cores + 1) if jax.process_index() else device
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        path.write_text(json.dumps(as_json(other)))
        return _refusal(matvec, memory_limit="512KiB", device=str(path))


def failing() -> dict[str, Any]:
    """One process cannot plan: the other is told."""
    import jax

    from eqsat_mem import pipeline

    if jax.process_index():

        def fail(*args: Any, **options: Any) -> Any:
            raise RuntimeError("nothing is left of the disk")

        pipeline.plan = fail
    return _refusal(matvec, memory_limit="512KiB")


def late() -> dict[str, Any]:
    """One process is late, to plan and to run: the other waits. The gradient's sums are wanted in shares."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from eqsat_mem import optimize

    mesh = _mesh()
    here, there = _inputs(mesh)
    f = optimize(jax.grad(lambda x, y, v: jnp.sum(matvec(x, y, v) ** 2), (1, 2)), memory_limit="512KiB", mesh=mesh)
    _wait()
    plan = f.plan(*there)
    _wait()
    want = jax.grad(lambda x, y, v: jnp.sum(matvec(x, y, v) ** 2), (1, 2))(*here)
    worst = 0.0
    for got, exact in zip(f(*there), map(np.asarray, want), strict=True):
        differ = max(float(np.abs(np.asarray(s.data) - exact[s.index]).max()) for s in got.addressable_shards)
        worst = max(worst, differ / float(np.abs(exact).max()))
    return {"worst": worst, "kinds": sorted({sent.kind for sent in plan.collectives})}


def _wait() -> None:
    import jax

    time.sleep(LATE_S * jax.process_index())


def dying() -> dict[str, Any]:
    """One process ends before it plans: the other ends too, as JAX has it."""
    import jax

    if jax.process_index():
        os._exit(3)
    return _refusal(matvec, memory_limit="512KiB")


def _refusal(function: Any, **options: Any) -> dict[str, Any]:
    from eqsat_mem import optimize

    mesh = _mesh()
    _, there = _inputs(mesh)
    start = time.monotonic()
    try:
        optimize(function, mesh=mesh, **options)(*there)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": None}


def main() -> int:
    case, port, process = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if case == "agree" and process:
        os.environ["EQSAT_MEM_PROFILES"] = _other_profiles()
    import jax

    jax.distributed.initialize(f"localhost:{port}", PROCESSES, process, heartbeat_timeout_seconds=10)
    sys.stdout.write(json.dumps(globals()[case]()) + "\n")
    return 0


def _other_profiles() -> str:
    """A folder with a profile of this machine as if it had four times the cores."""
    import tempfile

    code = (
        "from dataclasses import replace; from eqsat_mem.backends.choose import backend_in_use;"
        "from eqsat_mem.backends.profiles import keep; d = backend_in_use().device;"
        "keep(replace(d, matrix_cores=4 * d.matrix_cores, flops=4 * d.flops, elements=9 * d.elements))"
    )
    folder = tempfile.mkdtemp()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(EQSAT_MEM_PROFILES=folder), check=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
