"""Random programs against their plans: ``python -m tests.oracles.fuzz --seconds 60 --seed 0`` prints a script for the first failure."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

import jax

from tests.oracles.differential import Mismatch, case, check_plan, few_plans, plans, script
from tests.oracles.programs import sample


def failure(seed: int, jit: bool = False, thorough: bool = True, few: bool = False) -> str | None:
    """A script that shows what is wrong with some plan of the program of a seed, or None. ``few`` plans take no e-graph."""
    drawn = sample(seed)
    try:
        known = case(drawn)
    except (NotImplementedError, TypeError):
        return None  # a dtype that JAX traces and does not run
    except Exception as error:
        return f"# the program of seed {seed} itself: {type(error).__name__}: {error}\n{drawn.source}"
    word = "none"
    try:
        for word, made in few_plans(known, seed) if few else plans(known, seed, thorough):  # noqa: B007  # messages name the last
            check_plan(known, made, jit)
    except Mismatch as error:
        return f"{script(drawn, word, error.source)}\n# {word}: " + str(error).replace("\n", "\n# ")
    except Exception:
        return f"{script(drawn, word, '')}\n# after {word}: " + traceback.format_exc().replace("\n", "\n# ")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jit", action="store_true", help="compile the plans instead of running them equation by equation")
    parser.add_argument("--few", action="store_true", help="few plans of each program and no e-graph, for more programs")
    parser.add_argument("--keep-going", action="store_true", help="report every failure")
    options = parser.parse_args()
    end, seed, failures = time.monotonic() + options.seconds, options.seed, 0
    with jax.enable_x64(True):
        while time.monotonic() < end:
            found = failure(seed, options.jit, few=options.few)
            if found is not None:
                failures += 1
                print(f"# seed {seed}\n{found}\n", flush=True)
                if not options.keep_going:
                    return 1
            seed += 1
    print(f"{seed - options.seed} programs from seed {options.seed} on: {failures} failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
