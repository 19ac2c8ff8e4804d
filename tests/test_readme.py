"""The README's Python runs."""

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_examples_of_the_readme_run(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    scope = {"__name__": "readme"}
    for number, block in enumerate(blocks, 1):
        emitted = "fori_loop" in block  # it has the name of the function that it is made from
        exec(compile(block, f"README.md, block {number}", "exec"), dict(scope) if emitted else scope)
    assert "peak" in capsys.readouterr().out
    assert scope["out"].shape == (3000, 1)
