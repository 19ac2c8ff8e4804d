"""The pages on other frameworks: their examples run in processes of their own, since those frameworks set up JAX and threads."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_run import python, run
from tests.test_readme import blocks

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def needs(package, extra):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[{extra}]'")


@pytest.mark.slow
def test_modules_of_pytorch_and_their_gradients_are_planned(tmp_path):
    needs("torchax", "torch")
    page = "from pathlib import Path\nfrom tests.test_readme import run_examples\nrun_examples(Path({!r}))"
    process = python("-c", page.format(str(DOCS / "pytorch.md")), cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "(Attention.forward, in " in process.stdout  # where the tensors at the peak are made


@pytest.mark.thorough
def test_the_steps_of_keras_are_planned(tmp_path):
    needs("keras", "libraries")
    ((_, script),) = blocks(DOCS / "keras.md", "script")
    (tmp_path / "train.py").write_text(script)
    plain = python("train.py", cwd=tmp_path)
    ours, said = run("--memory-limit", "8MiB", "--report", "report.json", "train.py", cwd=tmp_path)
    assert plain.returncode == ours.returncode == 0, plain.stderr + ours.stderr + said
    entries = json.loads((tmp_path / "report.json").read_text())["functions"]
    assert [entry["outcome"] for entry in entries] == ["planned"] * 3, said
    assert [entry["function"].rpartition(".")[2] for entry in entries] == ["train_step", "test_step", "predict_step"]
    assert all(entry["peak_bytes"] <= entry["limit_bytes"] < entry["original_peak_bytes"] for entry in entries)
    values = [[float(word) for word in process.stdout.split() if word[0] in "-0123456789"] for process in (ours, plain)]
    assert len(values[0]) == 7
    np.testing.assert_allclose(*values, rtol=1e-3)


@pytest.mark.slow
def test_functions_of_keras_models_are_planned(tmp_path):
    needs("keras", "libraries")
    code = "".join(block for label in ("script", "in keras") for _, block in blocks(DOCS / "keras.md", label))
    process = python("-c", code, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
