"""The checks of a rule file before egglog sees it: known names, forms and options, and nothing that reaches beyond terms and facts.

egglog tells most mistakes itself, with a line; what is refused here would make it panic, would make terms that no program can hold, or
would change what the language says of terms.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eqsat_mem.egraph import language
from eqsat_mem.egraph.sexpr import Form
from eqsat_mem.errors import OptionError, RuleError
from eqsat_mem.ir.ops import MAPS, MONOIDS, Monoid, Operation

SORTS = ("T", "i64", "f64", "String", "bool")
OPTIONS = {"rule": {":ruleset", ":name"}, "rewrite": {":ruleset", ":name", ":when"}, "birewrite": {":ruleset", ":name", ":when"}}
OPAQUE = frozenset({"Leaf", "Block", "Node"})
"""Constructors that stand for what rules do not look into, and which they therefore cannot make."""
SETTABLE = frozenset({*language.FACTS, "centred"})
STATABLE = frozenset({"want", "sinks"})
"""The language's own functions and relations that rules may state; the others follow from terms."""

MOST_ARGUMENTS = 32
"""Of a declared relation or function; egglog takes gigabytes for thousands."""

NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
VARIABLE = re.compile(r"[A-Za-z_?][\w?'-]*", re.ASCII)
NUMBER = re.compile(r"-?\d+|-?\d+\.\d*(e-?\d+)?|-?inf|NaN", re.ASCII)
STRING = re.compile(r'"[\w<>=*/+.-]*"', re.ASCII)
WORDS = frozenset({"union", "set", "let", "true", "false", "rule", "rewrite", "birewrite", "relation", "function", "old", "new", *SORTS})

Tree = Any


def own_constructors(operations: Iterable[Operation | Monoid]) -> dict[str, Operation]:
    """Operations and folds of the user's by their names in rule files.

    Raises:
        OptionError: for what is no operation, and for a name that is taken.
    """
    own: dict[str, Operation] = {}
    for given in operations:
        if not isinstance(given, Operation | Monoid):
            raise OptionError(f"operations must be eqsat_mem.Operation or eqsat_mem.Monoid objects, not {given!r}.")
        operation = given if isinstance(given, Operation) else given.operation
        name = operation.constructor
        if own.get(name, operation) is not operation:
            raise OptionError(
                f"{operation.place}: operation {operation.name!r} is {name!r} in rules, as is {own[name].name!r} of {own[name].place}; "
                "rename one of them."
            )
        if name in known_heads() or name in WORDS:
            raise OptionError(
                f"{operation.place}: operation {operation.name!r} is {name!r} in rules, which is a word of the language; rename it."
            )
        own[name] = operation
    return own


def check_declaration(form: Form, taken: Mapping[str, str]) -> tuple[str, int]:
    """The name of a declared relation or function and how many arguments it has; ``taken`` names those declared before, with places.

    Raises:
        RuleError: for a name that is taken, a sort that there is not, too many arguments, or a function that does not say how two values
            become one.
    """
    tree = form.tree
    name = tree[1] if len(tree) > 1 and isinstance(tree[1], str) else ""
    if not NAME.fullmatch(name) or name in WORDS:
        raise RuleError(f"{form.place}: {name or 'nothing'!r} names no relation or function: a name begins with a letter.")
    owner = taken.get(name) or ("the language" if name in known_heads() else "")
    if owner:
        raise RuleError(f"{form.place}: {name!r} is taken by {owner}; names of relations and functions are unique over all rule files.")
    expected = 3 if tree[0] == "relation" else 6
    sorts = tree[2] if len(tree) > 2 else None
    if len(tree) != expected or not isinstance(sorts, list) or not set(map(str, [*sorts, *tree[3:4]])) <= set(SORTS):
        raise RuleError(
            f"{form.place}: write (relation {name} (SORT ...)) or (function {name} (SORT ...) SORT :merge (FUNCTION old new)), "
            f"of the sorts {', '.join(SORTS)}. A function without :merge would have two values."
        )
    if len(sorts) > MOST_ARGUMENTS:
        raise RuleError(f"{form.place}: {name!r} has {len(sorts)} arguments, more than {MOST_ARGUMENTS}.")
    if tree[0] == "function":
        merge = tree[5]
        of_both = isinstance(merge, list) and len(merge) == 3 and merge[0] in language.PRIMITIVES and merge[1:] == ["old", "new"]
        if tree[4] != ":merge" or not (merge in ("old", "new") or of_both):
            raise RuleError(f"{form.place}: function {name!r} must say how two values become one: :merge old, or :merge (max old new).")
    return name, len(sorts)


def check_rule(form: Form, declared: Mapping[str, int], own: language.Own = language.NOTHING) -> None:
    """Nothing but what a rule may say; ``declared`` are relations and functions of rule files, with the number of their arguments.

    Raises:
        RuleError: with file and line, saying what may not stand there.
    """
    _Checker(form, declared, own).check()


def variables(form: Form) -> set[str]:
    """The names of a rule's variables."""

    def visit(tree: Tree) -> Iterator[str]:
        for k, part in enumerate(tree):
            if isinstance(part, list):
                yield from visit(part)
            elif k and VARIABLE.fullmatch(part):
                yield part

    return set(visit(form.tree))


def known_heads() -> frozenset[str]:
    """Every name that the language gives a meaning to."""
    elementwise = frozenset(row.constructor for row in MAPS.values())
    return elementwise | language.LANGUAGE_CONSTRUCTORS | language.NAMES | language.PRIMITIVES


class _Checker:
    """One rule and what it may refer to."""

    def __init__(self, form: Form, declared: Mapping[str, int], own: language.Own) -> None:
        self.form, self.declared, self.own = form, declared, own
        self.heads = frozenset({*known_heads(), *declared, *own})

    def check(self) -> None:
        head, *rest = self.form.tree
        body, options = self._split(head, rest)
        count = 2
        if len(body) != count:
            raise self._error(f"a {head} has two parts, and then options; this one has {len(body)}")
        if head == "rule":
            for part in body:
                if not isinstance(part, list) or not all(isinstance(p, list) and p for p in part):
                    raise self._error("a rule is (rule (premises ...) (actions ...) options ...)")
            self._connected(body[0])
            for premise in body[0]:
                self._premise(premise)
            for action in body[1]:
                self._action(action)
        else:
            for side, made in zip(body, (head == "birewrite", True)):
                self._expression(side, made=made)
            when = options.get(":when", [])
            if not isinstance(when, list) or not all(isinstance(p, list) and p for p in when):
                raise self._error(":when takes a list of premises")
            self._connected([["=", body[0]], *when])
            for premise in when:
                self._premise(premise)

    def _connected(self, premises: Sequence[Tree]) -> None:
        """Premises that have nothing in common match every pair of what each matches alone, which no limit catches in time."""
        groups: list[set[str]] = []
        for premise in premises:
            names = {w for w in words(premise[1:]) if VARIABLE.fullmatch(w)} - self._names(premise)
            joined = [g for g in groups if g & names]
            groups = [g for g in groups if not g & names] + ([names.union(*joined)] if names else [])
        if len(groups) > 1:
            parts = " and ".join(", ".join(sorted(g)) for g in groups)
            raise self._error(f"premises that share no variable ({parts}) match every pair of terms: connect them")

    def _names(self, tree: Tree) -> set[str]:
        """The heads of an expression, which are no variables."""
        if isinstance(tree, str) or not tree:
            return set()
        return {str(tree[0])}.union(*(self._names(part) for part in tree[1:]))

    def _split(self, head: str, rest: Sequence[Tree]) -> tuple[list[Tree], dict[str, Tree]]:
        """The parts of a form, and its options."""
        first = next((k for k, part in enumerate(rest) if isinstance(part, str) and part.startswith(":")), len(rest))
        given = list(rest[first:])
        names = given[::2]
        if len(given) % 2 or not all(isinstance(n, str) and n in OPTIONS[head] for n in names) or len(set(map(str, names))) < len(names):
            raise self._error(f"the options of a {head} are {', '.join(sorted(OPTIONS[head]))}, each once and with a value")
        options = dict(zip(names, given[1::2]))
        name = str(options.get(":name", '"x"')).strip('"')
        if not NAME.fullmatch(name):
            raise self._error(f"the name {name!r} has other characters than letters, digits, '_', '-' and '.'")
        return list(rest[:first]), options

    def _premise(self, tree: Tree) -> None:
        if tree[0] == "=":
            for part in tree[1:]:
                self._expression(part, made=False)
        else:
            self._expression(tree, made=False)

    def _action(self, tree: Tree) -> None:
        match tree:
            case ["union", left, right]:
                self._expression(left, made=True)
                self._expression(right, made=True)
            case ["let", str(name), value] if VARIABLE.fullmatch(name):
                self._expression(value, made=True)
            case ["set", [str(function), *args], value]:
                if function not in SETTABLE and function not in self.declared:
                    raise self._error(f"{function!r} follows from terms and may not be set; rules set {', '.join(sorted(SETTABLE))}")
                self._arity(function, len(args))
                for part in (*args, value):
                    self._expression(part, made=True)
            case [str(relation), *args] if relation in self.declared or relation in STATABLE:
                self._arity(relation, len(args))
                for part in args:
                    self._expression(part, made=True)
            case _:
                raise self._error(f"({tree[0]} ...) is no action: rules add equations (union), names (let) and facts (set, and relations)")

    def _expression(self, tree: Tree, made: bool) -> None:
        """An expression; ``made`` where a rule makes it rather than matches it."""
        if isinstance(tree, str):
            self._atom(tree)
            return
        if not tree or not isinstance(tree[0], str):
            raise self._error("an expression is (NAME arguments ...)")
        head, *args = tree
        if head not in self.heads:
            similar = difflib.get_close_matches(head, sorted(self.heads), 3)
            near = f"; similar names are {', '.join(map(repr, similar))}" if similar else ""
            raise self._error(f"{head!r} is not known{near}; for an operation of your own, pass operations= (--operations FILE.py)")
        if made and head in OPAQUE:
            raise self._error(f"{head!r} stands for what rules do not look into; they cannot make one")
        if made and (head in language.NAMES or head in self.declared):
            raise self._error(f"({head} ...) may not be looked up where a rule acts: bind it in the premises, as in (= f ({head} a))")
        self._arity(head, len(args))
        for k, (arg, role) in enumerate(zip(args, language.roles(head, len(args), self.own))):
            self._literal(head, arg, role, made and k == 0)
            self._expression(arg, made)

    def _arity(self, head: str, given: int) -> None:
        wanted = len(language.roles(head, 0, self.own)) if head in self.own else self.declared.get(head, language.arity(head))
        if wanted is not None and given != wanted:
            raise self._error(f"{head!r} takes {wanted} argument{'s' * (wanted != 1)}, not {given}")

    def _literal(self, head: str, arg: Tree, role: str, first: bool) -> None:
        """Literals that mean something: no number for an index, whose bits differ from program to program."""
        if not isinstance(arg, str) or (VARIABLE.fullmatch(arg) and arg not in ("inf", "NaN")):
            return
        text = arg.strip('"')
        if role in ("index", "set") and not (role == "set" and text == "0"):
            raise self._error(f"{arg} in {head!r}: indices have no fixed numbers; bind them in the premises")
        if role == "monoid" and text not in MONOIDS:
            raise self._error(f"there is no monoid {arg}; monoids are {', '.join(MONOIDS)}")
        if role in ("dtype", "position") and not _is_dtype(text):
            raise self._error(f"there is no dtype {arg}")
        if head in ("Map1", "Map2", "Map3") and first:
            raise self._error(f"{arg} in {head!r}: operations with parameters have no fixed numbers; bind them in the premises")

    def _atom(self, atom: str) -> None:
        if atom in language.NAMES or atom in language.LANGUAGE_CONSTRUCTORS or atom in WORDS - {"old", "new", "true", "false"}:
            raise self._error(f"{atom!r} is a word of the language; give the variable another name")
        if VARIABLE.fullmatch(atom) or STRING.fullmatch(atom):
            return
        if not NUMBER.fullmatch(atom):
            raise self._error(f"{atom} is neither a variable nor a number nor a name in quotes")
        if "." not in atom and atom.lstrip("-").isdigit() and not -(2**63) <= int(atom) < 2**63:
            raise self._error(f"{atom} does not fit 64 bits")

    def _error(self, what: str) -> RuleError:
        return RuleError(f"{self.form.place}: {what}.")


def _is_dtype(name: str) -> bool:
    try:
        return name == "bfloat16" or (np.dtype(name).name == name and np.dtype(name).kind in "biufc")
    except (TypeError, ValueError, SyntaxError):
        return False


def words(tree: Tree) -> Iterator[str]:
    """All atoms of a parsed form."""
    if isinstance(tree, str):
        yield tree
    else:
        for part in tree:
            yield from words(part)
