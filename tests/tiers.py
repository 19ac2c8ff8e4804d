"""The two tiers of tests: ``make test`` runs those that are not marked ``slow``, ``make test-all`` runs all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Cases of a parametrisation, all of which but those in ``quick`` are of the second tier."""
    cases = list(cases)
    unknown = [case for case in quick if case not in cases]
    assert not unknown, f"no case of the parametrisation: {unknown}"
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases
    ]
