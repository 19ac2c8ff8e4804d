"""The examples of the page on several devices run."""

from pathlib import Path

from tests.test_readme import run_examples

PAGE = Path(__file__).resolve().parents[2] / "docs" / "several-devices.md"


def test_the_examples_run(capsys):
    run_examples(PAGE)
    assert "over x (8 devices)" in capsys.readouterr().out
