"""EQSAT_MEM_DEBUG and the progress line: what they say, where, and that they are silent otherwise."""

from __future__ import annotations

import io
import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.events import Began, Ended, Explaining, Kept, Settled, StageBegan, Tried, anyone_listens, listening, tell
from eqsat_mem.reports import debug, progress
from tests.reports.test_explain import power_iteration

ARGS = (jax.ShapeDtypeStruct((600, 3), jnp.float32), jax.ShapeDtypeStruct((600, 1), jnp.float32))


class Terminal(io.StringIO):
    """Text that was written to what says that it is a terminal."""

    def isatty(self):
        return True


def said(level, monkeypatch, capsys):
    monkeypatch.setenv("EQSAT_MEM_DEBUG", level)
    monkeypatch.setattr(progress, "on_stderr", lambda name: nullcontext())  # on a busy machine, planning takes long enough to be told of
    eqsat_mem.optimize(power_iteration, memory_limit="200kB", verify=False, max_seconds=60.0).plan(*ARGS)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


FROM = {
    1: ("planning power_iteration within 195.31 KiB", "planned power_iteration: ", "saturate: ", "  planning body within "),
    2: ("simplify rests at ", "e-graph: ", "stopped: saturated", "best schedule of a program: "),
    3: ("program as loaded", "%0 = input x", "program as written", "program at 1e-10 s per byte", "matches: "),
    4: ("kept 1: ",),
    5: ("tried ", "emitted source", "import jax"),
}
"""The events that appear from each level on."""


@pytest.mark.parametrize("level", [1, 2, 3, 4, 5])
def test_each_level_adds_to_those_below(level, monkeypatch, capsys):
    text = said(str(level), monkeypatch, capsys)
    assert all(line.startswith("eqsat_mem: ") for line in text.splitlines())
    for other, parts in FROM.items():
        for part in parts:
            assert (part in text) == (other <= level), part


@pytest.mark.parametrize("level", ["", "0", " 0 "])
def test_no_level_says_nothing(level, monkeypatch, capsys):
    assert said(level, monkeypatch, capsys) == ""


@pytest.mark.parametrize("level", ["6", "-1", "two", "1.0"])
def test_a_level_that_there_is_not(level, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_DEBUG", level)
    message = re.escape(f"EQSAT_MEM_DEBUG must be a whole number from 0 (nothing) to 5 (everything), not {level!r}.")
    with pytest.raises(eqsat_mem.OptionError, match=f"^{message}$"):
        eqsat_mem.optimize(power_iteration, memory_limit="200kB").plan(*ARGS)


def test_every_level_is_documented():
    documented = [int(number) for number in re.findall(r"^(\d)\. ", debug.__doc__, re.MULTILINE)]
    assert documented == sorted({level for _, level, _ in debug.LINES}) == [1, 2, 3, 4, 5]


def test_what_fails_is_said_to_have_failed(monkeypatch, capsys):
    monkeypatch.setenv("EQSAT_MEM_DEBUG", "1")
    with pytest.raises(eqsat_mem.MemoryLimitError):
        eqsat_mem.optimize(power_iteration, memory_limit="20kB", verify=False, max_seconds=60.0).plan(*ARGS)
    assert "no plan of power_iteration\n" in capsys.readouterr().err


def test_listeners_hear_and_stop_hearing():
    heard = []
    with listening(heard.append):
        assert anyone_listens()
        tell(Settled("simplify", 3))
    tell(Settled("simplify", 4))
    assert [event.rows for event in heard] == [3]
    assert not anyone_listens()


def test_another_thread_is_not_heard():
    heard = []
    with listening(heard.append):
        thread = threading.Thread(target=tell, args=(Settled("simplify", 3),))
        thread.start()
        thread.join()
    assert heard == []


def test_the_line_says_what_planning_is_at(monkeypatch):
    now = progress.Progress("matvec")
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now.started + 2.6)
    now(Began("matvec", 2048))
    assert now.line() == "matvec, trace, 3 s"
    now(StageBegan("schedule"))
    now(Tried(schedule(4096, 0.5)))
    now(Began("body", 8192))
    now(StageBegan("saturate"))
    now(Tried(schedule(1, 0.1)))
    now(Ended("body", None))
    assert now.line() == "matvec, schedule, 2 loop trees, smallest so far 4 KiB (limit 2 KiB), 3 s"
    now(Tried(schedule(2048, 3.0)))
    now(Kept((schedule(1024, 2.0),)))
    now(Tried(schedule(512, 2.5)))
    assert now.line() == "matvec, schedule, 4 loop trees, best so far 1 KiB and 2 s (limit 2 KiB), 3 s"
    now(Explaining(12))
    assert now.line() == "matvec, explaining, 12 searches, 3 s"


def schedule(peak_bytes, seconds):
    return SimpleNamespace(peak_bytes=peak_bytes, seconds=seconds)


def test_the_line_is_written_and_wiped():
    stream, written = Terminal(), threading.Event()
    now = progress.Progress("matvec")
    line = now.line

    def noticed():
        written.set()
        return line()

    now.line = noticed
    with progress.shown(now, stream, patience_s=0.0, interval_s=0.001):
        tell(StageBegan("saturate"))
        assert written.wait(60)
    assert "\r\x1b[Kmatvec, trace, 0 s" in stream.getvalue()
    assert stream.getvalue().endswith(progress.WIPE)


def test_nothing_is_written_where_planning_is_quick():
    stream = Terminal()
    with progress.shown(progress.Progress("matvec"), stream, patience_s=60.0):
        pass
    assert stream.getvalue() == ""


def test_a_log_has_lines_from_the_first_second_on_ever_more_rarely():
    stream, now, pauses = io.StringIO(), progress.Progress("matvec"), []

    class Done:
        def wait(self, pause):
            pauses.append(pause)
            now.started -= pause
            return len(pauses) > 7

    progress.log(now, stream, 1.0, 30.0, Done())
    assert [round(pause) for pause in pauses] == [1, 1, 2, 4, 8, 16, 30, 30]
    assert [line.rsplit(", ", 1) for line in stream.getvalue().splitlines()] == [
        ["eqsat_mem: planning matvec, trace", f"{seconds} s"] for seconds in (1, 2, 4, 8, 16, 32, 62)
    ]


def test_a_log_that_is_closed_meanwhile_is_left_alone(recwarn):
    stream = io.StringIO()
    with progress.logged(progress.Progress("matvec"), stream, patience_s=0.0):
        stream.close()
    assert not recwarn.list


CLOSED = io.StringIO()
CLOSED.close()


@pytest.mark.parametrize(("stream", "watched"), [(io.StringIO(), True), (Terminal(), True), (CLOSED, False), (None, False)])
@pytest.mark.parametrize("level", [None, "0"])
def test_progress_is_shown_where_there_is_a_stderr(stream, watched, level, monkeypatch):
    monkeypatch.delenv("EQSAT_MEM_DEBUG", raising=False)
    if level is not None:
        monkeypatch.setenv("EQSAT_MEM_DEBUG", level)
    monkeypatch.setattr("sys.stderr", stream)
    with progress.watched("matvec"):
        assert anyone_listens() == (watched and level is None)
