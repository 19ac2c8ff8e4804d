"""Tile kernels as source: the function of one pair, that which combines two partial results, and the call that folds over all pairs.

The fold stands beside the kernel as it would without: it runs wherever the kernel's platform is not, and is what the kernel is checked
against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from eqsat_mem.codegen.calls import CallWriter
from eqsat_mem.codegen.expressions import INLINE, ExpressionWriter
from eqsat_mem.codegen.reads import Reader
from eqsat_mem.codegen.source import Fixed, Region, Scope, Value, identifier, number, spelled, tuple_text, wrap
from eqsat_mem.ir import Block, Dot, Fold, Literal, Map, axes_mask, bits, children, mask_of
from eqsat_mem.ir.ops import MONOIDS, block_op, map_text, picks
from eqsat_mem.schedule.split import selection_of
from eqsat_mem.schedule.tiles import Pairs, Tile, is_place


class TileWriter:
    """Folds of pairs as calls of the function that a tile names, which the source carries with it."""

    def __init__(self, reads: Reader, calls: CallWriter, expressions: ExpressionWriter):
        self.reads = reads
        self.calls = calls
        self.expressions = expressions

    def tile(self, tile: Tile, scope: Scope, region: Region) -> None:
        """Lines that compute a fold by a tile kernel where there is one, and as usual elsewhere."""
        reads, pairs = self.reads, tile.pairs
        rows, columns = (reads.indices[i] for i in (pairs.rows, pairs.columns))
        pair, by_tiles, usual = (identifier(word, reads.taken) for word in (f"pair_of_{rows}_and_{columns}", "tiles", "fold"))
        arrays = [reads.aligned(self.expressions.value(read.term, scope, region), read.layout, whole=True).text for read in pairs.reads]
        reads.comment(scope, f"all pairs of {rows} and {columns} in one kernel, in blocks of {tile.block[0]} x {tile.block[1]}")
        place = identifier(f"number_of_{columns}", reads.taken)
        given = {read.term: identifier(reads.argument_word(read.term), reads.taken) for read in pairs.reads}
        inner = _inside(scope)
        result = PairWriter(reads, self.expressions, pairs, given, place, inner).result()
        self.function(f"{pair}({', '.join([place, *given.values()])})", inner, result, scope)
        alone = Region(pairs.on_the_way(reads.program), region.users, frozenset(pairs.steps), frozenset(pairs.steps), region.ends)
        results = self.call(tile, pair, self.fold(pairs, scope), arrays, inner := _inside(scope))
        results = self.at_levels(pairs, results, inner, alone) if pairs.streamed else results
        self.function(f"{by_tiles}()", inner, tuple_text(results) if len(results) > 1 else results[0], scope)
        inner = _inside(scope)
        values, term = [self.expressions.value(t, inner, alone).text for t in pairs.steps], reads.program.terms[pairs.step]
        text = f"lax.platform_dependent({tile.platform}={by_tiles}, default={usual})"
        if not isinstance(term, Block):
            several = len(values) > 1
            self.function(f"{usual}()", inner, tuple_text(values) if several else values[0], scope)
            if several:
                names = [identifier(reads.word(t), reads.taken) for t in pairs.steps]
                reads.line(scope, f"{', '.join(names)} = {text}")
                scope.values |= {t: Value(name, reads.layout(t)) for t, name in zip(pairs.steps, names)}
            else:
                scope.values[pairs.step] = reads.assign(text, reads.layout(pairs.step), scope, reads.word(pairs.step))
            return
        made = id(term.call), term.args
        self.function(f"{usual}()", inner, tuple_text(inner.calls[made]), scope)
        names = [identifier(f"{term.call.prim.name}_{k}", reads.taken) for k in range(len(term.call.out_axes))]
        reads.line(scope, f"{tuple_text(names)} = {text}")
        scope.calls[made] = names

    def at_levels(self, pairs: Pairs, results: Sequence[str], scope: Scope, region: Region) -> list[str]:
        """The results of a kernel, sums less a level brought from what the kernel subtracted to that."""
        reads, (top, *sums) = self.reads, results
        scope.values[pairs.step] = Value(top, reads.layout(pairs.step))
        for t, name, known in zip(pairs.steps[1:], sums, pairs.streamed):
            level = self.expressions.value(known.level, scope, region)
            text = reads.aligned(level, reads.layout(t)).text
            if any(holder.shifts.get(known.shift) == known.level for holder in scope.around()):
                text = f"proper({text})"
            text = self.expressions.with_helpers(f"at_level({name}, {top}, {text})")
            scope.values[t] = reads.assign(text, reads.layout(t), scope, reads.word(t))
        return [scope.values[t].text for t in pairs.steps]

    def function(self, head: str, inner: Scope, result: str, scope: Scope) -> None:
        """A local function, its lines being there already."""
        self.reads.line(inner, f"return {result}")
        self.reads.line(scope, f"def {head}:")
        scope.lines += inner.lines

    def fold(self, pairs: Pairs, scope: Scope) -> str:
        """The partial result of no pairs, its dtype, and the function that combines two, which is written before."""
        if len(pairs.steps) > 1:
            return self.several(pairs, scope)
        reads, term = self.reads, self.reads.program.terms[pairs.step]
        if isinstance(term, Block) and picks(term.call):
            running = selection_of(term.call).running
            assert running is not None, "a selection that takes in elements one by one"
            text = running(term.call.params)
            self.calls.carry_helpers(block_op(term.call.prim.name).helpers, text)
            return text
        if isinstance(term, Block):
            first = [reads.program.terms[a] for a in term.args[len(pairs.folded) :]]
            nothing = [number(value.value) for value in first if isinstance(value, Literal)]
            dtypes = [*map(reads.dtype, term.call.out_dtypes)]
            return tuple_text([tuple_text(nothing), tuple_text(dtypes), self.calls.combination(term.call, scope)])
        assert isinstance(term, Fold), "a fold of pairs"
        monoid, combine = MONOIDS[term.monoid], identifier("combine", reads.taken)
        self.function(f"{combine}(left, right)", _inside(scope), monoid.combine_text.format("left", "right"), scope)
        return f"({number(monoid.identity(term.dtype))}, {reads.dtype(term.dtype)}, {combine})"

    def several(self, pairs: Pairs, scope: Scope) -> str:
        """The same of several folds, but for a maximum that others are streamed with."""
        reads, combine = self.reads, identifier("combine", self.reads.taken)
        folds = [t for k, s in enumerate(pairs.steps) if isinstance(t := reads.program.terms[s], Fold) and (k or not pairs.streamed)]
        parts = [MONOIDS[t.monoid].combine_text.format(f"left[{k}]", f"right[{k}]") for k, t in enumerate(folds)]
        self.function(f"{combine}(left, right)", _inside(scope), tuple_text(parts), scope)
        nothing = tuple_text([number(MONOIDS[t.monoid].identity(t.dtype)) for t in folds])
        return tuple_text([nothing, tuple_text([reads.dtype(t.dtype) for t in folds]), combine])

    def call(self, tile: Tile, pair: str, fold: str, arrays: Sequence[str], scope: Scope) -> list[str]:
        """The results of the call that folds the function ``pair`` of arrays, in the order of axes that the program has."""
        reads, pairs = self.reads, tile.pairs
        *letters, result = spelled([*(read.layout for read in pairs.reads), (*pairs.result, pairs.columns)], reads.letters)
        spec = f'"{",".join(letters)}->{result[:-1]}", "{result[-1]}"'
        text = ", ".join([spec, pair, fold, str(tile.block), str(tile.approximate), *arrays, *(["streams=True"] if pairs.streamed else [])])
        text = f"{tile.helpers[0].__name__}({text})"
        self.calls.carry_helpers(tile.helpers, text)
        term = reads.program.terms[pairs.step]
        if not isinstance(term, Block) and len(pairs.steps) == 1:
            return [reads.aligned(Value(text, pairs.result), reads.layout(pairs.step), whole=True).text]
        results = []
        if not isinstance(term, Block):
            names = [identifier(reads.word(t), reads.taken) for t in pairs.steps]
            reads.line(scope, f"{', '.join(names)} = {text}")
            return [reads.aligned(Value(name, pairs.result), reads.layout(pairs.step), whole=True).text for name in names]
        for k, axes in enumerate(term.call.out_axes):
            picked = bits(axes_mask(axes) & ~mask_of(pairs.result))
            name = identifier(f"{term.call.prim.name}_{k}", reads.taken)
            results.append((name, reads.in_axes(Value(name, (*pairs.result, *picked)), axes, scope).text))
        reads.line(scope, f"{tuple_text([name for name, _ in results])} = {text}")
        return [result for _, result in results]


def _inside(scope: Scope) -> Scope:
    """The body of a local function."""
    return Scope(scope, indent=scope.indent + "    ")


class PairWriter:
    """The function of one pair: elementwise, each operand a tile, or a tuple of them along an index that is written out."""

    def __init__(self, reads: Reader, expressions: ExpressionWriter, pairs: Pairs, given: Mapping[int, str], place: str, scope: Scope):
        self.reads, self.expressions, self.pairs = reads, expressions, pairs
        self.given, self.place, self.scope = given, place, scope
        self.layouts = {read.term: read.layout for read in pairs.reads}
        self.users = Counter(c for t in pairs.members for c in children(reads.program.terms[t]))

    def result(self) -> str:
        """The value of an element of a tile, which the fold over columns combines: several, where it keeps several."""
        term, pairs = self.reads.program.terms[self.pairs.step], self.pairs
        if isinstance(term, Fold) and pairs.streamed:
            first = self.step(pairs.step)
            less, level = (identifier(word, self.reads.taken) for word in ("less", "level"))
            inner = _inside(self.scope)
            given = {**self.given, **{known.level: level for known in pairs.streamed}}
            elements = PairWriter(self.reads, self.expressions, pairs, given, self.place, inner)
            text = tuple_text([elements.step(t) for t in pairs.steps[1:]])
            self.reads.line(inner, f"return {text}")
            self.reads.line(self.scope, f"def {less}({level}):")
            self.scope.lines += inner.lines
            return tuple_text([first, less])
        if isinstance(term, Fold):
            texts = [self.step(t) for t in pairs.steps]
            return tuple_text(texts) if len(texts) > 1 else texts[0]
        assert isinstance(term, Block), "a fold of pairs"
        texts = [self.value(c, ()).text for c in self.pairs.folded]
        return tuple_text([*texts, self.place] if picks(term.call) else texts)

    def step(self, t: int) -> str:
        """The element of a fold."""
        term = self.reads.program.terms[t]
        assert isinstance(term, Fold), "several folds"
        return self.folded(term, term.over & ~(1 << self.pairs.columns), ()).text

    def value(self, t: int, at: Fixed) -> Value:
        """A term where indices that are written out have these positions."""
        at = tuple((i, place) for i, place in at if self.reads.program.free[t] >> i & 1)
        if t in self.given:
            places = dict(at)
            return Value(self.given[t] + "".join(f"[{places[i]}]" for i in self.layouts.get(t, ()) if i in self.pairs.written_out), ())
        if is_place(self.reads.program, t, self.pairs.columns):
            return Value(self.place, ())
        known = next((holder.values[t, at] for holder in self.scope.around() if (t, at) in holder.values), None)
        if known is not None:
            return known
        term = self.reads.program.terms[t]
        if isinstance(term, Fold | Dot):
            value = self.folded(term, term.over, at)
        else:
            assert isinstance(term, Map), "members are elementwise, folds or contractions"
            value = Value(self.mapped(t, term, at), (), atom=False)
        if self.users[t] > 1 or len(value.text) >= INLINE:
            value = self.reads.assign(value.text, (), self.scope, self.reads.word(t))
            self.scope.values[t, at] = value
        return value

    def mapped(self, t: int, term: Map, at: Fixed) -> str:
        """An elementwise operation."""
        operands = [self.reads.program.terms[a] for a in term.args]
        texts = []
        for a, operand in zip(term.args, operands):
            if isinstance(operand, Literal):
                weak = self.expressions.weak_literal(term, operand, operands)
                texts.append(self.reads.literal(operand) if weak else self.reads.typed(operand))
            elif any(holder.shifts.get(t) == a for holder in self.scope.around()) and a in self.layouts:
                texts.append(self.expressions.with_helpers(f"proper({self.value(a, at).text})"))
            else:
                texts.append(self.value(a, at).text)
        text = map_text(term.op, term.params, texts, term.dtype)
        assert text is not None, f"tiles compute no {term.op}"
        return text

    def folded(self, term: Fold | Dot, over: int, at: Fixed) -> Value:
        """A fold or a contraction over indices that are written out."""
        points = [at]
        for i in bits(over):
            points = [(*point, (i, place)) for point in points for place in range(self.reads.program.indices[i].extent)]
        first, *others = (self.element(term, point) for point in points)
        if not others:
            return first
        combine, text = MONOIDS[term.monoid if isinstance(term, Fold) else "add"].combine_text, wrap(first)
        for other in others:
            text = combine.format(text, wrap(other))
        return Value(text, (), atom=False)

    def element(self, term: Fold | Dot, at: Fixed) -> Value:
        """The value that a fold or a contraction combines, at some positions."""
        factors = [self.value(c, at) for c in children(term)]
        return factors[0] if isinstance(term, Fold) else Value(" * ".join(map(wrap, factors)), (), atom=False)
