"""The shape of the source: imports run one way, files stay short, and nothing names a machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "eqsat_mem"

LAYERS = (
    "sizes errors config events",
    "terms ir ops equations diagonal picked plain flatten axes infer effects trace interpret",
    "forms vocabulary grammar rules precision encode egraph saturate exact levels unfold extract chains absorbed",
    "lookups repeats scans staging vectors costs tree loops fusion columns memory profiles calibrate timing ladders schedule remat control",
    "source reads calls expressions emit scratch verify report outline",
    "debug progress needed rivals explanation timeline picture explain searching pipeline",
    "show premises instances sequential claims pieces soundness counterexample samples",
    "page manual function primitive compiling api demo userfile ledger jitted script unmodified commands __main__",
)
ORDER = [name for line in LAYERS for name in line.split()]
"""Modules in the order of the dataflow; each imports only those before it."""

LONGEST_FILE = 400


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer(name):
    """The place in ORDER of a dotted module name below the package; `ops.maps` stands where `ops` does."""
    return ORDER.index(name.split(".")[0])


def imports(name, text):
    """The modules of the package that a module imports, anywhere in its text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{source(name, node)}.{alias.name}" for alias in node.names]
        else:
            continue
        for full in found:
            package, _, inside = full.partition(".")
            if package == "eqsat_mem" and inside != "__version__":
                yield inside


def source(name, node):
    """The absolute name of what an import statement in a module imports from."""
    if node.level == 0:
        return node.module
    above = ["eqsat_mem", *name.split(".")][: -node.level]
    return ".".join([*above, *([node.module] if node.module else [])])


def upward(name, text):
    """The imports of a module that reach up, or sideways within a layer other than a package's own."""
    own = name.split(".")[0]
    return [other for other in imports(name, text) if other.split(".")[0] != own and layer(other) >= layer(name)]


def dotted(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_run_one_way(path):
    name = dotted(path)
    assert name.split(".")[0] in ORDER, f"{name} has no place in ORDER"
    assert upward(name, path.read_text()) == []


def test_an_upward_import_is_seen():
    assert upward("ir", "from eqsat_mem.frontend.load import load") == ["trace.load"]
    assert upward("errors", "def f():\n    import eqsat_mem.options") == ["config"]
    assert upward("ops.maps", "from eqsat_mem import api, errors") == ["api"]
    assert upward("ops.maps", "from ..api import optimize") == ["api.optimize"]
    assert upward("ops.maps", "from .monoids import MONOIDS\nfrom ..ir import Term\nfrom . import blocks") == []
    assert upward("trace", "from eqsat_mem.ir.program import Program\nimport jax") == []


def test_every_layer_exists():
    missing = [name for name in ORDER if not ((PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists())]
    assert missing == []


def test_only_one_module_knows_egglog():
    knowing = [dotted(path) for path in modules() if re.search(r"^\s*(?:import|from) egglog", path.read_text(), re.MULTILINE)]
    assert set(knowing) <= {"egraph"}


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_files_stay_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{dotted(path)} has {lines} lines: split it by subject"


def project_files():
    """Every file that is in version control or may enter it, or that lies here where there is none."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("this is not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name]


def test_no_file_names_a_path_of_one_machine():
    absolute = re.compile(r"(?<![\w.:/>*-])/(?:home|root|Users|work|mnt|opt)/\w")
    named = []
    for path in project_files():
        try:
            text = path.read_text()
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
        named += [f"{path.relative_to(ROOT)}: {line.strip()[:80]}" for line in text.splitlines() if absolute.search(line)]
    assert named == []
