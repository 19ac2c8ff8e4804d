"""Print a program in the rule language, in the form that the left side of a rule must have to match it."""

from __future__ import annotations

from collections.abc import Iterator

from eqsat_mem import ir
from eqsat_mem.egraph import language
from eqsat_mem.egraph.encode import Encoder, Node
from eqsat_mem.ir import Program
from eqsat_mem.ir.ops import Operation, operation_of


def in_rule_language(program: Program) -> str:
    """Return one line per term, as in the program's own text: ``%6 = (Fold "add" {j} %5)``. Sets of indices are in braces."""
    encoder = Encoder(program, {own.constructor: own for own in _operations(program)})
    lines = []
    for t, encoded in encoder.encode().items():
        free = ir.names(program, program.free[t]) if t >= 0 else ""
        lines.append(f"{_key(t)} = {_text(encoder, encoded.node)} : {encoded.dtype}[{free}]")
    return "\n".join(lines)


def _operations(program: Program) -> Iterator[Operation]:
    """Yield the user's operations that a program calls."""
    for term in program.terms:
        params = dict(term.params) if isinstance(term, ir.Map) else term.call.params if isinstance(term, ir.Block) else {}
        own = operation_of(params)
        if own is not None:
            yield own


def _text(encoder: Encoder, node: Node) -> str:
    constants = list(node.payload)
    parts = []
    for role in language.roles(node.constructor, len(node.payload) + len(node.children), encoder.own):
        if role in ("index", "set"):
            names = [encoder.indices()[i].name for i in ir.bits(encoder.indices_of(constants.pop(0)))]
            parts.append("{" + " ".join(names) + "}")
        elif role != "T" and constants:
            constant = constants.pop(0)
            parts.append(f'"{constant}"' if isinstance(constant, str) else str(constant))
    parts += map(str, constants)  # the number that identifies the operation of an opaque node
    return "(" + " ".join([node.constructor, *parts, *map(_key, node.children)]) + ")"


def _key(t: int) -> str:
    """Return a node's name; a renaming of several indices at once is encoded with additional nodes, which have negative keys."""
    return f"%{t}" if t >= 0 else f"%step{-t}"
