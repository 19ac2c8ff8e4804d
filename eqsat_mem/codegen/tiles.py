"""Tile kernels as source: the function of one pair, and the call that folds it over all pairs.

The fold stands beside the kernel as it would without: it runs wherever the kernel's platform is not, and is what the kernel is checked
against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from eqsat_mem.codegen.expressions import INLINE, Expressions
from eqsat_mem.codegen.source import Fixed, Region, Scope, Value, identifier, number, spelled, wrap
from eqsat_mem.ir import Dot, Fold, Literal, Map, bits, children
from eqsat_mem.ir.ops import MONOIDS, map_text
from eqsat_mem.schedule.tiles import Tile


class Tiles(Expressions):
    """Source of tile kernels."""

    def tile(self, tile: Tile, scope: Scope, region: Region) -> None:
        """Lines that compute a fold by a tile kernel where there is one, and as usual elsewhere."""
        pairs, step = tile.pairs, tile.pairs.step
        term = self.program_ir.terms[step]
        assert isinstance(term, Fold)
        named = [self.indices[i] for i in (pairs.rows, pairs.columns)]
        pair, by_tiles, usual = (identifier(word.format(*named), self.taken) for word in ("pair_of_{}_and_{}", "tiles", "fold"))
        arrays = [self.aligned(self.value(read.term, scope, region), read.layout, whole=True).text for read in pairs.reads]
        self.comment(scope, "all pairs of {} and {} in one kernel, in blocks of {} x {}".format(*named, *tile.block))
        self.pair(pair, tile, scope)
        *letters, result = spelled([*(read.layout for read in pairs.reads), (*pairs.result, pairs.columns)], self.letters)
        call = [
            f'"{",".join(letters)}->{result[:-1]}"',
            f'"{result[-1]}"',
            pair,
            f"({number(MONOIDS[term.monoid].identity(term.dtype))}, {', '.join(tile.fold)}, {self.dtype(term.dtype)})",
            str(tile.block),
            str(tile.approximate),
            *arrays,
        ]
        text = f"{tile.helper.__name__}({', '.join(call)})"
        self.carry_helpers([tile.helper], text)
        made = self.aligned(Value(text, pairs.result), self.layout(step), whole=True)
        inner = Scope(scope, indent=scope.indent + "    ", chunk=scope.chunk)
        self.line(scope, f"def {by_tiles}():")
        self.line(inner, f"return {made.text}")
        scope.lines += inner.lines
        inner.lines.clear()
        members = frozenset(pairs.members)
        value = self.value(step, inner, Region(members, region.users, frozenset([step]), frozenset([step]), region.ends))
        self.line(inner, f"return {value.text}")
        self.line(scope, f"def {usual}():")
        scope.lines += inner.lines
        text = f"lax.platform_dependent({tile.platform}={by_tiles}, default={usual})"
        scope.values[step] = self.assign(text, self.layout(step), scope, self.word(step))

    def pair(self, name: str, tile: Tile, scope: Scope) -> None:
        """The function of one pair: elementwise, each operand a tile, or a tuple of them along an index that is written out."""
        pairs, terms = tile.pairs, self.program_ir.terms
        given = {read.term: identifier(self.argument_word(read.term), self.taken) for read in pairs.reads}
        self.line(scope, f"def {name}({', '.join(given.values())}):")
        inner = Scope(indent=scope.indent + "    ")
        step = terms[pairs.step]
        assert isinstance(step, Fold)
        text = _Pair(self, tile, given, inner).folded(step, step.over & ~(1 << pairs.columns), ())
        self.line(inner, f"return {text.text}")
        scope.lines += inner.lines


class _Pair:
    """The lines of a function of one pair."""

    def __init__(self, source: Expressions, tile: Tile, given: Mapping[int, str], scope: Scope):
        self.source, self.terms, self.free = source, source.program_ir.terms, source.program_ir.free
        self.given, self.scope = given, scope
        self.layouts = {read.term: read.layout for read in tile.pairs.reads}
        self.written_out = tile.pairs.written_out
        self.users = Counter(c for t in tile.pairs.members for c in children(self.terms[t]))

    def value(self, t: int, at: Fixed) -> Value:
        """A term where indices that are written out have these positions."""
        at = tuple((i, place) for i, place in at if self.free[t] >> i & 1)
        if t in self.given:
            places = dict(at)
            return Value(self.given[t] + "".join(f"[{places[i]}]" for i in self.layouts[t] if i in self.written_out), ())
        known = self.scope.values.get((t, at))
        if known is not None:
            return known
        term = self.terms[t]
        if isinstance(term, Fold | Dot):
            value = self.folded(term, term.over, at)
        else:
            assert isinstance(term, Map), "members are elementwise, or folds"
            value = Value(self.mapped(term, at), (), atom=False)
        if self.users[t] > 1 or len(value.text) >= INLINE:
            value = self.source.assign(value.text, (), self.scope, self.source.word(t))
            self.scope.values[t, at] = value
        return value

    def mapped(self, term: Map, at: Fixed) -> str:
        operands = [self.terms[a] for a in term.args]
        texts = []
        for a, operand in zip(term.args, operands):
            if isinstance(operand, Literal):
                weak = self.source.weak_literal(term, operand, operands)
                texts.append(self.source.literal(operand) if weak else self.source.typed(operand))
            else:
                texts.append(self.value(a, at).text)
        text = map_text(term.op, term.params, texts, term.dtype)
        assert text is not None, f"tiles compute no {term.op}"
        return text

    def folded(self, term: Fold | Dot, over: int, at: Fixed) -> Value:
        """A fold or a contraction over indices that are written out."""
        points = [at]
        for i in bits(over):
            points = [(*point, (i, place)) for point in points for place in range(self.source.program_ir.indices[i].extent)]
        first, *others = (self.element(term, point) for point in points)
        if not others:
            return first
        combine, text = MONOIDS[term.monoid if isinstance(term, Fold) else "add"].combine_text, wrap(first)
        for other in others:
            text = combine.format(text, wrap(other))
        return Value(text, (), atom=False)

    def element(self, term: Fold | Dot, at: Fixed) -> Value:
        """What a fold or a contraction combines."""
        factors = [self.value(c, at) for c in children(term)]
        return factors[0] if isinstance(term, Fold) else Value(" * ".join(map(wrap, factors)), (), atom=False)
