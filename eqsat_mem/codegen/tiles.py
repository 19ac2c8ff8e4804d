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
        self.function(f"{by_tiles}()", inner := _inside(scope), self.call(tile, pair, self.fold(pairs, scope), arrays, inner), scope)
        inner = _inside(scope)
        alone = Region(frozenset(pairs.members), region.users, frozenset([pairs.step]), frozenset([pairs.step]), region.ends)
        value, term = self.expressions.value(pairs.step, inner, alone), reads.program.terms[pairs.step]
        text = f"lax.platform_dependent({tile.platform}={by_tiles}, default={usual})"
        if not isinstance(term, Block):
            self.function(f"{usual}()", inner, value.text, scope)
            scope.values[pairs.step] = reads.assign(text, reads.layout(pairs.step), scope, reads.word(pairs.step))
            return
        made = id(term.call), term.args
        self.function(f"{usual}()", inner, tuple_text(inner.calls[made]), scope)
        names = [identifier(f"{term.call.prim.name}_{k}", reads.taken) for k in range(len(term.call.out_axes))]
        reads.line(scope, f"{tuple_text(names)} = {text}")
        scope.calls[made] = names

    def function(self, head: str, inner: Scope, result: str, scope: Scope) -> None:
        """A local function, its lines being there already."""
        self.reads.line(inner, f"return {result}")
        self.reads.line(scope, f"def {head}:")
        scope.lines += inner.lines

    def fold(self, pairs: Pairs, scope: Scope) -> str:
        """The partial result of no pairs, its dtype, and the function that combines two, which is written before."""
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

    def call(self, tile: Tile, pair: str, fold: str, arrays: Sequence[str], scope: Scope) -> str:
        """The call that folds the function ``pair`` of arrays, its results in the order of axes that the program has."""
        reads, pairs = self.reads, tile.pairs
        *letters, result = spelled([*(read.layout for read in pairs.reads), (*pairs.result, pairs.columns)], reads.letters)
        spec = f'"{",".join(letters)}->{result[:-1]}", "{result[-1]}"'
        text = ", ".join([spec, pair, fold, str(tile.block), str(tile.approximate), *arrays])
        text = f"{tile.helpers[0].__name__}({text})"
        self.calls.carry_helpers(tile.helpers, text)
        term = reads.program.terms[pairs.step]
        if not isinstance(term, Block):
            return reads.aligned(Value(text, pairs.result), reads.layout(pairs.step), whole=True).text
        results = []
        for k, axes in enumerate(term.call.out_axes):
            picked = bits(axes_mask(axes) & ~mask_of(pairs.result))
            name = identifier(f"{term.call.prim.name}_{k}", reads.taken)
            results.append((name, reads.in_axes(Value(name, (*pairs.result, *picked)), axes, scope).text))
        reads.line(scope, f"{tuple_text([name for name, _ in results])} = {text}")
        return tuple_text([result for _, result in results])


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
        term = self.reads.program.terms[self.pairs.step]
        if isinstance(term, Fold):
            return self.folded(term, term.over & ~(1 << self.pairs.columns), ()).text
        assert isinstance(term, Block), "a fold of pairs"
        texts = [self.value(c, ()).text for c in self.pairs.folded]
        return tuple_text([*texts, self.place] if picks(term.call) else texts)

    def value(self, t: int, at: Fixed) -> Value:
        """A term where indices that are written out have these positions."""
        at = tuple((i, place) for i, place in at if self.reads.program.free[t] >> i & 1)
        if t in self.given:
            places = dict(at)
            return Value(self.given[t] + "".join(f"[{places[i]}]" for i in self.layouts[t] if i in self.pairs.written_out), ())
        if is_place(self.reads.program, t, self.pairs.columns):
            return Value(self.place, ())
        known = self.scope.values.get((t, at))
        if known is not None:
            return known
        term = self.reads.program.terms[t]
        if isinstance(term, Fold | Dot):
            value = self.folded(term, term.over, at)
        else:
            assert isinstance(term, Map), "members are elementwise, folds or contractions"
            value = Value(self.mapped(term, at), (), atom=False)
        if self.users[t] > 1 or len(value.text) >= INLINE:
            value = self.reads.assign(value.text, (), self.scope, self.reads.word(t))
            self.scope.values[t, at] = value
        return value

    def mapped(self, term: Map, at: Fixed) -> str:
        """An elementwise operation."""
        operands = [self.reads.program.terms[a] for a in term.args]
        texts = []
        for a, operand in zip(term.args, operands):
            if isinstance(operand, Literal):
                weak = self.expressions.weak_literal(term, operand, operands)
                texts.append(self.reads.literal(operand) if weak else self.reads.typed(operand))
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
