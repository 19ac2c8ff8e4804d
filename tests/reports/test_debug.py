"""EQSAT_MEM_DEBUG and the progress line: what they say, where, and that they are silent otherwise."""

from __future__ import annotations

import io
import re
import threading

import jax
import jax.numpy as jnp
import pytest

import eqsat_mem
from eqsat_mem.events import Began, Ended, Explaining, Settled, StageBegan, Tried, anyone_listens, listening, tell
from eqsat_mem.reports import debug, progress
from tests.reports.test_explain import power_iteration

ARGS = (jax.ShapeDtypeStruct((600, 3), jnp.float32), jax.ShapeDtypeStruct((600, 1), jnp.float32))


class Terminal(io.StringIO):
    """Text that was written to what says that it is a terminal."""

    def isatty(self):
        return True


def said(level, monkeypatch, capsys):
    monkeypatch.setenv("EQSAT_MEM_DEBUG", level)
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
    now(Began("matvec", 1))
    assert now.line() == "matvec, trace, 3 s"
    now(StageBegan("schedule"))
    now(Tried(None))
    now(Began("body", 1))
    now(StageBegan("saturate"))
    now(Tried(None))
    now(Ended("body", None))
    assert now.line() == "matvec, schedule, 2 loop trees, 3 s"
    now(Explaining(12))
    assert now.line() == "matvec, explaining, 12 searches, 3 s"


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


@pytest.mark.parametrize(("stream", "watched"), [(io.StringIO(), False), (Terminal(), True), (None, False)])
def test_only_a_terminal_shows_progress(stream, watched, monkeypatch):
    monkeypatch.delenv("EQSAT_MEM_DEBUG", raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    with progress.watched("matvec"):
        assert anyone_listens() == watched
