"""Random programs against their plans: ``python -m tests.oracles.fuzz --seconds 60 --seed 0`` prints a script for the first failure."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import jax

from tests.oracles.differential import Case, Mismatch, case, check_plan, few_plans, plans, script
from tests.oracles.programs import Sample, sample


def failure(seed: int, jit: bool = False, thorough: bool = True, few: bool = False) -> str | None:
    """A script that shows what is wrong with some plan of the program of a seed, or None. ``few`` plans take no e-graph."""

    def checks(known: Case) -> Iterator[str]:
        for word, made in few_plans(known, seed) if few else plans(known, seed, thorough):
            yield word
            check_plan(known, made, jit)

    return first_failure(sample(seed), checks)


def first_failure(drawn: Sample, checks: Callable[[Case], Iterator[str]]) -> str | None:
    """A script that shows the first check of a program that fails, or None.

    Args:
        drawn: the program.
        checks: a generator of the program's checks. It yields the name of each check before it makes it, and the check raises.
    """
    try:
        known = case(drawn)
    except (NotImplementedError, TypeError):
        return None  # a dtype that JAX traces and does not run
    except Exception as error:
        return f"# the program of seed {drawn.seed} itself: {type(error).__name__}: {error}\n{drawn.source}"
    name = "none"
    try:
        for name in checks(known):  # noqa: B007  # messages name the last
            pass
    except Mismatch as error:
        return f"{script(drawn, name, error.source)}\n# {name}: " + str(error).replace("\n", "\n# ")
    except Exception:
        return f"{script(drawn, name, '')}\n# after {name}: " + traceback.format_exc().replace("\n", "\n# ")
    return None


BLOCK = 100
"""Programs after which a search says how far it is, and forgets what JAX keeps of them."""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """The options of a search for failures, for :func:`search`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--keep-going", action="store_true", help="report every failure")
    return parser


def search(options: argparse.Namespace, failure: Callable[[int], str | None]) -> int:
    """Print failures of seed after seed until the time is up, or until the first; the exit status is 1 if there was any."""
    end, seed, failures = time.monotonic() + options.seconds, options.seed, 0
    with jax.enable_x64(True):
        while time.monotonic() < end and (options.keep_going or not failures):
            if (done := seed - options.seed) % BLOCK == 0 and done:
                jax.clear_caches()  # each program leaves some 10 MiB there
                print(f"{done} programs, {failures} failed", file=sys.stderr, flush=True)
            found = failure(seed)
            if found is not None:
                failures += 1
                print(f"# seed {seed}\n{found}\n", flush=True)
            seed += 1
    print(f"{seed - options.seed} programs from seed {options.seed} on: {failures} failed")
    return int(failures > 0)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--jit", action="store_true", help="compile the plans instead of running them equation by equation")
    parser.add_argument("--few", action="store_true", help="few plans of each program and no e-graph, for more programs")
    options = parser.parse_args()
    return search(options, lambda seed: failure(seed, options.jit, few=options.few))


if __name__ == "__main__":
    sys.exit(main())
