"""One program against many plans of it: other extractions, other loop trees, other chunk sizes, all with the same values."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eqsat_mem.codegen.emit import emit
from eqsat_mem.egraph.extract import Extraction, as_written, extract, original
from eqsat_mem.egraph.rule_files import RuleSet, load_rules
from eqsat_mem.egraph.saturate import Limits, saturate
from eqsat_mem.frontend.concatenations import with_parts
from eqsat_mem.frontend.load import load
from eqsat_mem.frontend.scatters import with_scatters
from eqsat_mem.frontend.shifts import with_shifts
from eqsat_mem.frontend.takes import with_takes
from eqsat_mem.ir import Map, Program
from eqsat_mem.ir.jaxprs import nested_jaxprs
from eqsat_mem.ir.loop_tree import Loop, Seq, enclosing, loops, walk_regions, with_region
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.remat import Moved
from eqsat_mem.schedule.schedules import Schedule
from eqsat_mem.schedule.search import schedule, straight
from eqsat_mem.schedule.split import Choices, Kind, kind_of, least_chunk, region, shared_slices, split
from eqsat_mem.schedule.timing import Timing
from eqsat_mem.transforms import plan_bodies, ranks
from eqsat_mem.transforms.scan_rewrite import forms
from tests.oracles import stepwise
from tests.oracles.extraction import chaos
from tests.oracles.programs import Sample
from tests.oracles.targets import TINY

TOLERANCES = {"float64": 1e-6, "complex128": 1e-6, "float32": 2e-3, "complex64": 2e-3, "bfloat16": 0.1, "float16": 0.05}
"""Largest difference, relative to the largest value of an array. Sums are re-associated and distances expanded."""
RULES = load_rules()


class Mismatch(AssertionError):
    """A plan computes something else; ``source`` is the plan."""

    def __init__(self, message: str, source: str) -> None:
        super().__init__(message)
        self.source = source


@dataclass(frozen=True)
class Case:
    """A traced program with its arguments and expected results."""

    jaxpr: Any
    args: list[Any]
    want: list[Any]
    names: list[str]

    @cached_property
    def near(self) -> tuple[list[Any], list[Any]]:
        """The results where roots of sums of squares that are zero are as far above it as a rounding error, and four times as far."""

        def norm(factor: float, squared: np.ndarray) -> np.ndarray:
            return np.where(squared == 0, np.asarray(factor * np.finfo(squared.dtype).eps ** 0.5, squared.dtype), np.sqrt(squared))

        one, other = (stepwise.run(self.jaxpr, self.args, partial(norm, factor)) for factor in (1.0, 4.0))
        return one, other


def case(sample: Sample) -> Case:
    args = sample.values()
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(sample.function()(*a)))(*args)
    return Case(jaxpr, args, stepwise.run(jaxpr, args), [name for name, _, _ in sample.arguments])


def extractions(program: Program, seed: int, rules: RuleSet = RULES) -> Iterator[tuple[str, Extraction]]:
    """The program as written, the cheapest for some prices, and one drawn at random from the e-graph."""
    large = (0, 8, 64)[seed % 3]
    view = saturate(program, rules, Limits(max_rows=3_000, max_iterations=4, max_seconds=60.0, large_elements=large))
    yield "as written", as_written(view)
    seconds = partial(term_seconds, backend=TINY)
    yield "fastest", extract(view, seconds, 0.0)
    yield "smallest", extract(view, seconds, 1e-3)
    yield "random", chaos(view, seed)


def random_tree(ex: Extraction, rng: random.Random, most: int = 3) -> tuple[Seq, dict[Loop, int]]:
    """Some regions split along some indices, in chunks of some sizes, keeping some slices."""
    seq = region(ex)
    for _ in range(rng.randint(1, most)):
        straight = [(path, inner) for path, inner in walk_regions(seq) if inner.steps and all(isinstance(s, int) for s in inner.steps)]
        if not straight:
            break
        path, inner = rng.choice(straight)
        around = {loop.index for loop in enclosing(seq, path)}
        indices = [i for i in range(len(ex.program.indices)) if i not in around and ex.program.indices[i].extent > 1]
        able = [i for i in indices if any(kind_of(ex, t, i) is not Kind.WHOLE for t in inner.steps)]  # type: ignore[arg-type]
        if not able:
            continue
        index = rng.choice(able)
        changed = split(ex, inner, index, _random_choices(ex, inner, index, rng))
        if changed is not None:
            seq = with_region(seq, path, changed)
    return seq, {loop: max(_chunk(ex.program.indices[loop.index].extent, rng), least_chunk(ex, loop)) for loop in loops(seq)}


def _random_choices(ex: Extraction, seq: Seq, i: int, rng: random.Random) -> Choices:
    """Some slices kept, some values taken for small, some values made element by element and without ``i`` in every turn."""
    share = rng.choice([0.0, 0.0, 0.5])
    values = sorted({v for t in seq.steps if isinstance(t, int) for v in (t, *ex.program.operands(t))})
    by_element = [t for t in seq.steps if isinstance(t, int) and (isinstance(ex.program.terms[t], Map) or ex.unrolls.get(t))]
    simple = [t for t in by_element if not ex.program.free[t] >> i & 1]
    choices = Choices(small=_some(values, share, rng), sink=_some(simple, rng.choice([0.0, 0.0, 0.5]), rng))
    return replace(choices, keep=_some(shared_slices(ex, seq, i, choices), rng.choice([0.0, 0.5]), rng))


def _some(values: Sequence[int], share: float, rng: random.Random) -> frozenset[int]:
    return frozenset(v for v in values if rng.random() < share)


def _chunk(extent: int, rng: random.Random) -> int:
    return rng.choice([1, max(1, extent // 2), max(1, extent - 1), rng.randint(1, extent)])


def random_schedule(ex: Extraction, rng: random.Random) -> Schedule:
    seq, chunks = random_tree(ex, rng)
    memory = Memory(ex, TINY)
    return Schedule(ex, TINY, seq, chunks, memory.total(seq, chunks), Timing(memory).total(seq, chunks))


def planned_bodies(program: Program, seed: int) -> Program:
    """The program with the bodies of its loops and branches planned too, however small."""

    def planner(body: Any, limit: int) -> plan_bodies.BodyPlan:
        inner = load(body, [f"x{k}" for k in range(len(body.in_avals))])
        *_, (_, ex) = extractions(inner, seed)
        made = random_schedule(ex, random.Random(seed))
        return plan_bodies.BodyPlan(made, made.peak_bytes, made.peak_bytes)

    small, plan_bodies.SMALL_BYTES = plan_bodies.SMALL_BYTES, 1
    try:
        return plan_bodies.plan_bodies(program, 2**20, planner, planner)[0]
    finally:
        plan_bodies.SMALL_BYTES = small


def all_forms(written: Extraction) -> Iterator[Program]:
    """A program as it is written, and every other form that a search may begin with: scans that stack less, rows that are taken ..."""
    yield written.program
    yield from forms(written, RULES)
    for form in (with_parts, with_takes, with_shifts, with_scatters, _with_ranks):
        if (made := form(written.program)) is not None:
            yield made


def _with_ranks(program: Program) -> Program | None:
    """The program with counts in place of sorts, however short they are."""
    least, ranks.LEAST = ranks.LEAST, 1
    try:
        return ranks.with_ranks(program)
    finally:
        ranks.LEAST = least


def plans(case: Case, seed: int, thorough: bool = True) -> Iterator[tuple[str, Schedule]]:
    """Plans of a program, each with a word for it; a few of them unless ``thorough``."""
    rng = random.Random(seed)
    staged = [*all_forms(original(load(case.jaxpr, case.names), RULES))]
    program = staged[rng.randrange(len(staged))]
    if rng.random() < 0.3:
        program = planned_bodies(program, seed)
    for word, ex in extractions(program, seed):
        yield f"{word}, straight", straight(ex, TINY)
        for k in range(3 if thorough else 1):
            tree = random_schedule(ex, rng)
            yield f"{word}, random tree {k}", tree
            if rng.random() < 0.3:
                yield f"{word}, random tree {k}, values computed again", Moved(tree).fitting(int(0.5 * tree.peak_bytes))
        if (thorough and word != "random") or word == "smallest":
            yield from ladder(word, ex)


def few_plans(case: Case, seed: int) -> Iterator[tuple[str, Schedule]]:
    """A random loop tree of a random form of a program as it is written, and the same with values computed again: no e-graph."""
    rng = random.Random(seed)
    written = original(load(case.jaxpr, case.names), RULES)
    staged = [*all_forms(written)]
    chosen = staged[rng.randrange(len(staged))]
    tree = random_schedule(written if chosen is written.program else original(chosen, RULES), rng)
    yield "as written, random tree", tree
    recomputed = Moved(tree).fitting(int(rng.choice([0.3, 0.6, 0.9]) * tree.peak_bytes))
    if recomputed is not tree:
        yield "as written, random tree, values computed again", recomputed


def ladder(word: str, ex: Extraction) -> Iterator[tuple[str, Schedule]]:
    """Schedules that the search finds for limits from below the smallest possible peak up to none."""
    smallest = schedule(ex, 1, TINY)
    yield f"{word}, smallest", smallest
    yield f"{word}, within 1.3 x the smallest", schedule(ex, int(1.3 * smallest.peak_bytes), TINY)
    yield f"{word}, fastest", schedule(ex, 2**40, TINY)


def check_plan(case: Case, made: Schedule, jit: bool = False) -> None:
    """Raises :class:`Mismatch` unless the plan's program computes what the original computes."""
    code = emit(made)
    avals = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in case.args]
    try:
        with jax.numpy_dtype_promotion("strict"):
            if jit:
                got = list(jax.jit(code.function)(*case.args))
            else:
                got = stepwise.run(jax.make_jaxpr(lambda *a: list(code.function(*a)))(*avals), case.args)
    except Exception as error:
        raise Mismatch(f"{type(error).__name__}: {error}", code.source) from error
    compare(case, got, code.source)


def compare(case: Case, got: Sequence[Any], source: str) -> None:
    if len(got) != len(case.want):
        raise Mismatch(f"{len(got)} results instead of {len(case.want)}", source)
    for k, (a, b) in enumerate(zip(got, case.want)):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Mismatch(f"result {k} is {a.dtype}{a.shape} instead of {b.dtype}{b.shape}", source)
        if "float16" in _dtypes(case) and jnp.issubdtype(b.dtype, jnp.inexact):  # where sums of float16 overflow depends on their order
            both = np.isfinite(a.astype(np.complex128)) & np.isfinite(b.astype(np.complex128))
            a, b = a[both], b[both]
        if jnp.issubdtype(b.dtype, jnp.inexact) and np.any(np.isnan(b) & ~np.isnan(a)):
            a, b = _with_norms_above_zero(case, k, a, b)
        if not close(a, b, tolerance(case)):
            raise Mismatch(f"result {k} differs by {difference(a, b):.3g}:\n{a}\ninstead of\n{b}", source)


def _with_norms_above_zero(case: Case, k: int, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A plan's result and the expected one, where each may have a number for a derivative of a root at zero (docs/accuracy.md).

    The derivative of the root of a sum of squares is not a number where the sum is zero. A plan may compute a rounding error instead of
    that zero. So where the result as written is not a number, a number is expected if there is one as soon as these roots are a rounding
    error above zero: it is that number if it does not depend on the error, else any. A number for any other NaN stays a difference.
    """
    one, other = (np.asarray(results[k]) for results in case.near)
    expected = np.isnan(b) & ~np.isnan(a) & np.isfinite(one) & np.isfinite(other)
    settled = expected & (np.abs(one - other) <= tolerance(case) * np.maximum(1.0, np.abs(one)))
    compared = settled | ~expected
    return a[compared], np.where(settled, one, b)[compared]


def tolerance(case: Case) -> float:
    """That of the least precise value of a program."""
    return max((TOLERANCES[name] for name in _dtypes(case) if name in TOLERANCES), default=1e-6)


def _dtypes(case: Case) -> set[str]:
    """The dtypes of all values of a program."""
    return {str(v.aval.dtype) for jaxpr in nested_jaxprs(case.jaxpr.jaxpr) for eqn in jaxpr.eqns for v in [*eqn.invars, *eqn.outvars]}


def close(a: Any, b: Any, allowed: float) -> bool:
    """Equal for exact dtypes; else as near as the largest finite value allows, with the same infinities and nans."""
    if np.dtype(b.dtype).kind in "biu":
        return bool(np.array_equal(a, b))
    return difference(a, b) <= allowed


def difference(a: Any, b: Any) -> float:
    if np.dtype(b.dtype).kind in "biu":
        return float(np.sum(a != b))
    wide = np.complex128 if np.dtype(b.dtype).kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    finite = np.isfinite(b)
    if not np.array_equal(np.isnan(a), np.isnan(b)) or not np.array_equal(a[~finite & ~np.isnan(b)], b[~finite & ~np.isnan(b)]):
        return float("inf")
    scale = max(1.0, float(np.max(np.abs(b[finite]), initial=0.0)))
    return float(np.max(np.abs(a[finite] - b[finite]), initial=0.0)) / scale


def script(sample: Sample, word: str, source: str) -> str:
    """A script that shows a failure again."""
    return (
        f"# seed {sample.seed}, plan: {word}\nimport jax\njax.config.update('jax_enable_x64', True)\n"
        f"from tests.oracles.programs import Sample\n{sample.source}\n"
        f"args = Sample({sample.seed}, '', {sample.arguments!r}).values()\n"
        f"print(jax.tree.leaves(f(*args)))\n\n\n{source}\nprint(program(*args))\n"
    )
