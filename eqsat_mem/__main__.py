"""The command line: ``eqsat-mem plan``, ``tune`` and ``report`` show a plan, ``run`` plans a script, ``demo`` does the main job."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from eqsat_mem import __version__
from eqsat_mem.cli.commands import cache, check_rules, devices, errors, rules, show
from eqsat_mem.error_table import pointer
from eqsat_mem.errors import EqsatMemError, OptionError, UserFileError
from eqsat_mem.units import for_terminal, format_bytes

if TYPE_CHECKING:
    from eqsat_mem.reports.plan import Plan

USER_ERROR = 2
SAVED = ".plan"
"""The ending of files of plans."""
TUNE_SECONDS = 60.0
"""The seconds for running plans unless ``tune`` is told."""
WHY_SECONDS = 60.0
"""The seconds that the reasons of a report may take unless it is told."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status is 0, 1 where the demonstration failed, or 2 for an error of the user's."""
    options = _parsed(argv)
    options.command_line = list(sys.argv[1:] if argv is None else argv)
    try:
        status = options.command(options)
    except EqsatMemError as error:
        print("\n".join(filter(None, (f"eqsat-mem: {error}", pointer(error)))), file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # what reads our output has read enough; Python would complain again when it closes it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("eqsat-mem: interrupted", file=sys.stderr)
        return 130
    return int(status() if callable(status) else status)  # a script runs here: what it raises is no error of ours


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line as options. Where a command or an option is unknown, the nearest known one is offered."""
    from eqsat_mem.api.keywords import nearest

    parser = command_line()
    commands = next(action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    first = next(iter(sys.argv[1:] if argv is None else argv), "")
    if first and not first.startswith("-") and first not in commands:
        near = nearest(first, commands)
        parser.error(f"there is no command {first}" + (f": did you mean {near}?" if near else f"; there are {', '.join(commands)}"))
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        known = commands[options.chosen]._option_string_actions
        hints = [near for text in unknown if text.startswith("-") and (near := nearest(text, known))]
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f" (did you mean {', '.join(hints)}?)" if hints else ""))
    return options


DEVICE_HELP = (
    "plan for this device, one that eqsat-mem devices lists or the file of a profile (default: EQSAT_MEM_DEVICE, or the one in use)"
)


SECONDS_HELP = (
    "look no further for a plan after so many seconds (default: EQSAT_MEM_MAX_PLANNING_SECONDS, or five times what XLA takes, at least 60)"
)


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eqsat-mem", description="Fit JAX programs into a memory limit.")
    parser.add_argument("--version", action="version", version=f"eqsat-mem {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="chosen")

    plan = commands.add_parser(
        "plan",
        help="plan a function of a file and print the plan and its source",
        description="Plan a function for the arguments that another function makes. The planned function is traced, not run.",
    )
    _add_function(plan)
    _add_output(plan)
    plan.set_defaults(command=_plan)

    tune = commands.add_parser(
        "tune",
        help="as plan, with the best few plans run on this device: the fastest is kept",
        description="Plan a function for the arguments that another function makes, run the best few plans and, where it fits, the program "
        "as written, and keep the fastest for optimize(..., tune=SECONDS) of the same function. They run on those arguments that are "
        "arrays; for shapes, numbers are made up.",
    )
    _add_function(tune)
    tune.add_argument(
        "--seconds",
        metavar="S",
        default=str(TUNE_SECONDS),
        help="for compiling and running, after the search (default: %(default)s); the best so far counts then",
    )
    _add_output(tune)
    tune.set_defaults(command=_plan)

    report = commands.add_parser(
        "report",
        help="plan a function of a file and write a page about the plan",
        description="Plan a function and write one HTML file, which needs no network: memory over the program before and after, "
        "the loops, bytes per line of your source, and the emitted source. With --why, after further searches, also the rules that "
        "the plan needs, the runners-up, and every way that was found to compute each value.",
    )
    _add_function(report)
    report.add_argument("-o", "--output", metavar="PAGE.html", required=True, help="the file to write")
    report.add_argument(
        "--why",
        metavar="SECONDS",
        nargs="?",
        type=_seconds,
        const=WHY_SECONDS,
        help=f"search for reasons, too, for at most so long ({WHY_SECONDS:g} s); the page says what it did not get to",
    )
    report.set_defaults(command=_report)

    run = commands.add_parser(
        "run",
        help="run an unmodified script in which every function compiled by jax.jit is planned",
        description="Run a script as python does, with every outermost jax.jit function planned. A report at exit says what was planned.",
    )
    run.add_argument(
        "--memory-limit",
        "--limit",
        metavar="SIZE",
        help='what each compiled function may hold, such as 64MiB or "1.5 GB" (default: EQSAT_MEM_LIMIT, or the device\'s capacity)',
    )
    run.add_argument("--max-planning-seconds", metavar="S", help=SECONDS_HELP)
    run.add_argument("--device", metavar="NAME", help=DEVICE_HELP + "; functions planned for one that is not here run as written")
    run.add_argument("--report", metavar="FILE", help="write the report as JSON, too")
    run.add_argument("--strict", action="store_true", help="a function that cannot be planned is an error; else it runs as written")
    run.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    run.add_argument("script", metavar="SCRIPT", help="the script")
    run.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    run.set_defaults(command=_run)

    calibrate = commands.add_parser(
        "calibrate",
        help="measure what this device does per second, for the plans made here",
        description="Measure this device and keep the profile in the user's cache folder, or where EQSAT_MEM_PROFILES says.",
    )
    instead = calibrate.add_mutually_exclusive_group()
    instead.add_argument("--show", action="store_true", help="show the profile that plans are made with; measure nothing")
    instead.add_argument("--reset", action="store_true", help="remove the profile kept for this device")
    instead.add_argument("--mesh", action="store_true", help="measure how fast this machine's devices exchange values, and nothing else")
    calibrate.set_defaults(command=_calibrate)

    demo = commands.add_parser(
        "demo",
        help="a kernel product of 56 GiB in 64 MiB, checked",
        description="Plan a product with a kernel of N x N numbers, run it, and check rows of the result against float64. The exit status "
        "is 1 if it is wrong or over the limit.",
    )
    demo.add_argument("--points", type=_count, default=122_880, metavar="N", help="points on both sides (default: %(default)s)")
    demo.add_argument("--limit", default="64MiB", metavar="SIZE", help="the memory limit (default: %(default)s)")
    demo.set_defaults(command=_demo)
    for command in (cache, check_rules, devices, errors, rules, show):
        command.add(commands)
    return parser


def _add_output(command: argparse.ArgumentParser) -> None:
    """The arguments that say what to print of a plan, and where to write its program."""
    command.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    command.add_argument("--explain", action="store_true", help="print why this plan: its rules, its loops, the runners-up, its peaks")
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="write FILE.plan, which optimize(f, plan=...) takes; or the planned program as StableHLO: FILE.mlir is text, FILE.mlirbc its "
        "bytecode, FILE.jax a file of jax.export",
    )


def _add_function(command: argparse.ArgumentParser) -> None:
    """The arguments that name a function, what to call it with, and how to plan it."""
    command.add_argument(
        "function",
        metavar="PLACE:FUNCTION",
        help="the function to plan: FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION; or the file of a module of StableHLO: text, bytecode, or "
        "a file of jax.export",
    )
    command.add_argument(
        "--args",
        metavar="PLACE:MAKE_ARGS",
        help="a function without parameters that returns the arguments, arrays or jax.ShapeDtypeStructs: a tuple of them, "
        "a dict of keyword arguments, or the only one; a module needs none",
    )
    command.add_argument(
        "--limit",
        "--memory-limit",
        metavar="SIZE",
        help="such as 64MiB or \"1.5 GB\"; else the function's own, EQSAT_MEM_LIMIT, or the device's",
    )
    command.add_argument("--max-planning-seconds", metavar="S", help=SECONDS_HELP)
    command.add_argument("--device", metavar="NAME", help=DEVICE_HELP)
    command.add_argument(
        "--mesh", metavar="AXIS=N[,AXIS=N]", help="plan for a mesh of devices, such as x=64, with the limit on each; they need not be here"
    )
    command.add_argument("--no-tiles", action="store_true", help="no tile kernels: loops and XLA's own kernels only")
    rules.add_choice(command)


def _planned(options: argparse.Namespace) -> tuple[Plan, Callable[[Path], bytes]]:
    """The plan of the function that the command line names, and a function that gives the contents of a file with the plan."""
    from eqsat_mem.api.meshes import mesh_of_text
    from eqsat_mem.api.optimize import optimize
    from eqsat_mem.cli.user_files import plain, subject
    from eqsat_mem.options import parse_seconds

    function, args, kwargs = subject(options.function, options.args)
    written_by = plain(function)
    said = rules.chosen(options) | ({"device": options.device} if options.device else {}) | ({"tiles": False} if options.no_tiles else {})
    if options.max_planning_seconds is not None:
        said |= {"max_planning_seconds": parse_seconds(options.max_planning_seconds, "--max-planning-seconds")}
    said |= {"tune": parse_seconds(options.seconds, "--seconds")} if "seconds" in options else {}
    said |= {"mesh": mesh_of_text(options.mesh)} if options.mesh else {}
    if written_by is function or options.limit or said:
        function = optimize(written_by, memory_limit=options.limit, **said, **getattr(written_by, "donation", {}))
    plan: Plan = function.plan(*args, **kwargs)  # type: ignore[attr-defined]

    def written(path: Path) -> bytes:
        from eqsat_mem.stablehlo.write import written

        elsewhere = None if plan.schedule is None else plan.schedule.backend.exported_for
        return written(function, args, kwargs, path, elsewhere or getattr(written_by, "platform", None))

    return plan, written


def _plan(options: argparse.Namespace) -> int:
    from eqsat_mem.reports.plan_files import saved
    from eqsat_mem.reports.plan_text import WIDE, text_of
    from eqsat_mem.stablehlo.endings import check_ending

    output = None if options.output is None else Path(options.output)
    if output is not None:
        if output.suffix != SAVED:
            check_ending(output)
        _check_folder(output)
    plan, written = _planned(options)
    why = plan.explain() if options.explain else None
    if options.json:
        print(json.dumps(json.loads(plan.to_json()) | ({"why": json.loads(why.to_json())} if why else {}), indent=2))
    else:
        narrow = text_of(plan, min(WIDE, shutil.get_terminal_size((WIDE, 0)).columns))
        print(*filter(None, (narrow, for_terminal(str(why)) if why else None, plan.source)), sep="\n\n")
    if output is not None:
        try:
            data = saved(plan) if output.suffix == SAVED else written(output)
        except NotImplementedError as reason:
            raise UserFileError(str(reason)) from reason
        _write(output, data, sys.stderr)
    return 0


def _check_folder(output: Path) -> None:
    """Raise ``UserFileError`` if there is no folder for a file: asked before planning, which may take a while."""
    if not output.parent.is_dir():
        raise UserFileError(f"there is no folder {output.parent} to write {output.name} to.")


def _write(output: Path, data: bytes, told: TextIO) -> None:
    try:
        output.write_bytes(data)
    except OSError as error:
        raise UserFileError(f"{output} cannot be written: {error.strerror}.") from error
    print(f"wrote {output} ({format_bytes(len(data))})", file=told)


def _report(options: argparse.Namespace) -> int:
    from eqsat_mem.reports.page import page

    output = Path(options.output)
    _check_folder(output)
    text = page(_planned(options)[0], options.why, f"eqsat-mem {shlex.join(options.command_line)}")
    _write(output, text.encode(), sys.stdout)
    return 0


def _run(options: argparse.Namespace) -> Callable[[], int]:
    from eqsat_mem.cli.run import prepare

    script = prepare(
        options.script,
        is_module=options.is_module,
        limit=options.memory_limit,
        seconds=options.max_planning_seconds,
        report=options.report,
        strict=options.strict,
        device=options.device,
    )

    def run() -> int:
        script(options.arguments)
        return 0

    return run


def _calibrate(options: argparse.Namespace) -> int:
    import jax

    from eqsat_mem.backends import calibrate, links, profiles
    from eqsat_mem.backends.choose import backend_in_use, built_in

    def report(what: str) -> None:
        print(f"measuring {what}", file=sys.stderr)

    usual = built_in(jax.default_backend())
    if options.reset:
        gone = profiles.forget()
        print("there is no profile for this device" if gone is None else f"removed {gone}")
        return 0
    if options.mesh:
        measured = replace(backend_in_use().device, near=links.measure(jax.local_devices(), report))
        print(f"kept in {profiles.keep(measured)}", file=sys.stderr)
    elif not options.show:
        known = usual.device
        with suppress(OptionError):  # a damaged profile is replaced
            known = backend_in_use().device
        measured = replace(calibrate.measure(usual, report), near=known.near, far=known.far)
        print(f"kept in {profiles.keep(measured)}", file=sys.stderr)
    used = backend_in_use()
    is_measured = used != usual
    table = calibrate.compared(usual.device, used.device if is_measured else None)
    print(f"{used.device.name}{'' if is_measured else ', of which nothing has been measured'}\n{table}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from eqsat_mem.cli import demo

    return 0 if demo.run(options.points, options.limit) else 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"a number of seconds is needed, not {text!r}.")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number above zero is needed, not {text!r}.")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
