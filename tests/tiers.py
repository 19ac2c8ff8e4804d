"""The tiers of tests: ``make test`` runs those without a mark, ``make test-slow`` those marked ``slow``, ``make test-all`` runs all.

CI runs these two. The third tier, marked ``thorough``, has more cases of what the others try.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], quick: Collection[Any], slow: Collection[Any] | None = None) -> list[Any]:
    """Cases of a parametrisation: those in ``quick`` are of the first tier, those in ``slow`` of the second, which are all others where it
    is not given, and the rest are of the third."""
    cases = list(cases)
    unknown = [case for case in (*quick, *(slow or ())) if case not in cases]
    assert not unknown, f"no case of the parametrisation: {unknown}"

    def marked(case: Any) -> Any:
        if case in quick:
            return case
        mark = pytest.mark.slow if slow is None or case in slow else pytest.mark.thorough
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)

    return [marked(case) for case in cases]
