"""Give a JAX function a memory limit: get back the fastest equivalent program that fits it.

The public names are imported on first use, so that importing the package takes almost no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eqsat_mem.garbage import without_collections

if TYPE_CHECKING:
    from eqsat_mem.api.optimize import optimize
    from eqsat_mem.backends.xla import compiled_peak
    from eqsat_mem.egraph.rule_files import load_rules
    from eqsat_mem.errors import EqsatMemError, MemoryLimitError, OptionError, RuleError, StableHLOError
    from eqsat_mem.ir.ops import Monoid, Operation
    from eqsat_mem.reports.page import page
    from eqsat_mem.reports.plan import Plan
    from eqsat_mem.stablehlo.read import from_stablehlo
    from eqsat_mem.testing import same_values

__version__ = "0.2.0"

__all__ = [
    "EqsatMemError",
    "MemoryLimitError",
    "Monoid",
    "Operation",
    "OptionError",
    "Plan",
    "RuleError",
    "StableHLOError",
    "__version__",
    "compiled_peak",
    "from_stablehlo",
    "load_rules",
    "optimize",
    "page",
    "same_values",
]

_HOMES = {
    "EqsatMemError": "errors",
    "MemoryLimitError": "errors",
    "Monoid": "ir.ops",
    "Operation": "ir.ops",
    "OptionError": "errors",
    "Plan": "reports.plan",
    "RuleError": "errors",
    "StableHLOError": "errors",
    "compiled_peak": "backends.xla",
    "from_stablehlo": "stablehlo.read",
    "load_rules": "egraph.rule_files",
    "optimize": "api.optimize",
    "page": "reports.page",
    "same_values": "testing",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with without_collections():
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
