"""Rule files that ask for too much: none takes planning or checking down.

``python -m tests.oracles.hostile_rules --count N --seed S`` makes N files, of rules that grow, explode late, are thousands of premises wide
or have no value, and plans a small program with each. Every file must end within 60 s of the processor and 2 GiB: with a RuleError that
names file and line, or, where it stays within the limits of saturation, with a plan. Files run in another process, so that a hang or a
crash is seen.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import select
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

SECONDS, BYTES = 60.0, 2 << 30
HANG = 10 * SECONDS
"""Seconds without an answer: a machine that is busy otherwise gives a file a part of its processors."""
CARD = ";; a = a\n;; sound: real -- why\n;; memory: none\n"
RESTING = ("analysis", "simplify", "splitting")
Random = random.Random


class Text:
    """A file in the making."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def declare(self, text: str) -> None:
        self.parts.append(text)

    def rule(self, premises: str, actions: str, ruleset: str) -> None:
        number = sum(":name" in part for part in self.parts)
        self.parts.append(f'{CARD}(rule ({premises}) ({actions}) :ruleset {ruleset} :name "hostile-{number}")')

    def __str__(self) -> str:
        return "\n\n".join(self.parts) + "\n"


def counters(rng: Random, out: Text) -> None:
    """Numbers that go up, one by one or faster."""
    ruleset = rng.choice(RESTING)
    sort, first, new = rng.choice(
        [
            ("i64", "1", f"(+ n {rng.randint(1, 9)})"),
            ("i64", "1", "(+ n n)"),
            ("i64", "3", "(* n 3)"),
            ("f64", "1.5", "(* n 1.000001)"),
            ("f64", "1.0", "(+ n 1.0)"),
            ("String", '"ab"', "(+ n n)"),
            ("String", '"ab"', '(+ n "c")'),
        ]
    )
    out.declare(f"(relation tally ({sort}))")
    out.rule("(= e (Exp a))", f"(tally {first})", ruleset)
    out.rule("(tally n)", f"(tally {new})" + rng.choice(["", f" (tally {new.replace('n', '(+ n n)', 1)})"]), ruleset)


def terms(rng: Random, out: Text) -> None:
    """Terms that contain themselves once more."""
    made = rng.choice(
        [
            "(union e (Exp (Neg (Exp a))))",
            "(union e (Mul (Exp (Neg a)) (Exp (Add a a))))",
            "(union e (Add (Exp (Mul a a)) (Exp (Exp a))))",
            "(let b (Mul e a)) (let c (Add b e)) (union e (Exp (Mul b c)))",
            '(union e (Exp (Fold "add" k (Exp a))))',
        ]
    )
    index = "(= k (free a)) " if " k " in made else ""
    out.rule(f"(= e (Exp a)) {index}", made, rng.choice((*RESTING, "explore")))


def sets(rng: Random, out: Text) -> None:
    """Index sets of no indices, wanted or stated."""
    out.rule(
        "(= e (Exp a)) (= m (free e))", rng.choice(["(want (+ m 1))", "(want (<< m 40))", "(set (splits e) (| m (<< m 30)))"]), "analysis"
    )
    if rng.random() < 0.7:
        out.rule("(want m)", rng.choice(["(want (+ m 1))", "(want (* m 3)) (want (+ m 2))", "(want (^ m 5)) (want (+ m m))"]), "analysis")


def late(rng: Random, out: Text) -> None:
    """Nothing for some steps, then everything."""
    ruleset, steps = rng.choice((*RESTING, "explore")), rng.randint(2, 25)
    out.declare("(relation tick (i64 T))\n(relation couple (i64 i64))")
    out.rule("(= e (Exp a))", "(tick 0 e)", ruleset)
    out.rule(f"(tick n e) (< n {steps})", "(tick (+ n 1) e)", ruleset)
    boom = rng.choice(["(couple n 1) (couple 1 n)", "(union e (Exp (Exp (Neg e))))", "(tick (* n n) e) (tick (+ n 1) e)"])
    out.rule(f"(tick n e) (>= n {steps})", boom, ruleset)
    if "couple" in boom:
        out.rule("(couple x y)", "(couple (+ x 1) y) (couple x (+ y 1)) (couple (+ x y) (* 2 y))", ruleset)


def joins(rng: Random, out: Text) -> None:
    """Matches by the power of the number of premises."""
    ruleset, n, ways = rng.choice((*RESTING, "explore")), rng.choice((60, 150, 190)), rng.randint(2, 6)
    out.declare("(relation edge (T i64))\n(relation path (i64 i64))")
    out.rule("(= e (Exp a))", "(edge e 0)", "analysis")
    out.rule(f"(edge e x) (< x {n})", "(edge e (+ x 1))", "analysis")
    premises = " ".join(f"(edge e x{k})" for k in range(ways))
    out.rule(premises, rng.choice([f"(path x0 x{ways - 1})", f"(path (+ x0 x1) (* x{ways - 1} x1))", "(edge e (+ x0 x1))"]), ruleset)


def wide(rng: Random, out: Text) -> None:
    """Thousands of premises, actions, rules or columns."""
    n = rng.choice((200, 1000, 3000, 8000))
    match rng.randrange(5):
        case 0:
            out.rule(" ".join(f"(= e{k} (Add e{k + 1} e{k + 1}))" for k in range(n)), "(union e0 e1)", "simplify")
        case 1:
            out.rule(" ".join(f"(= e (Add a{k} b{k}))" for k in range(n)), "(union a0 b0)", "simplify")
        case 2:
            lets = " ".join(f"(let x{k + 1} (Mul x{k} x{k}))" for k in range(n))
            out.rule("(= x0 (Exp a))", f"{lets} (union x0 x{n})", "simplify")
        case 3:
            for _ in range(n // 10):
                out.rule("(= e (Exp a))", f'(union e (Add (Exp (Neg a)) (Exp (Mul a (Lit {rng.random():.6f} "float64")))))', "simplify")
        case 4:
            out.declare(f"(relation broad ({'T ' * n}))")
            out.rule("(= e (Exp a))", f"(broad {'e ' * n})", "analysis")
            out.rule(
                f"(broad {' '.join(f'x{k}' for k in range(n))})", f"(broad {' '.join(f'x{k}' for k in reversed(range(n)))})", "analysis"
            )


def deep(rng: Random, out: Text) -> None:
    """Expressions inside each other, up to what is allowed and beyond."""
    depth = rng.choice((20, 45, 58, 70, 5000))
    inner = "a"
    for _ in range(depth):
        inner = rng.choice([f"(Exp {inner})", f"(Neg {inner})", f"(Mul {inner} a)"])
    if rng.random() < 0.5:
        out.rule(f"(= e {inner})", "(union e a)", "simplify")
    else:
        out.rule("(= e (Exp a))", f"(union e {inner})", rng.choice((*RESTING, "explore")))


def partial(rng: Random, out: Text) -> None:
    """Expressions without a value: quotients by zero, numbers that overflow, shifts that are too far."""
    ruleset = rng.choice((*RESTING, "explore"))
    value = rng.choice(
        [
            "(/ m 0)",
            "(% m (- m m))",
            "(<< m 64)",
            "(>> m -1)",
            "(<< 1 (+ m 63))",
            "(* 4611686018427387904 (+ 2 m))",
            "(- -9223372036854775807 (+ m 9))",
        ]
    )
    out.rule("(= e (Exp a)) (= m (free e))", rng.choice([f"(want {value})", f"(set (splits e) {value})"]), ruleset)


def merges(rng: Random, out: Text) -> None:
    """Functions whose two values never become one."""
    how, ruleset = rng.choice(["+", "-", "*", "max"]), rng.choice(RESTING)
    out.declare(f"(function weight (T) i64 :merge ({how} old new))")
    out.rule("(= e (Exp a))", "(set (weight e) 2) (set (weight a) 3)", ruleset)
    out.rule("(= n (weight e))", f"(set (weight e) (+ n {rng.randint(1, 3)}))", ruleset)


def strange(rng: Random, out: Text) -> None:
    """Nodes that stand for nothing."""
    made = rng.choice(
        [
            '(Fold "add" (not-i64 0) a)',
            "(Ren f (^ f 1) a)",
            '(Iota f "int32")',
            '(Lit -1.0 "uint8")',
            "(Ren f f a)",
            '(Convert "float16" (Dot f a a))',
            '(Lit NaN "float64")',
            '(Fold "add" (<< f 20) a)',
        ]
    )
    out.rule("(= e (Exp a)) (= f (free a))", f"(union e {made})", rng.choice(("simplify", "explore")))


KINDS: tuple[Callable[[Random, Text], None], ...] = (counters, terms, sets, late, joins, wide, deep, partial, merges, strange)


def hostile(seed: int) -> tuple[str, str]:
    """The kind of a file and its text."""
    rng = random.Random(seed)
    make, out = KINDS[seed % len(KINDS)], Text()
    make(rng, out)
    return make.__name__, str(out)


def outcome(seed: int, folder: Path) -> str:
    """The outcome of planning a small program with a file: "planned", "stopped", or the error."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from eqsat_mem.egraph.extract import extract
    from eqsat_mem.egraph.rule_files import load_rules
    from eqsat_mem.egraph.saturate import attributed, saturate
    from eqsat_mem.errors import RuleError
    from eqsat_mem.frontend.load import load

    path = folder / f"hostile{seed}.egg"
    path.write_text(hostile(seed)[1])
    x, y = np.ones((20, 3)), np.ones((30, 3))

    def fun(x, y):
        return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)), jnp.exp(-x) * 2.0, jnp.max(x, 0)

    def planned(rules):
        view = saturate(program, rules)
        extract(view, lambda program, t, unrolled: 1.0, 0.0)
        return "planned" if view.stopped == "saturated" else "stopped"

    program = load(jax.make_jaxpr(fun)(x, y), ["x", "y"])
    try:
        return attributed(load_rules([path]), planned)
    except RuleError as error:
        return f"error {' '.join(str(error).split())}"


def _spent() -> float:
    """Seconds of the processor that this process and those that it has waited for have taken."""
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def _held() -> int:
    """The most bytes that this process has held; ``getrusage`` would tell what the process that started it held by then."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def run_here(seeds: range) -> None:
    """Plan with each file, and tell how that ended, how many seconds of the processor it took and how much memory."""
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            start = _spent()
            what = outcome(seed, Path(folder))
            used = max(_held(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
            print(f"{seed} {_spent() - start:.2f} {used} {what}", flush=True)


def run(first: int, count: int) -> list[tuple[int, float, int, str]]:
    """Seed, seconds of the processor, bytes and outcome of each file, run in processes that are replaced where they hang or crash."""
    results: list[tuple[int, float, int, str]] = []
    seed, end = first, first + count
    while seed < end:
        command = [sys.executable, "-m", "tests.oracles.hostile_rules", "--here", "--seed", str(seed), "--count", str(end - seed)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout is not None
        while seed < end:
            ready, _, _ = select.select([child.stdout], [], [], HANG)
            line = child.stdout.readline() if ready else ""
            if not line:
                child.kill()
                results.append((seed, HANG, 0, "abort" if ready else "hang"))
                seed += 1
                break
            number, seconds, used, what = line.rstrip("\n").split(" ", 3)
            results.append((int(number), float(seconds), int(used), what))
            seed = int(number) + 1
        child.kill()
        child.communicate()
    return results


def verdict(result: tuple[int, float, int, str]) -> str:
    """The outcome for a file, in a word: "named", "planned" and "stopped" are as they should be."""
    seed, seconds, used, what = result
    if seconds > SECONDS or used > BYTES:
        return "over"
    if not what.startswith("error"):
        return what
    return "named" if re.search(rf"hostile{seed}\.egg:\d+", what) else "unnamed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true", help="print how each file ended")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        run_here(range(options.seed, options.seed + options.count))
        return 0
    results = run(options.seed, options.count)
    if options.each:
        for result in results:
            print(hostile(result[0])[0], *result)
    found = {kind.__name__: Counter[str]() for kind in KINDS}
    for result in results:
        found[hostile(result[0])[0]][verdict(result)] += 1
        if verdict(result) not in ("named", "planned", "stopped"):
            print(*result)
    for kind, counts in found.items():
        print(f"{kind:<10} {', '.join(f'{n} {what}' for what, n in sorted(counts.items()))}")
    bad = sum(verdict(result) not in ("named", "planned", "stopped") for result in results)
    print(f"{len(results)} files, {bad} bad; at most {max(r[1] for r in results):.1f} s and {max(r[2] for r in results) >> 20} MiB")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
