"""The README's Python runs."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(path, label=""):
    """The code of a page's fenced blocks that begin with ``python`` and then ``label``, numbered."""
    head = f"python {label}".rstrip()
    return enumerate(re.findall(rf"^```{head}\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL), 1)


def run_examples(path):
    """Run a page's Python blocks in one scope, from top to bottom; give the scope."""
    scope = {"__name__": path.stem}
    for number, block in blocks(path):
        exec(compile(block, f"{path.name}, block {number}", "exec"), scope)
    return scope


@pytest.mark.slow
def test_the_examples_of_the_readme_run(capsys):
    scope = run_examples(README)
    assert "peak" in capsys.readouterr().out
    assert scope["out"].shape == (3000, 1)


def test_the_emitted_program_of_the_readme_stands_alone():
    ((_, block),) = blocks(README, "emitted")
    scope = {}
    exec(compile(block, "README.md, emitted", "exec"), scope)
    points, weights = (jax.ShapeDtypeStruct((122_880, n), jnp.float32) for n in (3, 1))
    (out,) = jax.eval_shape(scope["matvec"], points, points, weights)
    assert (out.shape, out.dtype) == (weights.shape, weights.dtype)
