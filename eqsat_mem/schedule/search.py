"""The fastest loop tree whose whole peak fits the limit.

From the straight program on, the regions that hold the peak, or that spend time on values too large for the cache, are split along each of
their large indices; chunk sizes are chosen, and the best trees are split further. The search is bounded by steps, so that plans are
deterministic, unless planning runs out of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice, takewhile
from typing import Any

from eqsat_mem.deadline import NEVER, Deadline
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.events import Kept, Scheduled, Tried, tell
from eqsat_mem.ir import argument_bytes, bits, children, folded
from eqsat_mem.ir.loop_tree import Chunks, Loop, Path, Seq, dissolved, enclosing, loops, walk_regions, with_region
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.chunk_sizes import climbed, first_chunk, ladder, same_loop, tied
from eqsat_mem.schedule.cuts import cuts, kept_in_room
from eqsat_mem.schedule.memory import Memory
from eqsat_mem.schedule.schedules import Schedule, Split
from eqsat_mem.schedule.sinking import sunk
from eqsat_mem.schedule.sizes import Extents, extents_inside
from eqsat_mem.schedule.split import least_chunk, region
from eqsat_mem.schedule.timing import Known, Timing

MAX_DEPTH = 4
"""The number of splits on top of each other that are tried, twice as many for a large program."""
MOST_DEPTH = 16
"""The same where nothing fits: a program may have many peaks, each of which takes a loop of its own."""
BEAM = 4
"""The number of trees that are kept for another split."""
SMALL_SHARE = 1 / 32
"""The share of the room beside arguments up to which a value is computed whole rather than in a loop."""
LARGE_PROGRAM = 200
"""Terms from which on only one tree is kept, and split further up."""
FOLLOWING = 20
"""Terms beyond which programs that compute the same are split as the best of them is: searches for each alone take long, and find that."""
TILED = 2
"""Of the trees that a large program may become by one more split, as many of the best get chunk sizes of their own."""
BEHIND = 4.0
"""A tree that takes so many times as long as the best found, in whatever program, is split no further."""
ANOTHER = 1.25
"""A tree without the largest value of the best may hold so many times as much and is split further: another peak is the highest now."""
MOST_STEPS = 120_000
"""Steps of trees that one search looks at: ten times what programs of a hundred terms need, and all that those of thousands get."""
CANDIDATES = 6
"""The number of indices of a region that are tried."""
WORTHWHILE = 0.05
"""The share of a schedule's time that a region must lose to memory traffic and overheads to be split for speed."""


def schedule(
    ex: Extraction,
    limit: int,
    backend: Backend,
    tensor_size_threshold: int | None = None,
    tensor_split_size: int | None = None,
) -> Schedule:
    """The fastest schedule found whose peak is at most ``limit`` bytes; where none fits, that of a second search for the least memory.

    ``tensor_size_threshold`` restricts splitting to regions with a value of more bytes than that, and ``tensor_split_size`` bounds the
    bytes of each value inside a loop (the paper's two knobs).
    """
    search = Search(ex, limit, backend, tensor_size_threshold, tensor_split_size)
    best = fastest(search)
    if not best.fits(limit):
        best = min(best, fastest(search.with_limit(0)), key=lambda s: s.peak_bytes)  # it does not stop at what almost fits
    return best


def fastest(search: Search, rival: Schedule | None = None) -> Schedule:
    """The best tree of a beam search over splits: it ends with the first round that finds nothing better.

    ``rival`` is the best schedule of other programs that compute the same. Trees far behind it are given up, and a program of many terms
    gets the splits that the rival has, as far as it can be split so; of a large one only one tree is kept.
    """
    best, search.timing.walked = search.straight, 0
    large = search.is_large
    beam = [best]
    tell(Kept((best,)))
    for turn in range(MOST_DEPTH):
        if turn >= (2 * MAX_DEPTH if large else MAX_DEPTH) and best.fits(search.limit):
            break
        found = _distinct(takewhile(lambda _: not search.exhausted, search.further(beam, rival, turn)))
        found = sorted(found, key=lambda pair: search.promise(*pair))[:TILED] if large else found
        beam = sorted((search.tile(*pair) for pair in found), key=search.rank)[: 1 if large else BEAM]
        if not beam:
            break
        tell(Kept(tuple(beam)))
        if not (search.rank(beam[0]) < search.rank(best) or search.has_knobs or search.is_past_a_peak(beam[0], best)):
            break  # knobs may ask for splits that take time
        best = min(best, beam[0], key=search.rank)
        beam = [s for s in beam if not any(search.is_behind(s, other) for other in (best, rival))]
    tell(Scheduled(best, search.limit))
    return best


def _distinct(found: Iterable[tuple[Schedule, Schedule]]) -> list[tuple[Schedule, Schedule]]:
    """Trees, with those that they come from, less those that have the loops and figures of one before: splits in another order, say."""
    kept: dict[Any, tuple[Schedule, Schedule]] = {}
    for new, parent in found:
        loops_of = tuple((loop.index, chunk, len(loop.folds), len(loop.stacks)) for loop, chunk in new.chunks.items())
        kept.setdefault((new.peak_bytes, new.seconds, loops_of), (new, parent))
    return list(kept.values())


def straight(ex: Extraction, backend: Backend, emitted: bool = True) -> Schedule:
    """A program without loops, run as emitted source or as its author wrote it."""
    search = Search(ex, 0, backend)
    return search.straight if emitted else search.unmodified()


@dataclass(eq=False)
class Search:
    """The search for the fastest tree of one program, with what is known of its regions; see :func:`schedule`."""

    ex: Extraction
    limit: int
    backend: Backend
    threshold: int | None = None
    split_size: int | None = None
    others: Known | None = None
    """Figures that other searches of the same program on the same backend have computed, for any limits."""
    deadline: Deadline = NEVER
    small_share: float = SMALL_SHARE
    """The share of what may be held beside the arguments that values may take which are left whole, since they hardly count."""

    def __post_init__(self) -> None:
        self.known = self.others or Known.nothing(self.ex, self.backend)
        self.timing, self.memory = self.known.timing, self.known.timing.memory
        self.full = self.memory.full_extents()

    def with_limit(self, limit: int, deadline: Deadline | None = None) -> Search:
        """The search for another limit, with another end of its time if there is one."""
        return replace(self, limit=limit, others=self.known, deadline=deadline or self.deadline)

    def with_all_counted(self) -> Search:
        """The search in which no value is too small to be computed in chunks."""
        return replace(self, small_share=0.0, others=self.known)

    @property
    def has_knobs(self) -> bool:
        """Whether sizes of values are bounded."""
        return self.threshold is not None or self.split_size is not None

    @property
    def exhausted(self) -> bool:
        """Whether the search has looked at as many steps as it may, or time is up."""
        return self.timing.walked >= MOST_STEPS or self.deadline.passed()

    @property
    def is_large(self) -> bool:
        """Whether only one tree is kept, and split further up."""
        return len(self.straight.seq.steps) > LARGE_PROGRAM

    @cached_property
    def straight(self) -> Schedule:
        """The program without loops."""
        return self.start(region(self.ex))

    def rank(self, s: Schedule) -> tuple[bool, float, float, float]:
        """The rank of a schedule: those that fit come first, by time; of others the smallest is first. Knobs of sizes come before time."""
        if s.fits(self.limit):
            room = self.backend.room_toll * (s.peak_bytes / self.limit) ** 2
            return False, self.excess(s), s.seconds * (1 + room) + self.timing.tolls(s.seq, self.full, s.chunks), s.peak_bytes
        return True, s.peak_bytes, self.excess(s), s.seconds

    def promise(self, s: Schedule, parent: Schedule) -> tuple[bool, float]:
        """The rank of a tree whose chunks are still to be chosen: where it does not fit as it is, it may with the smallest chunks."""
        if s.fits(self.limit):
            return False, s.seconds
        known = {same_loop(loop) for loop in parent.chunks}
        least = {loop: chunk if same_loop(loop) in known else self.steps([loop])[0] for loop, chunk in s.chunks.items()}
        smallest = self.memory.total(s.seq, least)
        return smallest > self.limit, s.seconds if smallest <= self.limit else smallest

    def is_behind(self, s: Schedule, other: Schedule | None) -> bool:
        """Whether a tree is too slow for further splits to make it better than another. Knobs come before time."""
        return other is not None and other.fits(self.limit) and s.seconds > BEHIND * other.seconds and not self.has_knobs

    def is_past_a_peak(self, s: Schedule, best: Schedule) -> bool:
        """Whether a tree does not hold the largest value of the best so far, which does not fit, at its own peak: of two peaks of one
        height one is gone, though what is held hardly changes."""
        if best.fits(self.limit) or s.peak_bytes > ANOTHER * best.peak_bytes:
            return False
        (held, _), (there, _) = (self.memory.at_peak(of.seq, self.full, of.chunks) for of in (best, s))
        largest = max(held, key=lambda live: live.nbytes, default=None)
        return largest is not None and not any(live.term == largest.term and live.nbytes == largest.nbytes for live in there)

    def excess(self, s: Schedule) -> int:
        """Bytes by which the largest value is above the threshold outside of loops, or above the split size inside, where given."""
        worst = 0
        for path, seq in walk_regions(s.seq) if self.has_knobs else ():
            around, extents = enclosing(s.seq, path), self.full
            for loop in around:
                extents = extents_inside(extents, loop, s.chunks)
            bound = self.split_size if around else self.threshold
            if bound is not None:
                worst = max(worst, self.largest(seq, extents) - bound)
        return worst

    def unmodified(self) -> Schedule:
        """The program run as it is written, not as emitted source."""
        plain, seq = self.backend.plain(), region(self.ex)
        memory = Memory(plain.as_written(self.ex), plain, as_written=True)
        return Schedule(self.ex, plain, seq, {}, memory.total(seq, {}), Timing(memory, emitted=False).total(seq, {}))

    # chunk sizes

    def start(self, seq: Seq, parent: Schedule | None = None, splits: tuple[Split, ...] = ()) -> Schedule:
        """A tree with the chunks that its loops have in ``parent``, or else those where the search for them begins."""
        seq = self.known.trees.first(seq)
        known = {same_loop(loop): chunk for loop, chunk in parent.chunks.items()} if parent else {}
        chunks = {loop: known.get(same_loop(loop)) or first_chunk(self.steps([loop])) for loop in loops(seq)}
        return self.evaluate(seq, chunks, splits)

    def steps(self, together: Sequence[Loop]) -> list[int]:
        """The chunk sizes that these loops over one index may have."""
        least = max(least_chunk(self.ex, loop) for loop in together)
        return [chunk for chunk in ladder(self.full[together[0].index]) if chunk >= least]

    def tile(self, s: Schedule, parent: Schedule | None = None) -> Schedule:
        """Chunk sizes by coordinate descent along each loop's ladder: the fastest that fit, or the smallest peak.

        First for the loops that ``parent`` does not have, then for all.
        """
        every, known = list(s.chunks), {same_loop(loop) for loop in parent.chunks} if parent else set()
        fresh = [loop for loop in every if same_loop(loop) not in known]
        for some in (fresh, every) if len(every) > 1 else (every,):
            for together in tied(some, s.chunks):
                if not self.exhausted:
                    s = self.descend(s, together)
        chosen = s
        for outer in every:
            for inner in loops(outer.body):
                s = self.trade(s, outer, inner)
        for together in tied(every, s.chunks) if s is not chosen else ():
            s = s if self.exhausted else self.descend(s, together)
        tell(Tried(s))
        return s

    def trade(self, s: Schedule, outer: Loop, inner: Loop) -> Schedule:
        """Smaller chunks of one of two nested loops for larger ones of the other, as long as that helps (past one step that does not): each
        alone may not fit."""
        outer_steps, inner_steps = self.steps([outer]), self.steps([inner])

        def traded(s: Schedule, steps: int) -> Schedule | None:
            a, b = outer_steps.index(s.chunks[outer]) + steps, inner_steps.index(s.chunks[inner]) - steps
            if self.exhausted or not (0 <= a < len(outer_steps) and 0 <= b < len(inner_steps)):
                return None
            return self.improved(s, {outer: outer_steps[a], inner: inner_steps[b]})

        for step in (-1, 1):
            while (new := traded(s, step) or traded(s, 2 * step)) is not None:
                s = new
        return s

    def descend(self, s: Schedule, together: Sequence[Loop]) -> Schedule:
        """Smaller, then larger chunks of loops over one index for as long as that helps (past one step that does not)."""
        return climbed(s, self.steps(together), s.chunks[together[0]], lambda best, n: self.improved(best, dict.fromkeys(together, n)))

    def simplified(self, s: Schedule) -> Schedule:
        """The same tree less the loops that later ones made superfluous, if it fits: of others every loop is needed, and they are large."""
        for k in reversed(range(len(s.chunks) if s.fits(self.limit) else 0)):
            if (seq := dissolved(s.seq, [*loops(s.seq)][k])) is not None:
                s = min(s, self.start(seq, s, s.splits), key=self.rank)
        return s

    def improved(self, s: Schedule, chunks: Chunks) -> Schedule | None:
        """The same tree with other chunks of some loops, if that is better. Of time and memory, what decides is asked first."""
        changed = {**s.chunks, **chunks}
        if not s.fits(self.limit) and self.memory.total(s.seq, changed) > max(s.peak_bytes, self.limit):
            return None
        if s.fits(self.limit) and not self.has_knobs:  # it takes no less time, whatever it holds
            least = self.timing.seconds(s.seq, self.full, changed) + self.timing.tolls(s.seq, self.full, changed)
            if least > self.rank(s)[2]:
                return None
        new = self.rechunked(s, chunks)
        return new if self.rank(new) < self.rank(s) else None

    def rechunked(self, s: Schedule, chunks: Chunks) -> Schedule:
        """The same tree with other chunks of some loops."""
        return self.evaluate(s.seq, {**s.chunks, **chunks}, s.splits)

    def evaluate(self, seq: Seq, chunks: Chunks, splits: tuple[Split, ...]) -> Schedule:
        return Schedule(self.ex, self.backend, seq, chunks, self.memory.total(seq, chunks), self.timing.total(seq, chunks), splits)

    def largest(self, seq: Seq, extents: Extents) -> int:
        sizes = self.memory.sizes(extents)
        return max((sizes[t] for t in seq.steps if isinstance(t, int)), default=0)

    # splitting

    def further(self, beam: Sequence[Schedule], rival: Schedule | None, turn: int) -> Iterator[tuple[Schedule, Schedule]]:
        """The trees that one more split makes of others, with these: with a rival that fits, the splits that it has, if there are such."""
        every = len(self.straight.seq.steps)
        if rival is not None and rival.fits(self.limit) and (every > LARGE_PROGRAM or (every > FOLLOWING and self.shares_splits(rival))):
            only = rival.splits[turn : turn + 1] if every > LARGE_PROGRAM else rival.splits
            following = ((new, s) for s in beam for new in self.expand(s, only))
            first = next(following, None)
            if first is not None or turn or every > LARGE_PROGRAM:
                yield from () if first is None else chain((first,), following)
                return
        yield from ((new, s) for s in beam for new in self.expand(s))

    def shares_splits(self, rival: Schedule) -> bool:
        """Whether a rival has splits, along indices that this program has too: one spread otherwise over devices names other extents."""
        own, others = self.ex.program.indices, rival.ex.program.indices
        return bool(rival.splits) and all(own[i : i + 1] == others[i : i + 1] for i, _ in rival.splits)

    def expand(self, s: Schedule, only: Collection[Split] | None = None) -> Iterator[Schedule]:
        """The schedules that one more split gives (one of ``only``, if there are any), their chunks still to be chosen."""
        for path, seq, extents in self.hot_spots(s) if only != () else ():
            small = self.small(seq, extents)
            for i in self.candidates(seq, extents):
                last = None if only is None else max((way for index, way in only if index == i), default=-1)
                for way, changed in enumerate(islice(self.ways(seq, extents, i, small), last if last is None else last + 1)):
                    if all(self.steps([loop]) for loop in loops(changed)) and (only is None or (i, way) in only):
                        yield self.start(with_region(s.seq, path, changed), s, (*s.splits, (i, way)))

    def small(self, seq: Seq, extents: Extents) -> frozenset[int]:
        """Values, leaves included, that hardly count: a share of what may be held beside the arguments, and of the cache."""
        most = min(self.backend.device.levels[0][0], max(self.limit - argument_bytes(self.ex.program), 0) * self.small_share)
        seen = {v for t in seq.steps if isinstance(t, int) for v in (t, *self.ex.program.operands(t))}
        sizes = self.memory.sizes(extents)
        return frozenset(t for t in seen if sizes[t] <= most)

    def hot_spots(self, s: Schedule) -> list[tuple[Path, Seq, Extents]]:
        """The straight regions worth splitting: that with the peak where memory is short or dear, and those that lose most time.

        Time is lost to memory traffic, and by contractions of few rows, which chunks of another shape do not have.
        """
        spots: list[tuple[float, Path, Seq, Extents]] = []
        peak_path = self.memory.peak(s.seq, self.full, s.chunks).path
        too_large = not s.fits(self.limit) or self.timing.allocating(s.seq, s.chunks) > WORTHWHILE * s.seconds
        for path, seq in walk_regions(s.seq):
            if any(not isinstance(step, int) for step in seq.steps):
                continue
            extents, runs = self.full, 1.0
            for loop in enclosing(s.seq, path):
                runs *= extents[loop.index] / s.chunks[loop]
                extents = extents_inside(extents, loop, s.chunks)
            if self.largest(seq, extents) <= (self.threshold or 0):
                continue
            arithmetic = self.timing.arithmetic(seq, extents)
            spare = runs * (self.timing.seconds(seq, extents, s.chunks) - arithmetic)
            narrow = runs * arithmetic - self.timing.arithmetic(seq, self.full)
            wanted = (path == peak_path and too_large) or (self.threshold is not None and extents == self.full)
            if wanted:
                spots.append((float("inf"), path, seq, extents))
            elif spare > WORTHWHILE * s.seconds and self.timing.touched(seq, extents, s.chunks) > self.backend.device.levels[0][0]:
                spots.append((spare, path, seq, extents))
            elif narrow > WORTHWHILE * s.seconds:
                spots.append((narrow, path, seq, extents))
        spots.sort(key=lambda spot: (-spot[0], spot[1]))
        return [spot[1:] for spot in spots[:2]]

    def candidates(self, seq: Seq, extents: Extents) -> list[int]:
        """Indices of the largest values of a region (held or computed on the way), largest extent first.

        Of many indices those along which most bytes can be computed piece by piece.
        """
        program = self.ex.program
        largest: dict[int, int] = {}
        able: Counter[int] = Counter()
        sizes = self.memory.sizes(extents)
        for t in seq.steps:
            assert isinstance(t, int)
            for v in (t, *children(program.terms[t])):
                nbytes = sizes[v]
                for i in bits(program.free[v] | folded(program.terms[t])):
                    if extents[i] > 1 and extents[i] == self.full[i]:
                        largest[i] = max(largest.get(i, 0), nbytes)
            for i in bits(self.ex.splits.get(t, 0) | self.ex.accumulates.get(t, 0)):
                able[i] += sizes[t]
        top = max(largest.values(), default=0)
        large = [i for i, nbytes in largest.items() if nbytes * 8 >= top]
        ablest = sorted(large, key=lambda i: (-able[i], -extents[i], i))[:CANDIDATES]
        return sorted(ablest, key=lambda i: (-extents[i], i))

    def ways(self, seq: Seq, extents: Extents, i: int, small: frozenset[int]) -> Iterator[Seq]:
        """A region split along ``i`` in every way; see :mod:`eqsat_mem.schedule.cuts`."""
        key = seq, extents, i, small
        if key not in self.known.cuts:
            self.known.cuts[key] = cuts(self.ex, self.memory, self.backend, self.is_large, *key)
        found = self.known.cuts[key]
        yield from found.ways
        yield from sunk(self.memory, self.limit, *key)
        if (self.limit, *key) not in self.known.kept:
            keeping = kept_in_room(self.ex, self.memory, self.backend, self.limit, found.dear, *key)
            self.known.kept[self.limit, *key] = tuple(keeping)
        yield from self.known.kept[self.limit, *key]
