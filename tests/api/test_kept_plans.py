"""Plans kept between processes: a second start loads them, what has changed is planned anew, and damaged files do no harm."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqsat_mem
from eqsat_mem.__main__ import main
from eqsat_mem.api import kept_plans
from eqsat_mem.backends.choose import backend_for
from eqsat_mem.events import Compiled, Loaded, Saturated, Scheduled, listening
from eqsat_mem.frontend.stable import Unstable, stable
from eqsat_mem.options import Options
from eqsat_mem.reports import plan_files
from eqsat_mem.reports.plan_files import MAGIC
from eqsat_mem.request import request_of

ARGS = [np.random.default_rng(seed).standard_normal(shape).astype(np.float32) for seed, shape in enumerate([(600, 3), (500, 3), (500,)])]


def kernel_vector(x, y, v, scale=1.0):
    return jnp.exp(-scale * jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


OWN = eqsat_mem.Operation("doubled", lambda x: 2 * x)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_CACHE_DIR", str(tmp_path / "plans"))
    return tmp_path / "plans"


def planned(function=kernel_vector, args=ARGS, limit="300kB", **options):
    """The plan that a new process would come to, and what was done for it."""
    seen = []
    with listening(seen.append):
        plan = eqsat_mem.optimize(function, memory_limit=limit, **options).plan(*args)
    return plan, [event for event in seen if isinstance(event, Loaded | Saturated | Scheduled | Compiled)]


def test_the_second_plan_is_loaded_without_a_search_or_a_compilation(home):
    first, work = planned()
    assert work
    again, none = planned()
    assert none == []
    assert (again.source, again.peak_bytes, again.compiled_peak_bytes) == (first.source, first.peak_bytes, first.compiled_peak_bytes)
    assert (again.loops, again.rules_fired) == (first.loops, first.rules_fired)
    assert list(again.seconds) == ["cache"]
    assert str(again).splitlines()[:4] == str(first).splitlines()[:4]
    optimised = eqsat_mem.optimize(kernel_vector, memory_limit="300kB")
    np.testing.assert_allclose(optimised(*ARGS), kernel_vector(*ARGS), rtol=1e-4, atol=1e-3)
    jax.grad(lambda v: optimised(*ARGS[:2], v).sum())(ARGS[2])  # whose plan is another entry
    assert len(list(home.iterdir())) > 1


def test_a_loaded_plan_is_explained_and_shown_like_any_other(home):
    first, _ = planned()
    again, _ = planned()
    assert again.schedule is None
    assert again.with_search().source == first.source
    assert again.with_search() is again.with_search()
    assert again.with_search().schedule is not None


def test_a_program_that_stays_as_written_runs_as_written(home):
    function = lambda x: jnp.sin(x) + 1  # noqa: E731
    x = ARGS[0]
    for _ in range(2):
        plan, _ = planned(function, [x], "1GiB")
        assert plan.unchanged
        np.testing.assert_array_equal(plan.function(x)[0], jax.jit(function)(x))


def other_line(x, y, v):
    return jnp.exp(-jnp.sum((x[:, None] - y[None]) ** 2, -1)) @ v


CHANGES = {
    "limit": {"limit": "310kB"},
    "shapes": {"args": [ARGS[0][:-1], *ARGS[1:]]},
    "dtypes": {"args": [*ARGS[:2], ARGS[2].astype(np.float16)]},
    "a number": {"function": partial(kernel_vector, scale=2.0)},
    "a line": {"function": other_line},
    "accuracy": {"accuracy": "reassociate"},
    "rules": {"without_rules": "distance"},
    "verify": {"verify": False},
    "rows": {"max_rows": 40_000},
}


@pytest.fixture(scope="module")
def key():
    """The key of the program as it is, and the function that gives others."""

    def key_of(function=kernel_vector, args=ARGS, limit="300kB", backend=None, **options):
        names = [f"x{k}" for k in range(len(args))]
        made = request_of(jax.make_jaxpr(function)(*args), Options(memory_limit=limit, **options), names, "f", backend or backend_for(None))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EQSAT_MEM_CACHE_DIR", "somewhere")
            entry = kept_plans.entry(made)
        return entry and entry.key

    return key_of


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_plan_depends_on_is_in_its_key(name, key):
    assert key() == key()
    assert key(**CHANGES[name]) not in (None, key())


def test_a_rule_file_counts_by_its_text(tmp_path, key):
    path, texts = tmp_path / "own.egg", []
    for number in (2, 3):
        card = ";; f = f\n;; sound: bitwise -- nothing happens\n;; memory: none\n"
        path.write_text(f'{card}(rewrite (Mul (Lit {number}.0 d) a) (Mul a (Lit {number}.0 d)) :ruleset explore :name "own")\n')
        texts.append(key(rules=[str(path)]))
    assert len({key(), *texts}) == 3


def test_the_backend_the_settings_and_the_versions_are_in_its_key(key, monkeypatch):
    keys = [key()]
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        keys.append(key())
    with jax.log_compiles(True):  # on which no plan depends
        assert key() == keys[0]
    with jax.enable_x64(True):
        keys.append(key())
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    keys.append(key())
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(kept_plans, "_versions", lambda: ("another",))
    keys.append(key())
    monkeypatch.undo()
    backend = backend_for(None)
    keys.append(key(backend=replace(backend, device=replace(backend.device, flops=2 * backend.device.flops))))
    assert len(set(keys)) == 6


def test_a_bound_on_planning_is_not_in_its_key(key):
    assert key(max_planning_seconds=3.0) == key()


def test_what_another_process_cannot_recognise_is_not_kept(key):
    assert key(lambda x, y, v: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((3,), np.float32), v[:3])) is None
    assert key(lambda x, y, v: OWN(x)) is None
    for value in (object(), lambda: 0, threading.Lock(), kernel_vector):
        with pytest.raises(Unstable):
            stable(value)


def test_reads_that_fill_with_no_number_are_recognised(key):
    assert key(lambda x, y, v: jnp.take_along_axis(x, jnp.ones((600, 1), int), 1)) is not None


def test_random_numbers_are_recognised(key):
    def dropped(x, y, v):
        return jax.random.bernoulli(jax.random.key(0), 0.5, x.shape) * x

    assert key(dropped) == key(dropped) is not None


def test_a_plan_that_time_cut_short_is_not_kept(home, monkeypatch):
    made, _ = planned()
    for path in home.iterdir():
        path.unlink()
    entry = kept_plans.KeptPlan(home / "x.plan", "x")
    entry.store(replace(made, planning_bound_s=1.0))
    assert list(home.iterdir()) == []
    entry.store(replace(made, namespace={"f": threading.Lock()}))  # which cannot be written
    assert list(home.iterdir()) == []


DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "foreign": lambda data: b"#!/bin/sh\n",
    "changed": lambda data: data[:-40] + bytes(b ^ 1 for b in data[-40:]),
    "of another key": lambda data: data.replace(b'"key": "', b'"key": "0', 1),
    "no header": lambda data: MAGIC + b"\n",
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_left_out_with_a_word_and_written_anew(name, home):
    first, _ = planned()
    (path,) = home.iterdir()
    path.write_bytes(DAMAGES[name](path.read_bytes()))
    with pytest.warns(UserWarning, match=r"the kept plan .* is ignored \(.*\): eqsat-mem cache --clear removes all"):
        again, work = planned()
    assert work
    assert again.source == first.source
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert planned()[1] == []


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="files have owners on other systems")
def test_a_file_that_others_may_write_is_left_out(home):
    planned()
    home.chmod(0o777)
    with pytest.warns(UserWarning, match="others may write it"):
        assert planned()[1]


def test_a_folder_that_cannot_be_written_is_told_of(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EQSAT_MEM_CACHE_DIR", str(tmp_path / "file" / "plans"))
    with pytest.warns(UserWarning, match="no plans are kept in .*: EQSAT_MEM_CACHE_DIR=none says so"):
        planned()


def test_the_oldest_go_first(home, monkeypatch):
    monkeypatch.setattr(kept_plans, "MOST_FILES", 3)
    made, _ = planned()
    for number in range(6):
        kept_plans.KeptPlan(home / f"{number}.plan", str(number)).store(made)
        os.utime(home / f"{number}.plan", (number, number)) if number < 5 else None
    assert len(list(home.glob("*.plan"))) == 3
    assert (home / "5.plan").exists()


def test_several_threads_write_one_entry(home):
    made, _ = planned()
    (path,) = home.iterdir()
    entry = kept_plans.KeptPlan(path, json.loads(path.read_bytes()[len(MAGIC) :].partition(b"\n")[0])["key"])
    failed = []

    def write_and_read():
        for _ in range(20):
            entry.store(made)
            data = path.read_bytes()
            header, payload = plan_files.parts(data)
            if pickle.loads(payload).source != made.source or header["key"] != entry.key:
                failed.append(header)

    threads = [threading.Thread(target=write_and_read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [p.name for p in home.iterdir()] == [path.name]


SCRIPT = """
import sys
import jax.numpy as jnp, numpy as np, eqsat_mem
from eqsat_mem.events import Scheduled, listening

def f(x, y):
    return jnp.exp(-(x[:, None] - y[None]) ** 2).sum(1)

seen = []
with listening(seen.append):
    out = eqsat_mem.optimize(f, memory_limit="100kB")(np.arange(700.0, dtype=np.float32), np.arange(800.0, dtype=np.float32))
print(sum(isinstance(event, Scheduled) for event in seen), float(out.sum()))
"""


@pytest.mark.slow
def test_another_process_loads_it(home, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    runs = [subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True) for _ in range(2)]
    (first, one), (second, two) = (run.stdout.split() for run in runs)
    assert int(first) > int(second) == 0
    assert one == two


def test_the_command_shows_and_clears(home, capsys, monkeypatch):
    planned()
    assert main(["cache"]) == 0
    first, row = capsys.readouterr().out.splitlines()
    assert first.startswith(f"1 plan in {home}, ")
    assert row.split()[0] == "kernel_vector"
    assert main(["cache", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["plans"]
    assert entry["limit_bytes"] == 300_000
    assert main(["cache", "--clear"]) == 0
    assert capsys.readouterr().out == f"removed 1 plan from {home}\n"
    assert list(home.iterdir()) == []
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"0 plans in {home}, 0 B"]
    monkeypatch.setenv("EQSAT_MEM_CACHE_DIR", "none")
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == "no plans are kept: EQSAT_MEM_CACHE_DIR=none\n"


def test_where_plans_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("EQSAT_MEM_CACHE_DIR", str(tmp_path))
    assert kept_plans.folder() == tmp_path
    monkeypatch.setenv("EQSAT_MEM_CACHE_DIR", "None")
    assert kept_plans.folder() is None
    monkeypatch.delenv("EQSAT_MEM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert kept_plans.folder() == tmp_path / "eqsat_mem" / "plans"
