"""Which of several plans on a mesh is taken: bytes that devices receive count before seconds that are close."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from eqsat_mem.deadline import NEVER
from eqsat_mem.ranking import ROUGHLY, better
from eqsat_mem.reports import outline
from eqsat_mem.searches import with_search

LIMIT = 100


@dataclass(eq=False)
class Plan:
    seconds: float
    received: int
    peak_bytes: int = LIMIT
    ex = SimpleNamespace(program=SimpleNamespace(shares=True))

    def fits(self, limit):
        return self.peak_bytes <= limit


@dataclass(eq=False)
class Planned:
    """A search that finds a plan."""

    plan: Plan
    limit: int = LIMIT
    deadline = NEVER

    def with_limit(self, limit, deadline):
        return self

    def simplified(self, plan):
        return plan


@pytest.fixture(autouse=True)
def known_bytes(monkeypatch):
    monkeypatch.setattr(outline, "received_bytes", lambda plan: plan.received)


def test_less_is_received_where_that_takes_roughly_as_long():
    fast, close, slow = Plan(1.0, 100), Plan(1 + 0.9 * ROUGHLY, 10), Plan(1 + 1.1 * ROUGHLY, 10)
    assert better(fast, close, LIMIT) is close
    assert better(slow, fast, LIMIT) is fast
    assert better(fast, Plan(1 + 0.9 * ROUGHLY, 10, LIMIT + 1), LIMIT) is fast


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_plans_each_a_little_slower_than_the_one_before_lead_to_no_slow_one(order):
    plans = [Plan((1 + 0.8 * ROUGHLY) ** k, 100 - 10 * k) for k in range(4)]
    searches = [Planned(plans[k]) for k in order]
    best, of = with_search(searches, lambda search, _: search.plan)
    assert best.seconds <= plans[0].seconds * (1 + ROUGHLY)
    assert of.plan is best
