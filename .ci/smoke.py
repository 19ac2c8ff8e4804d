"""What an installed package must do without its repository: plan, run, keep to a limit, differentiate, speak on the command line."""

import re
import subprocess
from importlib.metadata import metadata, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import eqsat_mem

LIMIT = 4 * 2**20


def matvec(x, y, v):
    """The product of the Gaussian kernel matrix of (n, d) and (m, d) with (m,)."""
    return jnp.exp(-0.5 * jnp.sum((x[:, None] - y[None]) ** 2, axis=-1)) @ v


assert eqsat_mem.__version__ == version("eqsat-mem")
assert Path(eqsat_mem.__file__).parent.parent.name == "site-packages", "this is the repository, not the package"

rng = np.random.default_rng(0)
x, y = rng.standard_normal((2, 2_000, 3), dtype=np.float32)
v = rng.standard_normal(2_000, dtype=np.float32)
fast = eqsat_mem.optimize(matvec, memory_limit=LIMIT)
plan = fast.plan(x, y, v)
print(plan)
assert plan.compiled_peak_bytes <= LIMIT < plan.original_peak_bytes
np.testing.assert_allclose(fast(x, y, v), matvec(*map(np.float64, (x, y, v))), rtol=1e-3, atol=1e-3)
slope = jax.grad(lambda x: jnp.sum(fast(x, y, v) ** 2))(x)
right = jax.grad(lambda x: jnp.sum(matvec(x, y, v) ** 2))(x)
np.testing.assert_allclose(slope, right, rtol=1e-3, atol=1e-3 * np.abs(right).max())

Path("kernel.py").write_text(
    "import jax, jax.numpy as jnp\n"
    "def matvec(x, v):\n    return jnp.exp(-jnp.sum((x[:, None] - x[None]) ** 2, -1)) @ v\n"
    "def make_args():\n    return jnp.ones((2000, 3)), jnp.ones(2000)\n"
)
Path("script.py").write_text("import jax, kernel\nprint(float(jax.jit(kernel.matvec)(*kernel.make_args())[0]))\n")
for command in (
    "eqsat-mem --version",
    "eqsat-mem rules",
    "eqsat-mem plan kernel.py:matvec --args kernel.py:make_args --limit 4MiB",
    "eqsat-mem report kernel.py:matvec --args kernel.py:make_args --limit 4MiB -o report.html",
    "python -m eqsat_mem run --memory-limit 4MiB script.py",
):
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)
    print(f"{command}: {len(done.stdout)} characters")
assert "<html" in Path("report.html").read_text(encoding="utf-8")

described = metadata("eqsat-mem").get_payload() or metadata("eqsat-mem")["Description"]
prose = re.sub(r"^```.*?^```", "", described, flags=re.MULTILINE | re.DOTALL)
dangling = [link for link in re.findall(r"\]\(([^)\s]*)\)", prose) if not re.match(r"https?://|#", link)]
assert "memory limit" in described
assert not dangling, f"links that lead nowhere on an index: {dangling}"
print("the package stands alone")
