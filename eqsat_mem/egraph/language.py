"""The language of rule files: the constructors, facts and rulesets that every rule file may use.

What is said here of each constructor is what makes it a function of named indices: what its value depends on (`free`), its dtype,
and how a change of names passes through it. Everything that a reader would call an optimisation is in the rule files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce

from eqsat_mem.ir import ops

FACTS = ("splits", "splits-dot", "accumulates", "unrolls")
"""The facts that rules state about classes for the stages after extraction: index sets.

Contractions have ``splits-dot`` and no ``splits``: what a class says of an elementwise node is not true of a contraction in it.
"""

LEVELS = "shrunk"
"""The relation of a value and the levels that it holds the exponential of, as ``rules/streaming.egg`` declares it."""
MEANS = "squared-about"
"""The relation of a sum of squared differences and the mean that they are from, likewise."""
PLACES = "found"
"""The relation of places where elements are an extreme, or of the first of them, and that extreme, likewise."""

Own = Mapping[str, ops.Operation]
"""The operations that the user adds to the language, by constructor."""
NOTHING: Own = {}

GIVEN = ("pointwise", "summed", "selected", "combined", "searched")
"""The facts, index sets, that are known of some terms of a program when it is loaded; ``free`` and ``dtype`` are of all."""

UNREADABLE = frozenset({"Node", "Delta", "Diag"})
"""Constructors that stand for a value in rules only; no program is built from them."""

UNTABLED = UNREADABLE | {"Block", "Lit"}
"""Constructors without a table: programs have none, or egglog reads no lists and no f64 from files."""

COMMUTATIVE = frozenset({"Mul", "Dot"})
"""Constructors whose operands rules exchange, so that most of their nodes stand in a class twice."""

RULESETS = ("simplify", "explore", "splitting")
"""The rulesets that rules of a rule file may be in."""

ANALYSIS = "analysis"
"""The ruleset of rules that state facts and make nothing equal."""

COMPARISONS = frozenset({"Eq", "Ne", "Lt", "Le", "Gt", "Ge", "LtTo", "LeTo", "IsFinite"})
FACTS_OF_NAMES = {
    "floating": ("float32", "float64"),
    "fractional": ("bfloat16", "float16", "float32", "float64"),
    "integral": ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    "positional": ("int32", "int64", "uint32", "uint64", "float32", "float64"),
    "exact": ("max", "min", "and", "or", "xor"),
    "selective": ("max", "min"),
}
"""Dtypes whose rounding rules may rely on, all dtypes of real numbers, dtypes without rounding, dtypes that tell positions apart; monoids
that give the same in any order, and that give an element."""

ROLES: Mapping[str, tuple[str, ...]] = {
    "Lit": ("number", "dtype"),
    "Iota": ("index", "position"),
    "Fold": ("monoid", "set", "T"),
    "Dot": ("set", "T", "T"),
    "DotPlus": ("set", "T", "T", "T", "T"),
    "Ren": ("index", "index", "T"),
    "Take": ("index", "T", "T"),
    "Delta": ("index", "index", "T"),
    "Diag": ("index", "index", "T"),
    "Convert": ("dtype", "T"),
    "IntegerPow": ("power", "T"),
    "Map1": ("operation", "T"),
    "Map2": ("operation", "T", "T"),
    "Map3": ("operation", "T", "T", "T"),
}
"""The meanings of the arguments of a constructor; those of any other elementwise operation are terms."""

LANGUAGE = """
(sort T)
(sort Ts (Vec T))
(constructor Leaf (i64) T)
(constructor Block (i64 Ts) T)
(constructor Lit (f64 String) T)
(constructor Iota (i64 String) T)
(constructor Fold (String i64 T) T)
(constructor Dot (i64 T T) T)
(constructor DotPlus (i64 T T T T) T)
(constructor Ren (i64 i64 T) T)
(constructor Take (i64 T T) T)
(constructor Delta (i64 i64 T) T)
(constructor Diag (i64 i64 T) T)
(constructor Convert (String T) T)
(constructor IntegerPow (i64 T) T)
(constructor Map1 (i64 T) T)
(constructor Map2 (i64 T T) T)
(constructor Map3 (i64 T T T) T)

(constructor Node (i64) T)
(function free (T) i64 :merge (& old new))
(function dtype (T) String :merge old)
(function pointwise (T) i64 :merge (| old new))
(function summed (T) i64 :merge (| old new))
(function selected (T) i64 :merge (| old new))
(function combined (T) i64 :merge (| old new))
(function searched (T) i64 :merge (| old new))
(function centred (T) i64 :merge (max old new))
(function splits (T) i64 :merge (| old new))
(function splits-dot (T) i64 :merge (| old new))
(function accumulates (T) i64 :merge (| old new))
(function unrolls (T) i64 :merge (| old new))
(function extent (i64) f64 :no-merge)
(function size (i64) f64 :merge old)
(function threshold () f64 :no-merge)
(function unrollable () f64 :no-merge)
(relation want (i64))
(relation apart (i64 i64 i64))
(relation large (i64))
(relation sinks (i64 T T))
(relation floating (String))
(relation fractional (String))
(relation integral (String))
(relation positional (String))
(relation exact (String))
(relation selective (String))

(ruleset loading)
(ruleset analysis)
(ruleset simplify)
(ruleset explore)
(ruleset splitting)

(rule ((= e (Lit v d))) ((set (free e) 0) (set (dtype e) d) (set (pointwise e) 0)) :ruleset analysis :name "facts-Lit")
(rule ((= e (Iota i d))) ((set (free e) i) (set (dtype e) d) (set (pointwise e) i)) :ruleset analysis :name "facts-Iota")
(rule ((= e (Fold m k a)) (= fa (free a)) (= d (dtype a)))
      ((set (free e) (& fa (not-i64 k))) (set (dtype e) d) (want k) (want (| fa k))) :ruleset analysis :name "facts-Fold")
(rule ((= e (Dot k a b)) (= fa (free a)) (= fb (free b)) (= d (dtype a)))
      ((set (free e) (& (| fa fb) (not-i64 k))) (set (dtype e) d) (set (centred a) 0) (set (centred b) 0) (want k) (want (| k (| fa fb))))
      :ruleset analysis :name "facts-Dot")
(rule ((= e (DotPlus k a b u w)) (= f (| (| (free a) (free b)) (| (free u) (free w)))) (= d (dtype a)))
      ((set (free e) (& f (not-i64 k))) (set (dtype e) d) (want k) (want (| k f))) :ruleset analysis :name "facts-DotPlus")
(rule ((= e (Ren s d a)) (= fa (free a)) (!= (& fa s) 0) (= t (dtype a)))
      ((set (free e) (| (& fa (not-i64 s)) d)) (set (dtype e) t)) :ruleset analysis :name "facts-Ren")
(rule ((= e (Take i p a)) (= fa (free a)) (!= (& fa i) 0) (= fp (free p)) (= f (| (& fa (not-i64 i)) fp)) (= t (dtype a)))
      ((set (free e) f) (set (dtype e) t) (set (pointwise e) f)) :ruleset analysis :name "facts-Take")
(rule ((= e (Delta i j a)) (= fa (free a)) (= t (dtype a)))
      ((set (free e) (| fa (| i j))) (set (dtype e) t)) :ruleset analysis :name "facts-Delta")
(rule ((= e (Diag j i a)) (= fa (free a)) (!= (& fa j) 0) (= t (dtype a)))
      ((set (free e) (| (& fa (not-i64 j)) i)) (set (dtype e) t)) :ruleset analysis :name "facts-Diag")
(rule ((= e (Convert t a)) (= fa (free a)))
      ((set (free e) fa) (set (dtype e) t) (set (pointwise e) fa)) :ruleset analysis :name "facts-Convert")

(rule ((= m (free e))) ((want m)) :ruleset analysis :name "want-free")
(rule ((= k (searched e)) (= fe (free e))) ((want k) (want (| k fe))) :ruleset analysis :name "want-searched")
(rule ((want m) (!= m 0) (= low (& m (- 0 m)))) ((want (^ m low)) (apart m low (^ m low))) :ruleset analysis :name "want-smaller")
(rule ((apart m low rest) (= n (extent low)) (= others (size rest))) ((set (size m) (* n others))) :ruleset analysis :name "size")
(rule ((want m) (= n (size m)) (> n (threshold))) ((large m)) :ruleset analysis :name "large")

(rewrite (Ren s d a) a :when ((= (& (free a) s) 0)) :ruleset simplify :name "rename-nothing")
(rewrite (Ren s s a) a :ruleset simplify :name "rename-to-itself")
(rewrite (Take i p a) a :subsume :when ((= (& (free a) i) 0)) :ruleset simplify :name "take-of-nothing")
(rewrite (Take d p (Ren s d a)) (Take s p a) :when ((= fa (free a)) (!= (& fa s) 0) (= (& fa d) 0)) :ruleset simplify :name "take-Ren")
(rewrite (Diag j i a) a :when ((= (& (free a) j) 0)) :ruleset simplify :name "diagonal-of-nothing")
(rewrite (Diag j i a) (Ren j i a) :when ((= fa (free a)) (!= (& fa j) 0) (= (& fa i) 0)) :ruleset simplify :name "diagonal-is-rename")
(set (size 0) 1.0)
"""


def language(maps: Mapping[str, int], own: Own = NOTHING) -> Iterator[tuple[str, str]]:
    """The text of the language, in named pieces: the part that is always there, each elementwise constructor with its arity, the user's
    own."""
    yield "language", LANGUAGE + "\n".join(f'({fact} "{name}")' for fact, names in FACTS_OF_NAMES.items() for name in names)
    yield "tables", _tables()
    yield from elementwise(maps)
    yield "Convert", _names_pass("Convert", "x", 1) + _takes_sink("Convert", "x", 1)
    yield "IntegerPow", _elementwise("IntegerPow", "x", 1)
    for arity in (1, 2, 3):
        yield f"Map{arity}", _elementwise(f"Map{arity}", "x", arity)
    for constructor, operation in sorted(own.items()):
        yield constructor, _operation(constructor, operation)


def together(ruleset: str) -> str:
    """The name of what is run of a ruleset: the language's rules of it, and those rules of files that apply."""
    return f"all-{ruleset}"


def elementwise(maps: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """The text of each elementwise constructor with its arity, which may follow the rest of the language and rules."""
    for constructor, arity in sorted(maps.items()):
        if constructor not in LANGUAGE_CONSTRUCTORS:
            declared = f"(constructor {constructor} ({'T ' * arity}) T)"
            yield constructor, declared + _table(constructor, ("T",) * arity) + _elementwise(constructor, "", arity)


def table_of(name: str) -> str:
    """The table that nodes of a constructor, or values of a fact about terms, are loaded from: rows of integers and strings."""
    return f"given-{name}"


def _tables() -> str:
    """The tables of the language's own constructors and of facts about terms, whose first column is the key of a term."""
    both = (
        f"(relation {table_of('free-dtype')} (i64 i64 String))"
        f"(rule (({table_of('free-dtype')} t f d)) ((set (free (Node t)) f) (set (dtype (Node t)) d)) "
        ':ruleset loading :name "load-free-dtype")'
    )
    facts = (
        f"(relation {table_of(fact)} (i64 i64))"
        f'(rule (({table_of(fact)} t m)) ((set ({fact} (Node t)) m)) :ruleset loading :name "load-{fact}")'
        for fact in GIVEN
    )
    declared = re.findall(r"\(constructor (\w+) \(([^)]*)\) T\)", LANGUAGE)
    return both + "".join(facts) + "".join(_table(name, sorts.split()) for name, sorts in declared if name not in UNTABLED)


def _table(constructor: str, sorts: Sequence[str]) -> str:
    """The table of a constructor: the key of a term, literal arguments, the keys of operands; and the rule that makes its rows nodes."""
    names = [f"x{k}" for k in range(len(sorts))]
    columns = " ".join("i64" if sort == "T" else sort for sort in sorts)
    made = " ".join(f"(Node {x})" if sort == "T" else x for x, sort in zip(names, sorts, strict=True))
    return (
        f"(relation {table_of(constructor)} (i64 {columns}))"
        f"(rule (({table_of(constructor)} t {' '.join(names)})) ((union (Node t) ({constructor} {made}))) "
        f':ruleset loading :name "load-{constructor}")'
    )


def _elementwise(constructor: str, payload: str, arity: int) -> str:
    """An elementwise operation depends on what its operands depend on."""
    args = [f"a{k}" for k in range(arity)]
    free = " ".join(f"(= f{k} (free a{k}))" for k in range(arity))
    union = "f0"
    for k in range(1, arity):
        union = f"(| {union} f{k})"
    known = constructor not in ("Map1", "Map2", "Map3")
    model = args[1] if constructor == "Select" else args[0]
    dtype = '"bool"' if constructor in COMPARISONS else f"(dtype {model})"
    given = f"(= d {dtype})" if known else ""
    actions = f"(set (free e) f) (set (pointwise e) f){' (set (dtype e) d)' if known else ''}"
    facts = f"(rule ((= e ({constructor} {payload} {' '.join(args)})) {free} (= f {union}) {given}) ({actions})"
    return (
        f'{facts} :ruleset analysis :name "facts-{constructor}")'
        + _names_pass(constructor, payload, arity)
        + _takes_sink(constructor, payload, arity)
    )


def _names_pass(constructor: str, payload: str, arity: int, when: str = "") -> str:
    """A change of names, or a diagonal, of an operation is that operation on changed operands, ``when`` it binds none of these names."""
    args = " ".join(f"a{k}" for k in range(arity))
    renamed = " ".join(f"(Ren s d a{k})" for k in range(arity))
    diagonal = " ".join(f"(Diag s d a{k})" for k in range(arity))
    head = f"{constructor} {payload}"
    return (
        f'(rewrite (Ren s d ({head} {args})) ({head} {renamed}) {when} :ruleset simplify :name "rename-{constructor}")'
        f'(rewrite (Diag s d ({head} {args})) ({head} {diagonal}) {when} :ruleset simplify :name "diagonal-{constructor}")'
    )


def _takes_sink(constructor: str, payload: str, arity: int, when: str = "") -> str:
    """Rows of an operation are that operation on rows of its operands, where rules say so (``sinks``)."""
    operation = f"({constructor} {payload} {' '.join(f'a{k}' for k in range(arity))})"
    of_rows = f"({constructor} {payload} {' '.join(f'(Take i p a{k})' for k in range(arity))})"
    return (
        f'(rule ((sinks i p {operation}) {when}) ((union (Take i p {operation}) {of_rows})) :ruleset simplify :name "take-{constructor}")'
    )


def _operation(constructor: str, operation: ops.Operation) -> str:
    """An operation of the user's: the indices that its function sees are bound, less those of the result; all others are pointwise."""
    named = {name: f"k{n}" for n, name in enumerate(operation.dimensions)}
    args = [f"a{k}" for k in range(len(operation.operands))]
    batch = [_without(f"f{k}", [named[name] for name in names]) for k, names in enumerate(operation.operands)]
    dtype = f"(dtype {args[operation.dtype]})" if isinstance(operation.dtype, int) else f'"{operation.dtype}"'
    head = f"{constructor} {' '.join(named.values())}"
    given = " ".join(f"(= f{k} (free {a}))" for k, a in enumerate(args))
    folds = "" if operation.monoid is None else "(set (combined e) k0) (want k0) (want (| k0 b))"
    free, slices = _union(["b", *(named[name] for name in operation.result)]), _without("b", list(named.values()))
    facts = (
        f"(rule ((= e ({head} {' '.join(args)})) {given} (= b {_union(batch)}) (= d {dtype})) "
        f"((set (dtype e) d) (set (free e) {free}) (set (pointwise e) {slices}){folds})"
    )
    sorts = ("i64",) * len(named) + ("T",) * len(args)
    declared = f"(constructor {constructor} ({' '.join(sorts)}) T)" + _table(constructor, sorts)
    axes = _union(list(named.values()))
    apart = f":when ((= (& (| s d) {axes}) 0))" if named else ""
    elsewhere = f"(= fp (free p)) (= (& (| i fp) {axes}) 0)" if named else ""
    return (
        declared
        + facts
        + f' :ruleset analysis :name "facts-{constructor}")'
        + _names_pass(constructor, " ".join(named.values()), len(args), apart)
        + _takes_sink(constructor, " ".join(named.values()), len(args), elsewhere)
    )


def _union(sets: Sequence[str]) -> str:
    """The expression for a union of index sets."""
    return "0" if not sets else reduce(lambda a, b: f"(| {a} {b})", sets)


def _without(mask: str, others: Sequence[str]) -> str:
    """The expression for an index set without others."""
    return f"(& {mask} (not-i64 {_union(others)}))" if others else mask


LANGUAGE_CONSTRUCTORS = frozenset(re.findall(r"\(constructor (\w+)", LANGUAGE))
NAMES = frozenset(re.findall(r"\((?:function|relation) (\w+)", LANGUAGE))
"""The functions and relations of the language."""
PRIMITIVES = frozenset({"=", "!=", "<", "<=", ">", ">=", "&", "|", "^", "+", "-", "*", "/", "%", "not-i64", "min", "max", "abs", "neg",
                        "<<", ">>", "to-f64", "to-i64"})  # fmt: skip
"""Functions of numbers and index sets that rules may use."""
RULE_NAMES = frozenset(re.findall(r':name "([^"]+)"', LANGUAGE))


def roles(head: str, arity: int, own: Own = NOTHING) -> tuple[str, ...]:
    """The meaning of each argument of a constructor."""
    if head in own:
        axes = "index" if own[head].monoid is None else "set"
        return (axes,) * len(own[head].dimensions) + ("T",) * len(own[head].operands)
    return ROLES.get(head, ("T",) * arity)


@cache
def arity(head: str) -> int | None:
    """The number of arguments that a name of the language takes; None for any number."""
    if head in PRIMITIVES:
        return {"not-i64": 1, "neg": 1, "abs": 1, "to-f64": 1, "to-i64": 1, "!=": 2, "<": 2, "<=": 2, ">": 2, ">=": 2, "/": 2, "%": 2}.get(
            head
        )
    found = re.search(rf"\((?:constructor|function|relation) {re.escape(head)} \(([^)]*)\)", LANGUAGE)
    if found is not None:
        return len(found[1].split())
    row = next((row for row in ops.MAPS.values() if row.constructor == head), None)
    return None if row is None else row.arity


@cache
def constructor_of() -> dict[str, str]:
    """Primitives without parameters, by name, and their constructors."""
    return {name: op.constructor for name, op in ops.MAPS.items() if op.constructor not in LANGUAGE_CONSTRUCTORS}


@cache
def primitive_of() -> dict[str, str]:
    return {constructor: name for name, constructor in constructor_of().items()}


def elementwise_used(forms: Iterable[object]) -> dict[str, int]:
    """The elementwise constructors of parsed forms and how many operands they stand with."""
    found: dict[str, int] = {}
    for form in forms:
        if isinstance(form, list):
            head = form[0] if form else None
            if isinstance(head, str) and head in primitive_of():
                found[head] = len(form) - 1
            found |= elementwise_used(form)
    return found
