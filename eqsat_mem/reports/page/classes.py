"""E-classes as data for the page: the ways that were found to compute a value, what each costs, and the one that was chosen."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from eqsat_mem.egraph.encode import Node
from eqsat_mem.egraph.extract import Extraction
from eqsat_mem.egraph.graph import View
from eqsat_mem.egraph.node_costs import node_costs
from eqsat_mem.ir import Program, describe, names
from eqsat_mem.schedule.backend import Backend
from eqsat_mem.schedule.cost_model import term_seconds
from eqsat_mem.units import format_bytes, time_text

MOST_NODES = 40
"""The number of nodes of a class that are shown."""


def class_data(
    view: View, backend: Backend, chosen: Mapping[int, Node], wanted: Iterable[int], called: Mapping[int, str], shift: int = 0
) -> dict[str, Any]:
    """The classes that the values ``wanted`` are in, and those that their nodes lead to, by number as text.

    A node is a line of text in which ``{7}`` stands for class 7, its predicted cost, and whether the plan or the program as written has it.
    ``called`` has names for classes. ``shift`` is added to all numbers of classes on the page, also in ``called``.
    """
    texts, program, known = _texts(view, shift)
    costs = node_costs(view, partial(term_seconds, backend=backend), 0.0).of
    written = {(view.class_of[t], node) for t, node in view.original.items()}
    data: dict[str, Any] = {}
    stack = list(wanted)
    while stack:
        c = stack.pop()
        if str(c + shift) in data or c not in known:
            continue
        ranked = sorted(range(len(view.nodes[c])), key=lambda k: (view.nodes[c][k] != chosen.get(c), costs[c][k], k))
        nodes = [k for k in ranked if (c, k) in texts]
        data[str(c + shift)] = {
            "name": called.get(c + shift) or next((texts[c, k] for k in nodes if view.nodes[c][k].constructor == "Lit"), f"c{c + shift}"),
            **_value(view, program, known[c], c),
            "nodes": [
                {
                    "text": texts[c, k],
                    "cost": time_text(costs[c][k]) if math.isfinite(costs[c][k]) else "not built",
                    "chosen": view.nodes[c][k] == chosen.get(c),
                    "written": (c, view.nodes[c][k]) in written,
                }
                for k in nodes[:MOST_NODES]
            ],
            "more": max(len(nodes) - MOST_NODES, 0),
        }
        stack += [a for k in nodes[:MOST_NODES] for a in view.nodes[c][k].children]
    return data


def plan_classes(view: View, ex: Extraction) -> tuple[dict[int, int], dict[int, Node]]:
    """The class of each term of a program that was extracted from an e-graph, and the node of each of these classes that it uses.

    Terms that were put in later have none, unless they have the value of a term that was extracted.
    """
    reachable = ex.program.reachable()
    program, extracted = ex.origin or (ex.program, {t: t for t in reachable})
    classes, chosen = _classes(view, program)
    found = {t: classes[extracted[t]] for t in reachable if extracted.get(t) in classes}
    return found, {c: chosen[c] for c in found.values()}


def _classes(view: View, program: Program) -> tuple[dict[int, int], dict[int, Node]]:
    """Classes and nodes of a program as it was extracted: a node is the program's if its term, on operands of the program, is.

    The program as written may compute one value in two ways; its classes are known.
    """
    if program is view.program:
        return dict(view.class_of), {view.class_of[t]: node for t, node in view.original.items()}
    scratch = replace(program, terms=list(program.terms), free=list(program.free), source={}, _ids=dict(program._ids), _operands={})
    own = frozenset(program.reachable())
    terms, views, classes, chosen = dict[int, int](), dict[int, int](), dict[int, int](), dict[int, Node]()
    waiting = [(c, node) for c, nodes in enumerate(view.nodes) for node in nodes]
    while True:
        left = []
        for c, node in waiting:
            args = [terms.get(a, views.get(a)) for a in node.children]
            if None in args:
                left.append((c, node))
                continue
            t = view.add(scratch, c, node, tuple(a for a in args if a is not None))
            if t in own and c not in terms and t not in classes:
                terms[c], chosen[c], classes[t] = t, node, c
            elif node.constructor in ("Leaf", "Ren", "Iota", "Lit"):  # the program may read it under other names only
                views.setdefault(c, t)
        if len(left) == len(waiting):
            return classes, chosen
        waiting = left


def _value(view: View, program: Program, t: int, c: int) -> dict[str, Any]:
    """The properties that every way to compute a value shares: its type, its size, and the loops that it may be part of."""
    facts = {name: names(program, view.facts[name].get(c, 0)) for name in view.facts}
    return {
        "type": f"{program.terms[t].dtype}[{names(program, program.free[t])}]",
        "bytes": format_bytes(program.nbytes(t)),
        "facts": {name: value for name, value in facts.items() if value},
    }


def _texts(view: View, shift: int) -> tuple[dict[tuple[int, int], str], Program, dict[int, int]]:
    """The text of each node that a program can be built from, and a program with a term of each of their classes."""
    program, known, texts = view.empty_program(), dict[int, int](), dict[tuple[int, int], str]()
    home: dict[int, int] = {}
    changed = True
    while changed:
        changed = False
        for c, nodes in enumerate(view.nodes):
            for k, node in enumerate(nodes):
                if (c, k) in texts or any(a not in known for a in node.children):
                    continue
                t = view.add(program, c, node, tuple(known[a] for a in node.children))
                changed = True
                if c not in known:
                    known[c] = t
                    home[t] = c
                text = describe(program, t).rpartition(" : ")[0]
                texts[c, k] = re.sub(r"%(\d+)", lambda match: f"{{{home[int(match[1])] + shift}}}", text)
    return texts, program, known
