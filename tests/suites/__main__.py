"""``python -m tests.suites --checkouts FOLDER``: no test that passes under plain Python may fail under ``eqsat-mem run``.

Parts of the test suites of JAX and of libraries on top of it are run twice, plain and under ``run``, where each function has a limit of
its arguments, its outputs and 25 to 60 % of what its equations make (``squeezing.py``), so that planning happens. Tests that pass plain
and fail under ``run`` are printed with their errors, and so are errors inside the planner; both end the script with status 1, unless the
catalogue excuses them.

The libraries are those installed for ``--python``, in an environment of its own which has egglog, opt_einsum, pytest and what ``--list``
says besides. Wheels have no tests: FOLDER has a checkout of each, in a folder of the suite's name, at the tag that ``--list`` says.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.suites.catalogue import SUITES, Suite, excuse

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WAYS = "plain", "run"
GRACE = 300.0
"""Seconds for a process that is interrupted to end."""
BAD = "failed", "error", "too long", "died"


@dataclass
class Outcome:
    """The end of a test: "passed", "failed", "skipped", "error" outside of the test itself, "too long", "died" with its process, or
    "stopped" when the time of its process was up."""

    outcome: str
    seconds: float = 0.0
    said: str = ""


@dataclass
class Compared:
    """The tests of a suite that ended in both ways.

    Attributes:
        both: how many ended so, by how they did plain.
        missing: how many ended plain, and not under ``run``, since its process ended before.
        broken: the tests that pass plain and not under ``run``, each with what was said.
        excused: those of them that the catalogue excuses, each with the reason.
        planned: how many functions had which outcome.
        inside: errors inside the planner.
        seconds: seconds of the processor that tests took, in each of the ways.
    """

    both: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    excused: dict[str, str] = field(default_factory=dict)
    planned: Counter[str] = field(default_factory=Counter)
    inside: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


def outcomes(text: str) -> dict[str, Outcome]:
    """The outcome of each test, from the lines that the plugin wrote; a test that only began took the process with it."""
    found: dict[str, Outcome] = {}
    for line in map(json.loads, text.splitlines()):
        test, outcome = line.pop("test"), line.pop("outcome")
        known = found.get(test)
        if outcome == "began":
            found[test] = Outcome("died")
        elif known is None or known.outcome not in BAD[:3]:  # a teardown may fail after the test, and not mend it
            found[test] = Outcome(outcome, **line)
    return found


def compare(suite: str, plain: dict[str, Outcome], ours: dict[str, Outcome], reports: list[dict]) -> Compared:
    """The differences between the two ways of a suite."""
    result = Compared(missing=len(plain.keys() - ours.keys()))
    for test in plain.keys() & ours.keys():
        before, after = plain[test], ours[test]
        result.both[before.outcome] += 1
        if before.outcome == "passed" and after.outcome in BAD:
            name = f"{suite}:{test}"
            why = excuse(name)
            (result.excused if why else result.broken)[name] = why or f"{after.outcome}: {after.said}"
    for way, known in zip(WAYS, (plain, ours)):
        result.seconds[way] = sum(outcome.seconds for outcome in known.values())
    for entry in (entry for report in reports for entry in report["functions"]):
        result.planned[entry["outcome"]] += 1
        if entry["traceback"]:
            result.inside[f"{suite}: {entry['function']} ({entry['place']})"] = entry["traceback"]
    return result


def command(python: str, way: str, report: Path) -> list[str]:
    """The command that runs pytest in one of the ways."""
    run = ["-m", "eqsat_mem", "run", "--memory-limit", "1GiB", "--report", str(report)] if way == "run" else []
    pytest = ["-p", "squeezing", "-q", "--no-header", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb", "no"]
    return [python, *run, "-m", "pytest", *pytest]


def files_of(suite: Suite, checkout: Path) -> list[str]:
    """The files of tests, relative to the checkout."""
    found = {path for pattern in suite.files for path in glob.glob(pattern, root_dir=checkout, recursive=True)}
    return sorted(found - {path for pattern in suite.without for path in glob.glob(pattern, root_dir=checkout, recursive=True)})


def ended(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The status of a process; None where it took too long and was interrupted, so that its report is written, or else killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return None


def run(suite: Suite, way: str, folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """Run the files of a suite in one of the ways, each in a process of its own or all in one, but for those already run; tell of each."""
    files = [file for file in files_of(suite, options.checkouts / suite.name) if not options.files or any(p in file for p in options.files)]
    for name, together in {"all": files}.items() if options.together else {file: [file] for file in files}.items():
        stem = folder / suite.name / way / name.replace("/", ".")
        done, noted = stem.with_suffix(".done"), stem.with_suffix(".jsonl")
        if done.exists():
            continue
        stem.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text("")
        environment = {
            **os.environ,
            **suite.environment,
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, ROOT))),
            "EQSAT_MEM_PROFILES": "none",
            "EQSAT_MEM_DEBUG": "0",  # no progress, which comes after a second: tests compare what is written to stderr
            "JAX_PLATFORMS": "cpu",
            "SUITES_OUTCOMES": str(noted),
            "SUITES_SAMPLE": str(options.sample),
            "SUITES_SEED": str(options.seed),
            "SUITES_SECONDS": str(options.seconds),
        }
        with stem.with_suffix(".log").open("w") as log:
            code = ended(
                subprocess.Popen(
                    [*command(options.python, way, stem.with_suffix(".json")), *together],
                    cwd=options.checkouts / suite.name,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                ),
                options.process_seconds,
            )
            if code is None:
                running = [test for test, outcome in outcomes(noted.read_text()).items() if outcome.outcome == "died"]
                with noted.open("a") as file:
                    file.writelines(json.dumps({"test": test, "outcome": "stopped"}) + "\n" for test in running)
        done.write_text(str(code))
        counted = Counter(outcome.outcome for outcome in outcomes(noted.read_text()).values())
        how = "stopped" if code is None else "" if code in (0, 1, 5) else f"status {code}"
        yield f"{suite.name} {way} {name}: {', '.join(f'{n} {what}' for what, n in sorted(counted.items())) or 'none'} {how}".rstrip()


def results(suite: Suite, folder: Path) -> Compared:
    """The comparison of a suite, from the files in ``folder``."""
    known = {way: sorted((folder / suite.name / way).glob("*.jsonl")) for way in WAYS}
    plain, ours = ({f"{k}": v for path in known[way] for k, v in outcomes(path.read_text()).items()} for way in WAYS)
    reports = [json.loads(path.read_text()) for path in sorted((folder / suite.name / "run").glob("*.json")) if path.read_text()]
    return compare(suite.name, plain, ours, reports)


def told(name: str, compared: Compared) -> Iterator[str]:
    """The comparison of a suite, as lines of text."""
    both = ", ".join(f"{n} {what}" for what, n in compared.both.most_common())
    planned = ", ".join(f"{n} {what}" for what, n in compared.planned.most_common())
    seconds = ", ".join(f"{way} {compared.seconds[way]:.0f} s" for way in WAYS)
    missing = f", {compared.missing} not reached under run" if compared.missing else ""
    yield f"{name}: {sum(compared.both.values())} tests ({both}), {len(compared.broken)} broken, {len(compared.excused)} excused{missing}"
    yield f"  functions: {planned}; {seconds}"
    for test, why in sorted(compared.excused.items()):
        yield f"  excused {test}: {why}"
    for test, said in sorted(compared.broken.items()):
        yield f"  BROKEN {test}\n{_last_lines(said)}"
    for function, trace in sorted(compared.inside.items()):
        yield f"  INSIDE {function}\n{_last_lines(trace)}"


def _last_lines(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.strip().splitlines()[-12:])


def listed(python: str) -> Iterator[str]:
    """Commands that get the checkouts, and packages to install, for the versions that are installed."""
    ask = [python, "-c", "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"]
    versions = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
    for suite in SUITES:
        version = versions.get(suite.package)
        needs = f"; also install {', '.join(suite.needs)}" if suite.needs else ""
        if version is None:
            yield f"{suite.name}: install {suite.package}, then ask again{needs}"
        else:
            tag = suite.tag.format(version)
            yield f"{suite.name}: git clone --depth 1 --branch {tag} https://github.com/{suite.repository} {suite.name}{needs}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join(suite.name for suite in SUITES)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"which ones (default: all that FOLDER has): {names}")
    parser.add_argument("--checkouts", type=Path, metavar="FOLDER", help="the folder of the checkouts")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the libraries (default: this one)")
    parser.add_argument("--list", action="store_true", help="say how to get the checkouts, and stop")
    parser.add_argument("--results", type=Path, default=Path("suites-results"), help="the folder of outcomes, from which a run goes on")
    parser.add_argument("--files", nargs="*", default=[], help="only files whose paths contain one of these")
    parser.add_argument("--sample", type=float, default=1.0, help="the share of the tests that are run (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="which share")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of the processor that a test may take")
    parser.add_argument("--together", action="store_true", help="one process for all files of a suite, for samples")
    parser.add_argument("--process-seconds", type=float, default=3600.0, help="seconds that a process of tests may take")
    options = parser.parse_args()
    if options.list:
        print(*listed(options.python), sep="\n")
        return 0
    if options.checkouts is None:
        parser.error("--checkouts FOLDER is missing: --list says how to get them")
    options.checkouts, options.results = options.checkouts.resolve(), options.results.resolve()
    chosen = [suite for suite in SUITES if suite.name in (options.suites or os.listdir(options.checkouts))]
    for suite in chosen:
        for way in WAYS:
            for line in run(suite, way, options.results, options):
                print(line, flush=True)
    bad = 0
    for suite in chosen:
        compared = results(suite, options.results)
        bad += len(compared.broken) + len(compared.inside)
        print(*told(suite.name, compared), sep="\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
