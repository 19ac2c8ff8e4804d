"""Plans kept between processes, in the user's cache folder: the second start of a script loads them instead of planning again.

A file holds one plan: its source, figures and closed-over arrays. Its name is a hash of everything that the plan depends on: the traced
function with its constants and the user's lines, options, the limit, the rules in force, the backend with its profile, JAX's settings, and
the versions and files of the packages. Loading skips the search and the check of the compiled program, which JAX compiles as ever. The
search itself is not kept: explaining such a plan makes it once more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from eqsat_mem import __version__
from eqsat_mem.api.saved_plans import taken_up
from eqsat_mem.backends.profiles import user_folder
from eqsat_mem.egraph.rule_files import default_files, load_rules
from eqsat_mem.frontend.fingerprint import fingerprint
from eqsat_mem.frontend.stable import Unstable, stable
from eqsat_mem.reports.plan import Plan
from eqsat_mem.reports.plan_files import is_storable, packed, parts, unpacked
from eqsat_mem.request import Request

VARIABLE = "EQSAT_MEM_CACHE_DIR"
"""The environment variable with the folder of kept plans to use instead of the user's cache folder; ``none`` keeps no plans."""
MOST_FILES = 1000
"""Plans that are kept; the oldest go first."""
TELLING = ("cache", "debug", "dump", "log", "pprint", "profil", "traceback")
"""Words in the names of JAX's settings on which no program depends."""


def folder() -> Path | None:
    """The folder of kept plans: ``EQSAT_MEM_CACHE_DIR``, or else one in the platform's cache folder; None if no plans are kept."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen:
        return None if chosen.lower() == "none" else Path(chosen)
    return user_folder() / "plans"


@dataclass(frozen=True)
class KeptPlan:
    """The place of one plan.

    Attributes:
        path: the file, whether or not it exists.
        key: the hash of everything that the plan depends on.
    """

    path: Path
    key: str

    def load(self, request: Request, again: Callable[[Plan], Plan]) -> Plan | None:
        """The kept plan, if there is one; ``again`` makes it once more without this entry.

        A file that is damaged or not ours is left out, with a warning.
        """
        start = time.perf_counter()
        try:
            data = self.path.read_bytes()
        except OSError:
            return None
        try:
            if _is_writable_by_others(self.path):
                raise ValueError("others may write it")
            header, payload = parts(data)
            if header["key"] != self.key:
                raise ValueError("its content is not what its name says")
            plan = unpacked(header, payload)
        except Exception as reason:  # whatever a damaged file makes Python raise
            warnings.warn(f"the kept plan {self.path} is ignored ({reason}): eqsat-mem cache --clear removes all.", stacklevel=2)
            return None
        return taken_up(replace(plan, seconds={"cache": time.perf_counter() - start}), request, again)

    def store(self, plan: Plan) -> None:
        """Keep a plan, for this process and others.

        A plan that time cut short (before two were measured, where it was tuned), or that no compiler has checked for once, is not kept,
        nor one whose source names more than arrays.
        """
        unchecked = plan.compiled_peak_bytes is None and bool(plan.doubts)
        untold = plan.tuning is not None and plan.tuning.struck and len(plan.tuning.plans) < 2
        if plan.planning_bound_s is not None or untold or unchecked or not is_storable(plan):
            return
        try:
            data = packed(plan, key=self.key)
        except (TypeError, pickle.PicklingError):  # arrays of keys
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix="new-", delete=False) as file:
                file.write(data)
            os.replace(file.name, self.path)  # others see the whole file or none
            for path in _files(self.path.parent)[MOST_FILES:]:
                path.unlink(missing_ok=True)
        except OSError as reason:
            warnings.warn(f"no plans are kept in {self.path.parent} ({reason.strerror}): {VARIABLE}=none says so.", stacklevel=2)


def entry(request: Request) -> KeptPlan | None:
    """The place for the plan of a request; None where no plans are kept, or nothing tells whether two processes ask for the same."""
    home = folder()
    if home is None or request.placement is not None or request.options.operations:
        return None
    try:
        key = hashlib.sha256("\n".join(_texts(request)).encode()).hexdigest()
    except Unstable:
        return None
    return KeptPlan(home / f"{key}.plan", key)


# --- keys ---------------------------------------------------------------------------------------------


def _texts(request: Request) -> Iterator[str]:
    """Everything that a plan depends on, as text that is the same in every process."""
    options = request.options
    yield from _versions()
    yield repr((_settings(), jax.default_backend(), os.environ.get("XLA_FLAGS")))
    yield repr((request.name, request.arg_names, request.limit, request.taken, request.shared_bytes, os.cpu_count()))
    yield stable({f.name: getattr(options, f.name) for f in fields(options) if f.name != "max_planning_seconds"})
    yield stable((request.backend, dict(request.backend.compiler_options)))
    yield from (text for _, text in load_rules(options.rules, options.accuracy, options.only_rules, options.without_rules).texts())
    yield stable(fingerprint(request.jaxpr))


def _settings() -> list[tuple[str, Any]]:
    """The settings of JAX that hold here, but those that only decide what it tells and keeps."""
    names = [name for name in sorted(jax.config.values) if not any(word in name for word in TELLING)]
    return [(name, getattr(jax.config, name, jax.config.values[name])) for name in names]


@lru_cache(maxsize=1)
def _versions() -> tuple[str, ...]:
    """The versions of what plans with, and a hash of this package's files."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in [*sorted(package.rglob("*.py")), *map(Path, default_files())]:
        digest.update(path.read_bytes())
    names = ("jax", "jaxlib", "egglog", "numpy", "opt_einsum")
    return sys.version, platform.machine(), *map(version, names), __version__, digest.hexdigest()


# --- files --------------------------------------------------------------------------------------------


def _is_writable_by_others(path: Path) -> bool:
    """Whether somebody else could have put a file there: it holds code."""
    if not hasattr(os, "getuid"):
        return False
    known = (path.stat(), path.parent.stat())
    return any(s.st_uid not in (os.getuid(), 0) or s.st_mode & 0o022 for s in known)


def _files(home: Path) -> list[Path]:
    """The files of kept plans, newest first."""
    dated = []
    for path in home.glob("*.plan"):
        with contextlib.suppress(OSError):  # another process has removed it
            dated.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(dated, reverse=True)]


def listed() -> list[tuple[Path, dict[str, Any]]]:
    """The files of kept plans, newest first, with what their headers say; nothing of those that cannot be read."""
    home, found = folder(), []
    for path in [] if home is None else _files(home):
        try:
            header = parts(path.read_bytes())[0]
        except (OSError, ValueError):
            header = {}
        found.append((path, header))
    return found


def clear() -> int:
    """Remove all kept plans, and return how many there were."""
    home = folder()
    paths = [] if home is None else [*_files(home), *home.glob("new-*")]
    for path in paths:
        path.unlink(missing_ok=True)
    return sum(path.suffix == ".plan" for path in paths)
