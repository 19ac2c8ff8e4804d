"""The README's Python runs."""

import re
import tomllib
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
    assert scope["out"].shape == (10_000, 1)


def test_the_emitted_program_of_the_readme_stands_alone():
    ((_, block),) = blocks(README, "emitted")
    scope = {}
    exec(compile(block, "README.md, emitted", "exec"), scope)
    points, weights = (jax.ShapeDtypeStruct((122_880, n), jnp.float32) for n in (3, 1))
    (out,) = jax.eval_shape(scope["matvec"], points, points, weights)
    assert (out.shape, out.dtype) == (weights.shape, weights.dtype)


def test_what_an_index_shows_of_the_readme_has_no_relative_link():
    written = tomllib.loads((README.parent / "pyproject.toml").read_text(encoding="utf-8"))
    shown = README.read_text(encoding="utf-8")
    for change in written["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        shown = re.sub(change["pattern"], change["replacement"], shown)
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", shown) == []
    assert "docs/memory.md" in shown
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    assert code.findall(shown) == code.findall(README.read_text(encoding="utf-8"))
