"""Ranks of plans by predicted and by measured times, compared, and what tuning gains: ``python -m benchmarks.ranks``

For each program, schedules that the search looks at (other splits, other chunks) are run, and Spearman's rank correlation of predicted
with measured times is reported, under the profile in use (``eqsat-mem calibrate``, or the built-in one). The plan that ``optimize``
chooses by measuring takes turns with them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import jax

import eqsat_mem
from benchmarks.measuring import prepare, take_turns
from benchmarks.programs import BENCHMARKS, Benchmark
from benchmarks.racing import Question, Row, main, markdown
from eqsat_mem.backends.choose import backend_in_use
from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, as_written, extract
from eqsat_mem.egraph.rule_files import load_rules
from eqsat_mem.egraph.saturate import saturate
from eqsat_mem.equal_programs import MEMORY_PRICES
from eqsat_mem.frontend.load import load
from eqsat_mem.ir.loop_tree import Loop
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.chunk_sizes import ladder
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import Search
from eqsat_mem.schedule.split import region

PROGRAMS = {
    "tiny": ("gauss_product", "low_rank_chain"),
    "small": (
        "gauss_product",
        "matern52_product",
        "laplace_product",
        "polynomial_product",
        "nearest_euclidean",
        "nearest_cosine",
        "sparse_gp_bound",
        "attention",
        "cross_entropy",
        "pairwise_extremes",
    ),
    "full": tuple(b.name for b in BENCHMARKS if b.name != "conjugate_gradients"),
}
"""Not the one whose work is in the body of a loop of its own: only the body has alternatives."""
PLANS = {"tiny": 4, "small": 10, "full": 16}
TUNE = {"tiny": 2.0, "small": 30.0, "full": 60.0}
"""Seconds for tuning."""
LOOSER = 4
"""The limit is so many times that of the benchmark: plans with larger chunks are among the alternatives."""
TURNS = 3
"""Times that each plan runs."""
SLOWEST = 20.0
"""A plan is not run if it is predicted to take so many times as long as the fastest."""


def alternatives(b: Benchmark, backend: Backend, count: int) -> list[Schedule]:
    """Different schedules of a program within a looser limit: of each extracted program in turn, over the range of their times."""
    jaxpr = jax.make_jaxpr(b.function)(*b.specs())
    view = saturate(load(jaxpr, [f"x{k}" for k in range(len(jaxpr.in_avals))]), load_rules())
    seconds = partial(term_seconds, backend=backend)
    programs = {str(ex.program): ex for ex in (as_written(view), *(extract(view, seconds, price) for price in MEMORY_PRICES))}
    lists = [_spread(_schedules(ex, LOOSER * b.limit_bytes, backend), count) for ex in programs.values()]
    mixed = [s for some in zip_longest(*lists) for s in some if s is not None]
    fastest = min(s.seconds for s in mixed)
    return [s for s in mixed if s.seconds <= SLOWEST * fastest][:count]


def _schedules(ex: Extraction, limit: int, backend: Backend) -> list[Schedule]:
    """The straight program; trees of one split with every other chunk size, and of one more split with the chunks found for them."""
    search = Search(ex, limit, backend)
    straight = search.start(region(ex))
    found = [straight]
    for new in search.expand(straight):
        for together in _same_index(list(new.chunks)):
            steps = ladder(search.full[together[0].index])
            found += [search.evaluate(new.seq, {**new.chunks, **dict.fromkeys(together, chunk)}, new.splits) for chunk in steps[1::2]]
    best = min(found, key=search.rank)
    found += [search.tile(new, best) for new in search.expand(best)]
    return [s for s in found if s.fits(limit)]


def _same_index(loops: list[Loop]) -> list[list[Loop]]:
    groups: dict[int, list[Loop]] = {}
    for loop in loops:
        groups.setdefault(loop.index, []).append(loop)
    return list(groups.values())


def _spread(found: Sequence[Schedule], count: int) -> list[Schedule]:
    """So many of them, from the fastest to the slowest in even steps."""
    ordered = sorted({s.seconds: s for s in found}.values(), key=lambda s: s.seconds)
    return [ordered[k * len(ordered) // count] for k in range(count)] if len(ordered) > count else ordered


def rows(scale: str) -> Iterator[Row]:
    from scipy.stats import spearmanr

    backend = backend_in_use()
    for b in BENCHMARKS:
        if b.name in PROGRAMS[scale]:
            with jax.enable_x64(b.x64):
                tuned = eqsat_mem.optimize(b.function, memory_limit=LOOSER * b.limit_bytes, tune=TUNE[scale])
                times, tuned_s = _measured(b, alternatives(b, backend, PLANS[scale]), tuned)
            predicted, measured = zip(*times)
            yield {
                "case": b.name,
                "profile": backend.device.name,
                "plans": len(times),
                "predicted_s": predicted,
                "measured_s": measured,
                "spearman": float(spearmanr(predicted, measured).statistic),
                "lost": measured[predicted.index(min(predicted))] / min(measured),
                "tuned_s": tuned_s,
                "lost_tuned": tuned_s / min(*measured, tuned_s),
            }


def _measured(b: Benchmark, schedules: Sequence[Schedule], tuned: Any) -> tuple[list[tuple[float, float]], float]:
    """Predicted and measured seconds, and those of the tuned function; of runs in turns the fastest, which interruptions touch least."""
    args = b.arguments()
    runs: list[tuple[float, Any]] = []
    for s in schedules:
        made = prepare(emit(s).function, args, None, s.backend.compiler_options)
        if made.fits_device:
            jax.block_until_ready(made.compiled(*args))
            runs.append((s.seconds, made.compiled))
    jax.block_until_ready(tuned(*args))
    *times, last = take_turns({str(k): partial(run, *args) for k, (_, run) in enumerate([*runs, (0.0, tuned)])}, TURNS).values()
    return [(predicted, min(taken)) for (predicted, _), taken in zip(runs, times)], min(last)


def table(rows: Sequence[Row]) -> str:
    """Correlations, and how much longer than the fastest plan measured those take that prediction and tuning choose."""
    lines = [["program", "plans", "rank correlation", "measured, ms", "chosen / fastest", "tuned / fastest"]]
    lines.append(["---"] + ["---:"] * 5)
    for row in rows:
        span = f"{min(row['measured_s']) * 1e3:.0f} to {max(row['measured_s']) * 1e3:.0f}"
        lines.append(
            [
                row["case"],
                str(row["plans"]),
                f"{row['spearman']:.2f}",
                span,
                f"{row['lost']:.2f}",
                f"{row['lost_tuned']:.2f}" if "lost_tuned" in row else "",
            ]
        )
    median = statistics.median(row["spearman"] for row in rows)
    return f"{markdown(lines)}\n\nMedian {median:.2f}, profile: {rows[0]['profile']}."


QUESTION = Question("ranks", "Rank correlation of predicted and measured times", rows, table)

if __name__ == "__main__":
    main(QUESTION)
