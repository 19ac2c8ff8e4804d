"""Rule files: native egglog text with a card above each rule. Loading one reads it and does nothing else.

A card is what a reader needs to judge a rule, as comment lines directly above it::

    ;; (A B) C = A (B C)
    ;; sound:  reassociate -- sums are taken in another order
    ;; memory: drops the intermediate
    (rule (...) (...) :ruleset explore :name "reassociate")
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from eqsat_mem.egraph import language
from eqsat_mem.egraph.rule_checks import check_declaration, check_rule, own_constructors, variables, words
from eqsat_mem.egraph.sexpr import Form, read_forms
from eqsat_mem.errors import RuleError
from eqsat_mem.ir.ops import Monoid, Operation
from eqsat_mem.passes import EVERY, Card, Pass

SOUNDNESS = {"bitwise": {"bitwise"}, "reassociate": {"bitwise", "reassociate"}, "all": {"bitwise", "reassociate", "real", "guarded"}}
"""For each accuracy that a user may ask for, the soundness that a rule must have; `approx` rules apply where they are named."""
SOUNDNESS["any"] = {*SOUNDNESS["all"], "approx"}

RULE_COMMANDS = frozenset({"rule", "rewrite", "birewrite"})
DECLARATIONS = frozenset({"relation", "function"})
FORBIDDEN = frozenset({"panic", "delete", "subsume", ":subsume"})


@dataclass(frozen=True)
class Rule(Card):
    """One rule with its card.

    Attributes:
        ruleset: "simplify", "explore", "splitting" or "analysis".
        text: the egglog form.
        most_rows: how many rows of the e-graph one match of it can add.
        unchecked: why it may stay unchecked, as its author wrote it; usually nothing.
    """

    ruleset: str
    text: str
    most_rows: int = 0
    unchecked: str = ""

    @property
    def file(self) -> str:
        """The name of its file without ``.egg``."""
        return _file(self.place)


@dataclass(frozen=True)
class RuleSet:
    """The rules and passes that apply, the declarations that rules need, and the elementwise constructors that they name, with arities.

    ``meanings`` are what the declared relations say of values, as rules in the ruleset ``meaning``, by which facts are checked; ``own``
    are the user's operations, by constructor; ``given`` are the names of the rules that do not come with the package; ``unchecked`` has
    the file and name of each declared relation whose facts may stay unchecked, if rules of that file state them, and why; ``shipped`` are
    all rules that come with the package, whether they apply or not.
    """

    rules: tuple[Rule, ...]
    declarations: tuple[tuple[str, str], ...]
    maps: tuple[tuple[str, int], ...]
    meanings: tuple[tuple[str, str], ...] = ()
    own: Mapping[str, Operation] = field(default_factory=dict)
    passes: tuple[Pass, ...] = ()
    given: frozenset[str] = frozenset()
    unchecked: tuple[tuple[str, str, str], ...] = ()
    shipped: tuple[Rule, ...] = ()

    @property
    def cards(self) -> tuple[Rule | Pass, ...]:
        """All that applies."""
        return (*self.rules, *self.passes)

    def names(self, constructor: str) -> bool:
        """Whether any rule speaks of a constructor."""
        return any(f"({constructor} " in rule.text for rule in self.rules)

    def meant(self) -> Iterator[tuple[str, tuple[str, str]]]:
        """The declared relations that say what they mean, each with that as a rule, and its place."""
        for place, text in self.meanings:
            yield text.rpartition('"means-')[2].rstrip('")'), (place, text)

    def texts(self) -> Iterator[tuple[str, str]]:
        """The declarations and the rules that apply, as they stand in their files, each with its place."""
        yield from self.declarations
        for rule in self.rules:
            yield rule.place, rule.text

    @cached_property
    def rulesets(self) -> dict[str, str]:
        """The name of the ruleset that a rule has to itself, by the rule's name: of every rule that applies or comes with the package."""
        return {rule.name: f"{rule.ruleset}-{k}" for k, rule in enumerate(self._declared)}

    def alone(self) -> Iterator[tuple[str, str]]:
        """The texts that egglog is to run, piece by piece, each with the file and line for its messages: declarations, and each rule in
        a ruleset of its own. They are the same whichever of the package's rules apply, so that many e-graphs begin alike."""
        yield from self.declarations
        for rule in self._declared:
            own = self.rulesets[rule.name]
            yield rule.place, f"(ruleset {own})"
            yield rule.place, _in_ruleset(own, rule.text)

    def together(self, without: Collection[str] = ()) -> Iterator[tuple[str, str]]:
        """The texts that make rulesets of the rules that apply and are run at once, with those of the language; some may be left out."""
        for ruleset in (*language.RULESETS, language.ANALYSIS):
            parts = [self.rulesets[rule.name] for rule in self.rules if rule.ruleset == ruleset and rule.name not in without]
            yield "rulesets", f"(unstable-combined-ruleset {language.together(ruleset)} {' '.join([ruleset, *parts])})"

    @cached_property
    def _declared(self) -> tuple[Rule, ...]:
        """The rules that come with the package, those that apply as they do so, and the others that apply."""
        applied = {rule.name: rule for rule in self.rules}
        shipped = {rule.name: applied.get(rule.name, rule) for rule in self.shipped}
        return (*shipped.values(), *(rule for rule in self.rules if rule.name not in shipped))


@lru_cache(maxsize=1024)
def _in_ruleset(ruleset: str, text: str) -> str:
    """The text of a rule, in another ruleset; kept, since every e-graph asks for that of all rules."""
    return re.sub(r"(:ruleset\s+)\w+", rf"\g<1>{ruleset}", text)


Named = TypeVar("Named", bound=Rule | Pass)


def load_rules(
    paths: Sequence[str | Path] = (),
    accuracy: str = "all",
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
    operations: Sequence[Operation | Monoid] = (),
) -> RuleSet:
    """The shipped rule files and those at ``paths``, and all passes, as far as ``accuracy`` allows.

    ``only`` keeps the rules and passes that it names, by the rule or by its file without ``.egg`` (``passes`` for passes); one named there
    by its own name applies whatever its soundness. ``without`` leaves out those that it names in the same way.
    ``operations`` are operations and folds of your own, which rules may name.

    Raises:
        RuleError: with file and line, for a form that is no rule, a card that is missing or wrong, a name that is taken, or what egglog
            would not take; and for a name in ``only`` or ``without`` that no rule and no file has.
        OptionError: for an operation whose name is taken.
    """
    own = own_constructors(operations)
    shipped = default_files()
    texts = tuple((path.name, _read(path)) for path in [*shipped, *map(Path, paths)])
    known = _checked(texts, len(shipped), tuple(own.items()))
    every: list[Rule | Pass] = [*known.rules, *EVERY]
    kept = every if only is None else select(every, only)
    named = set(only or ())
    dropped = {card.name for card in select(every, without)}
    applied = [c for c in kept if c.name not in dropped and (c.sound in SOUNDNESS[accuracy] or c.name in named)]
    rules = tuple(rule for rule in applied if isinstance(rule, Rule))
    passes = tuple(one for one in applied if isinstance(one, Pass))
    return replace(known, rules=rules, own=own, passes=passes, given=known.given & {r.name for r in rules})


@lru_cache(maxsize=16)
def _checked(texts: tuple[tuple[str, str], ...], shipped: int, own: tuple[tuple[str, Operation], ...]) -> RuleSet:
    """All rules of some files, each given as its name and its text; kept, since every plan asks for rules of the same files.

    The first ``shipped`` of them come with the package: a test has checked those, and they are checked again only beside others.
    """
    rules: list[Rule] = []
    taken = {*language.RULE_NAMES, *(known.name for known in EVERY)}
    declarations: list[Form] = []
    forms: list[Form] = []
    given: set[str] = set()
    for number, (name, text) in enumerate(texts):
        found, declared, written = _parsed(name, text)
        declarations += declared
        forms += written
        _refuse_duplicates(found, taken)
        rules += found
        given |= {rule.name for rule in found if number >= shipped}
    operations = dict(own)
    arguments = _check(declarations, forms if len(texts) > shipped else [], operations)
    return RuleSet(
        rules=tuple(rules),
        shipped=tuple(rule for rule in rules if rule.name not in given),
        declarations=tuple((form.place, form.text) for form in declarations),
        maps=tuple(sorted(language.elementwise_used(form.tree for form in forms).items())),
        meanings=tuple(_meaning(form, arguments, operations) for form in declarations if _said(form, "means")),
        given=frozenset(given),
        unchecked=tuple((_file(form.place), str(form.tree[1]), why) for form in declarations if (why := _said(form, "unchecked"))),
    )


def _check(declarations: Sequence[Form], forms: Sequence[Form], own: Mapping[str, Operation]) -> dict[str, int]:
    """Refuse what no rule may say; how many arguments each declared relation and function has."""
    places: dict[str, str] = {constructor: f"an operation of {operation.place}" for constructor, operation in own.items()}
    arguments: dict[str, int] = {}
    for form in declarations:
        name, count = check_declaration(form, places)
        places[name], arguments[name] = form.place, count
    for form in forms:
        if form.tree[0] in RULE_COMMANDS:
            for name in sorted(variables(form) & (set(places) - set(own))):
                raise RuleError(f"{form.place}: the variable {name!r} has the name of what {places[name]} declares; rename one of them.")
            check_rule(form, arguments, own)
    return arguments


def select(rules: Sequence[Named], names: Sequence[str]) -> list[Named]:
    """The rules and passes that ``names`` name, each by its own name or by its file's, with or without ``.egg``.

    Raises:
        RuleError: for a name that no rule, pass or file has; it tells similar ones.
    """
    known = {rule.name for rule in rules} | {rule.file for rule in rules}
    wanted = {name.removesuffix(".egg") for name in names}
    for name in sorted(wanted - known):
        similar = [one for one in sorted(known) if name in one][:3] or difflib.get_close_matches(name, sorted(known), 3)
        hint = f"; similar ones are {', '.join(map(repr, similar))}" if similar else ""
        raise RuleError(f"no rule, pass or rule file is named {name!r}{hint}; eqsat-mem rules lists all.")
    return [rule for rule in rules if rule.name in wanted or rule.file in wanted]


def _file(place: str) -> str:
    """The name of the file of a place, without ``.egg``."""
    return place.rpartition(":")[0].removesuffix(".egg")


def default_files() -> list[Path]:
    """The shipped rule files: in the package where it is installed, beside it in a checkout."""
    package = Path(__file__).parent.parent
    folder = next((f for f in (package / "rules", package.parent / "rules") if f.is_dir()), None)
    if folder is None:
        places = f"{package / 'rules'} nor in {package.parent / 'rules'}"
        raise RuleError(f"the shipped rule files are neither in {places}: install the package again.")
    return sorted(folder.glob("*.egg"))


def _refuse_duplicates(found: Sequence[Rule], taken: set[str]) -> None:
    for rule in found:
        if rule.name in taken:
            raise RuleError(f"{rule.place}: another rule is named {rule.name!r}; names of rules are unique over all rule files.")
        taken.add(rule.name)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RuleError(f"the rule file {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def _parsed(name: str, text: str) -> tuple[list[Rule], list[Form], list[Form]]:
    """The rules of a file, its declarations, and all of its forms."""
    rules: list[Rule] = []
    declarations: list[Form] = []
    forms = read_forms(text, name)
    for form in forms:
        head = form.tree[0] if form.tree and isinstance(form.tree[0], str) else ""
        if head in RULE_COMMANDS:
            rules.append(_rule(form))
        elif head in DECLARATIONS:
            declarations.append(form)
        else:
            raise RuleError(
                f"{form.place}: ({head} ...) may not stand in a rule file. A rule file is data: it holds "
                f"{', '.join(sorted(RULE_COMMANDS | DECLARATIONS))}, and loading it reads, writes and runs nothing."
            )
    return rules, declarations, forms


def _said(form: Form, key: str) -> str:
    """The text after `means:` or `unchecked:` above a declaration."""
    fields: dict[str, str] = {}
    current = ""
    for line in form.comments:
        head, colon, rest = line.partition(":")
        current = head.strip() if colon and head.strip() in ("means", "unchecked") else current
        fields[current] = f"{fields.get(current, '')} {rest if colon and head.strip() == current else line}".strip()
    return fields.get(key, "")


def _meaning(form: Form, declared: dict[str, int], own: Mapping[str, Operation]) -> tuple[str, str]:
    """`;; means: premises => action` above a relation, as a rule."""
    premises, arrow, action = _said(form, "means").partition("=>")
    if not arrow or not action.strip().startswith("(union"):
        raise RuleError(f"{form.place}: what a relation means is written ';; means: premises => (union ...)', as in a rule.")
    text = f'(rule ({premises.strip()}) ({action.strip()}) :ruleset meaning :name "means-{form.tree[1]}")'
    (rule,) = read_forms(text, form.place)
    check_rule(replace(rule, place=form.place), declared, own)
    return form.place, text


def _rule(form: Form) -> Rule:
    for word in words(form.tree):
        if word in FORBIDDEN or word.startswith("py-"):
            raise RuleError(f"{form.place}: {word!r} may not stand in a rule: rules add equations and facts, and run nothing else.")
    options = _options(form)
    name, ruleset = options.get(":name", ""), options.get(":ruleset", "")
    if not name:
        raise RuleError(f'{form.place}: the rule has no name; add :name "...", unique over all rule files.')
    if ruleset not in (*language.RULESETS, language.ANALYSIS):
        known = f"{', '.join(language.RULESETS)} or analysis"
        raise RuleError(f"{form.place}: rule {name!r} is in ruleset {ruleset or '(none)'!r}; it must be in {known}.")
    equation, sound, why, memory, unchecked = _card(form, name)
    made = form.tree[1:] if form.tree[0] == "birewrite" else form.tree[2]
    return Rule(name, equation, sound, why, memory, form.place, ruleset, form.text, _rows(made), unchecked)


def _rows(tree: Any) -> int:
    """The number of nodes and facts that expressions stand for."""
    if isinstance(tree, str):
        return 0
    own = bool(tree) and isinstance(tree[0], str) and tree[0] not in ("union", "let", *language.PRIMITIVES)
    return own + sum(map(_rows, tree))


def _card(form: Form, name: str) -> tuple[str, str, str, str, str]:
    fields: dict[str, str] = {}
    equation: list[str] = []
    key = ""
    for line in form.comments:
        head, colon, rest = line.partition(":")
        if colon and head.strip() in ("sound", "memory", "unchecked"):
            key = head.strip()
            fields[key] = rest.strip()
        elif key:
            fields[key] += " " + line.strip()
        else:
            equation.append(line.strip())
    sound, _, why = (part.strip() for part in fields.get("sound", "").partition("--"))
    known = (*SOUNDNESS["all"], "approx")
    required = {"an equation": equation, "sound:": sound in known and why, "memory:": fields.get("memory")}
    missing = [what for what, there in required.items() if not there]
    if missing:
        raise RuleError(
            f"{form.place}: the card above rule {name!r} lacks {' and '.join(missing)}. A card is ';; equation', "
            f"';; sound: {'|'.join(sorted(known))} -- why' and ';; memory: ...', directly above the rule."
        )
    return " ".join(equation), sound, why, fields["memory"], fields.get("unchecked", "")


def _options(form: Form) -> dict[str, str]:
    """The options of a form: `:name "x"` as ":name" and "x"."""
    atoms = [(k, v) for k, v in pairwise(form.tree) if isinstance(k, str) and isinstance(v, str)]
    return {k: v.strip('"') for k, v in atoms if k.startswith(":")}
