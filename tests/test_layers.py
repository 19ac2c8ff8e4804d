"""The shape of the source: rooms import one way, names and docstrings say what they are of, and nothing names a machine."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "eqsat_mem"

ALLOWED = {
    "units": "",
    "garbage": "",
    "errors": "units",
    "error_table": "",
    "deadline": "",
    "events": "",
    "options": "errors units",
    "passes": "",
    "ir": "errors",
    "frontend": "ir passes",
    "egraph": "deadline errors events frontend ir passes units",
    "egraph.soundness": "egraph errors frontend ir",
    "transforms": "egraph frontend ir passes",
    "schedule": "deadline egraph errors events frontend ir",
    "mesh": "deadline egraph ir schedule transforms",
    "codegen": "egraph frontend ir schedule",
    "backends.hlo": "",
    "backends.cpu": "backends.hlo egraph frontend ir schedule",
    "backends.gpu": "backends.hlo egraph errors frontend ir schedule",
    "backends": "backends.cpu backends.gpu backends.hlo errors ir schedule",
    "stablehlo": "backends.cpu errors frontend ir",
    "reports": "deadline egraph errors events frontend ir options passes schedule transforms units",
    "ranking": "reports schedule",
    "equal_programs": "deadline egraph events ir mesh schedule transforms",
    "searches": "deadline equal_programs options ranking reports schedule transforms",
    "candidates": "deadline egraph equal_programs events frontend ir mesh options passes ranking reports schedule searches transforms",
    "request": "backends codegen deadline egraph errors events ir options schedule",
    "verification": "backends candidates codegen egraph errors events ir passes ranking reports request schedule searches transforms units",
    "tuning": "deadline events ir reports request schedule searches verification",
    "pipeline": "backends candidates deadline errors events frontend garbage ir options passes reports request schedule searches "
    "transforms tuning verification",
    "api": "backends egraph error_table errors frontend garbage ir options pipeline reports request schedule tuning units",
    "cli": "api backends backends.gpu codegen egraph egraph.soundness error_table errors frontend ir options passes reports schedule "
    "stablehlo units",
    "testing": "",
    "__main__": "api backends cli error_table errors options reports stablehlo units",
}
"""The rooms in the order in which a program visits them, and those that each may import from."""

LONGEST_FILE = 400


def modules():
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room(name):
    """The room of a dotted module name below the package; a room inside another is one of its own."""
    parts = name.split(".")
    return next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in ALLOWED), parts[0])


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


def forbidden(name, text):
    """The imports of a module from rooms that its own may not import from."""
    own = room(name)
    return [other for other in imports(name, text) if room(other) != own and room(other) not in ALLOWED[own].split()]


def dotted(path):
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_rooms_import_what_they_may(path):
    name = dotted(path)
    assert room(name) in ALLOWED, f"{name} is in no room of ALLOWED"
    assert forbidden(name, path.read_text()) == []


def test_rooms_form_no_circle():
    order = list(ALLOWED)
    upward = {(own, other) for own, others in ALLOWED.items() for other in others.split() if order.index(other) >= order.index(own)}
    assert upward == set()


def test_every_permission_is_used():
    used = {name: set() for name in ALLOWED}
    for path in modules():
        used[room(dotted(path))].update(map(room, imports(dotted(path), path.read_text())))
    unused = {name: set(ALLOWED[name].split()) - others for name, others in used.items()}
    assert {name: sorted(others) for name, others in unused.items() if others} == {}


def test_a_forbidden_import_is_seen():
    assert forbidden("ir.program", "from eqsat_mem.frontend.load import load") == ["frontend.load.load"]
    assert forbidden("errors", "def f():\n    import eqsat_mem.options") == ["options"]
    assert forbidden("ir.ops.elementwise", "from eqsat_mem import api, errors") == ["api"]
    assert forbidden("frontend.load", "from ..api.optimize import optimize") == ["api.optimize.optimize"]
    assert forbidden("ir.ops.elementwise", "from .monoids import MONOIDS\nfrom ..program import Program\nfrom . import blocks") == []
    assert forbidden("frontend.load", "from eqsat_mem.ir import Program\nimport jax") == []


def test_benchmarks_measure_the_package_and_the_paper_measures_with_the_benchmarks():
    below = {"eqsat_mem": ("benchmarks", "paper_repro", "tests"), "benchmarks": ("paper_repro",)}
    importing = re.compile(r"^\s*(?:from|import) (\w+)", re.MULTILINE)
    paths = [(folder, path) for folder in below for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [(path.name, name) for folder, path in paths for name in importing.findall(path.read_text()) if name in below[folder]]
    assert found == []
    assert "benchmarks" in importing.findall((ROOT / "paper_repro" / "knn.py").read_text())


def test_only_one_module_knows_egglog():
    knowing = [dotted(path) for path in modules() if re.search(r"^\s*(?:import|from) egglog", path.read_text(), re.MULTILINE)]
    assert set(knowing) <= {"egraph.engine"}


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_files_stay_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{dotted(path)} has {lines} lines: split it by subject"


def test_no_two_classes_share_a_name():
    places = {}
    for path in modules():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(dotted(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def headless(text):
    """The docstrings of a module that begin as a question does, or ask one, in their first sentence."""
    asks = re.compile(r"(?:What|How|Which|Where|Why|Who|Is|Are|Does|Do|May)\b[^.:]*[.:?]|[^.]*\?(?:\s|$)")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, documented))
    return [said for said in found if said and asks.match(said)]


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_docstrings_name_their_subject(path):
    assert headless(path.read_text()) == []


def test_a_docstring_without_a_subject_is_seen():
    assert headless('def f():\n    """What is held."""\n') == ["What is held."]
    assert headless('def f():\n    """A value is held?"""\n') == ["A value is held?"]
    assert headless('class A:\n    """The bytes that are held."""\n') == []


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


def test_only_backends_know_the_libraries_of_a_compiler():
    words = re.compile("xla:cpu|lapack|avx|kernel library|openblas", re.IGNORECASE)
    elsewhere = [path for path in modules() if path.relative_to(PACKAGE).parts[0] != "backends"]
    assert not [str(path.relative_to(PACKAGE)) for path in elsewhere if words.search(path.read_text(encoding="utf-8"))]
