"""The scripts that reproduce the paper: points are measured right, kept and continued, and tables say what was measured."""

import csv
import itertools
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import measuring, peers
from paper_repro import __main__ as everything
from paper_repro import experiment, gp, kernel_mvm, knn, matmul_chains, sgpr, sgpr_reach, showing, transformer
from tests.tiers import tiered

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"kernel_mvm": "1MB", "transformer": "400kB"}


@pytest.fixture
def here(monkeypatch):
    """Points are measured in this process, which is faster; and no column needs a compiler."""
    monkeypatch.setattr(peers, "has", lambda package, has=peers.has: package != "pykeops" and has(package))

    def in_this_process(script, point, options, timeout):
        folder = experiment.unfinished(script, options)
        return dict.fromkeys(script.results, "") | json.loads(json.dumps(script.measure(point, folder)))

    monkeypatch.setattr(experiment, "in_own_process", in_this_process)


def rows_of(folder, name):
    with (folder / "tiny-cpu" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def script(name):
    return next(each for each in everything.EXPERIMENTS if each.name == name)


# --- every script -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_runs_from_the_command_line_and_continues(tmp_path):
    command = [sys.executable, "-m", "paper_repro.kernel_mvm", "--scale", "tiny", "--results", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    path = tmp_path / "tiny-cpu" / "kernel_mvm.csv"
    lines = path.read_text().splitlines(keepends=True)
    assert {row["status"] for row in rows_of(tmp_path, "kernel_mvm")} == {"ok"}
    taken = rows_of(tmp_path, "kernel_mvm")[0]["seconds"]
    kept = [lines[0], lines[1].replace(taken, "123.0"), *lines[2:-1]]
    path.write_text("".join(kept))  # as if it had been interrupted before the last point
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert path.read_text().splitlines(keepends=True)[:-1] == kept
    assert len(rows_of(tmp_path, "kernel_mvm")) == len(lines) - 1
    assert f"{len(kept) - 1} of {len(lines) - 1} points are kept" in again.stderr
    assert "| 300 | 123 |" in again.stdout


@pytest.mark.parametrize("name", tiered(["kernel_mvm", "knn", "matmul_chains", "transformer"], [], ["kernel_mvm", "knn", "matmul_chains"]))
def test_columns_agree_and_limits_hold(name, tmp_path, here, capsys):
    for at_most in ("1", "1000"):
        arguments = ["--scale", "tiny", "--only", name, "--results", str(tmp_path), "--at-most", at_most]
        assert everything.main(arguments) == 0
        assert (at_most == "1") == (len(rows_of(tmp_path, name)) == 1)
    rows = rows_of(tmp_path, name)
    assert len(rows) == len(list(script(name).grid(script(name).parse(["--scale", "tiny"]))))
    assert {row["status"] for row in rows} == {"ok"}
    for row in rows:
        if row["column"] == LIMITS.get(name):
            assert float(row["held_bytes"]) <= float(row["column"].replace("MB", "e6").replace("kB", "e3"))
        if row.get("error"):
            assert float(row["error"]) < 1e-4
    assert " ok " not in capsys.readouterr().out
    assert (tmp_path / "tiny-cpu" / f"{name}.md").read_text().count("| ---:") >= 1


def test_a_limit_of_the_command_line_takes_the_place_of_the_scales(tmp_path, here, capsys):
    options = kernel_mvm.EXPERIMENT.parse(["--scale", "tiny", "--limit", "2MB", "--limit", "3MB", "--results", str(tmp_path)])
    assert {point["column"] for point in kernel_mvm.grid(options)} == {"plain", "2MB", "3MB"}
    with pytest.raises(SystemExit):
        kernel_mvm.EXPERIMENT.parse(["--limit", "3 parsecs"])
    assert "--limit = '3 parsecs'" in capsys.readouterr().err


def test_short_points_are_measured_in_several_processes(monkeypatch):
    taken = []

    def in_own_process(script, point, options, timeout):
        taken.append(point["seconds"].pop(0))
        return {"seconds": taken[-1], "process": len(taken)}

    monkeypatch.setattr(experiment, "in_own_process", in_own_process)

    def measured(scale, *seconds):
        taken.clear()
        found = experiment.in_own_processes(kernel_mvm.EXPERIMENT, {"seconds": list(seconds)}, Namespace(scale=scale), 60)
        return found["process"], len(taken)

    assert measured("small", 0.03, 0.01, 0.02) == (3, 3)
    assert measured("small", 0.03, "", 0.02) == (1, 3), "a process that failed comes last"
    assert measured("small", 10.0) == (1, 1)
    assert measured("small", "") == (1, 1)
    assert measured("tiny", 0.03) == (1, 1)


def test_plans_that_are_as_written_are_told():
    x = np.ones((4, 4), np.float32)
    results = [measuring.measure_jax(lambda x: jnp.sum(x, 1), lambda: [x], limit)[1] for limit in (None, "1MB")]
    assert [r["as_written"] for r in results] == ["", True]
    row = {"seconds": "0.5", "as_written": "True", "queries_per_s": "2000", "status": "ok"}
    assert showing.seconds(row) == "0.5 (as written)"
    assert showing.seconds(row | {"as_written": ""}) == "0.5"


def test_memory_that_nobody_tells_is_left_blank():
    row = {
        "data": "Random",
        "distance": "L2",
        "n": "10",
        "d": "2",
        "m": "5",
        "column": "keops",
        "file": "",
        "as_written": "",
        "device_name": "GPU",
    }
    ran = knn.tables([row | {"status": "ok", "resident_bytes": "", "queries_per_s": "7"}])
    assert "| 7 |" in ran
    assert "ok" not in ran
    assert "over 60 s" in knn.tables([row | {"status": "over 60 s", "resident_bytes": "", "queries_per_s": ""}])


def test_points_can_be_chosen_by_their_values(tmp_path, here, capsys):
    arguments = ["--scale", "tiny", "--only", "kernel_mvm", "--results", str(tmp_path)]
    where = ["--where", "n=300", "--where", "column=plain", "--where", "column=1MB", "--where", "d=3"]
    assert everything.main([*arguments, *where]) == 0
    assert [(row["n"], row["column"]) for row in rows_of(tmp_path, "kernel_mvm")] == [("300", "plain"), ("300", "1MB")]
    with pytest.raises(SystemExit):
        everything.main([*arguments, "--where", "n"])
    assert "'n' is not NAME=VALUE, such as n=1000000." in capsys.readouterr().err


def test_a_column_of_another_program_is_measured_and_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "keops_product", lambda x, y, v: np.exp(-0.5 * (x - y.T) ** 2) @ v)
    results = kernel_mvm.measure_point({"n": 300, "dtype": "float64", "column": "keops"}, tmp_path)
    assert results["status"] == "ok"
    assert results["error"] < 1e-12
    monkeypatch.setattr(peers, "keops_product", lambda x, y, v: v)
    assert kernel_mvm.measure_point({"n": 300, "dtype": "float64", "column": "keops"}, tmp_path)["error"] > 0.1


def test_float32_is_measured_too(tmp_path, here):
    results = kernel_mvm.measure_point({"n": 300, "dtype": "float32", "column": "1MB"}, tmp_path)
    assert results["status"] == "ok"
    assert 1e-9 < results["error"] < 1e-5


@pytest.mark.slow
def test_points_that_fail_say_why_and_take_nothing_with_them(tmp_path):
    options = Namespace(scale="tiny", device="cpu", results=tmp_path)
    wrong = experiment.in_own_process(kernel_mvm.EXPERIMENT, {"n": 10, "dtype": "float64", "column": "3 parsecs"}, options, 60)
    assert wrong["status"].startswith("eqsat_mem.errors.OptionError: memory_limit = '3 parsecs'")
    late = experiment.in_own_process(kernel_mvm.EXPERIMENT, {"n": 10, "dtype": "float64", "column": "plain"}, options, 0.01)
    assert late["status"] == "over 0.01 s"
    assert set(wrong) == set(late) == set(kernel_mvm.EXPERIMENT.results)


def test_results_of_another_version_are_not_mixed_in(tmp_path):
    path = tmp_path / "kernel_mvm.csv"
    path.write_text("n,limit\n10,none\n")
    with pytest.raises(SystemExit, match=r"was written by another version of paper_repro\.kernel_mvm: pass --again"):
        experiment.kept_rows(kernel_mvm.EXPERIMENT, path)


def test_programs_that_do_not_fit_are_not_run(monkeypatch):
    ones = np.ones(1000, np.float32)
    monkeypatch.setattr(measuring, "device_capacity", lambda: 10_000)
    out, results = measuring.measure_jax(lambda x: x + 1, lambda: [ones], None)
    assert out is None
    assert results["status"] == "not run: needs 7.81 KiB"
    out, results = measuring.measure_jax(lambda x: x + 1, lambda: [ones], "4kB")
    assert out is None
    assert results["status"].startswith("no plan: the smallest found holds ")


def test_publishing_fills_the_page(tmp_path, monkeypatch):
    page, published, made = tmp_path / "README.md", tmp_path / "results", tmp_path / "made"
    made.mkdir()
    (made / "knn.md").write_text("| new |\n")
    (made / "knn.csv").write_text("n\n1\n")
    page.write_text("a\n<!-- begin: knn -->\n| old |\n<!-- end: knn -->\nz\n<!-- begin: sgpr -->\nkept\n<!-- end: sgpr -->\n")
    monkeypatch.setattr(everything, "PAGE", page)
    monkeypatch.setattr(everything, "PUBLISHED", published)
    everything.publish(made, ["knn"])
    assert page.read_text() == "a\n<!-- begin: knn -->\n| new |\n<!-- end: knn -->\nz\n<!-- begin: sgpr -->\nkept\n<!-- end: sgpr -->\n"
    assert (published / "knn.csv").read_text() == "n\n1\n"


def test_the_page_has_a_place_for_every_experiment():
    text = everything.PAGE.read_text()
    for script in everything.EXPERIMENTS:
        assert everything.with_table(text, script.name, "TABLE\n").count("TABLE") == 1


# --- programs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("distance", knn.PROGRAMS)
def test_neighbours_are_the_nearest_and_worse_ones_are_seen(distance):
    rng = np.random.default_rng(0)
    points, queries = (rng.standard_normal((n, 5), dtype=np.float32) for n in (200, 9))
    found = np.asarray(knn.PROGRAMS[distance](points, queries))
    assert found.shape == (9, knn.K)
    assert peers.excess(points, queries, found, knn.metric(distance)) < 1e-5
    by_hand = np.asarray(knn.chunked(knn.PROGRAMS[distance], 4)(points, queries))
    np.testing.assert_array_equal(by_hand, found)
    assert peers.excess(points, queries, (found + 1) % 200, knn.metric(distance)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("column", peers.SEARCHES)
@pytest.mark.parametrize("distance", ["L2", "L1", "cosine"])
def test_other_programs_find_the_same(column, distance):
    if not peers.has(peers.SEARCHES[column]):
        pytest.skip(f"{peers.SEARCHES[column]} or what it needs is not installed")
    rng = np.random.default_rng(0)
    points, queries = (rng.standard_normal((n, 5), dtype=np.float32) for n in (200, 9))
    found = peers.search(column, points, distance, knn.K)(queries)
    assert found.shape == (9, knn.K)
    assert peers.excess(points, queries, found, knn.metric(distance)) < 1e-5


def test_the_product_of_a_chain_is_that_of_its_factors():
    matrices = matmul_chains.random_matrices(14, 30)
    factors = list(matmul_chains.upright(matrices))
    assert all(a.shape[1] == b.shape[0] for a, b in itertools.pairwise(factors))
    assert matrices[5].shape == factors[5].T.shape
    want = np.linalg.multi_dot(factors)
    np.testing.assert_allclose(matmul_chains.chain(*matrices), want, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(matmul_chains.by_dynamic_programming(*matrices), want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_the_decoder_sees_no_later_words_and_training_lowers_the_loss():
    parameters, source, target = transformer.arguments(transformer.SCALES["tiny"], 12)
    logits = transformer.inference(parameters, source, target)
    changed = transformer.inference(parameters, source, target.copy() * (np.arange(12) < 7))
    np.testing.assert_allclose(logits[:, :7], changed[:, :7], atol=1e-5)
    assert np.max(np.abs(logits[:, 7:] - changed[:, 7:])) > 1e-3
    trained, before = jax.jit(transformer.training)(parameters, source, target)
    _, after = jax.jit(transformer.training)(trained, source, target)
    assert float(after) < float(before)


# --- sparse Gaussian processes ----------------------------------------------------------------------


@pytest.fixture
def small_data():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(40, 2))
    with jax.enable_x64(True):
        yield gp.start(2), x, np.sin(5 * x.sum(1)) + 0.1 * rng.standard_normal(40)


def exact(parameters, x, y, new):
    """The log density of y, and means and variances at new inputs, of the Gaussian process itself."""
    noise = np.logaddexp(0, parameters["noise"]) + gp.LEAST_NOISE
    covariance = np.asarray(gp.kernel(parameters, x, x)) + noise * np.eye(len(x))
    inverse, across = np.linalg.inv(covariance), np.asarray(gp.kernel(parameters, new, x))
    density = -0.5 * (y @ inverse @ y + np.linalg.slogdet(covariance)[1] + len(y) * np.log(2 * np.pi))
    return density, across @ inverse @ y, np.diag(gp.kernel(parameters, new, new) - across @ inverse @ across.T) + noise


@pytest.mark.slow
def test_the_bound_is_exact_with_all_points_and_below_with_fewer(small_data):
    parameters, x, y = small_data
    density, mean, variance = exact(parameters, x, y, x[:5] + 0.1)
    assert float(gp.bound(parameters, x, y, x)) == pytest.approx(density, abs=1e-2)
    predicted = gp.predict(parameters, x, y, x, x[:5] + 0.1)
    np.testing.assert_allclose(predicted[0], mean, atol=1e-4)
    np.testing.assert_allclose(predicted[1], variance, atol=1e-4)
    greedy, others = gp.greedy_points(parameters, x, 8), x[:8]
    assert float(gp.bound(parameters, x, y, others)) < density - 1
    assert float(gp.bound(parameters, x, y, others)) < float(gp.bound(parameters, x, y, greedy)) < density


@pytest.mark.slow
def test_greedy_points_have_the_largest_variance_left(small_data):
    parameters, x, _ = small_data
    chosen = gp.greedy_points(parameters, x, 6)
    for k in range(1, 6):
        covariance = np.asarray(gp.kernel(parameters, chosen[:k], chosen[:k])) + gp.JITTER * np.eye(k)
        across = np.asarray(gp.kernel(parameters, x, chosen[:k]))
        left = 1 - np.sum(across @ np.linalg.inv(covariance) * across, 1) / np.logaddexp(0, parameters["variance"])
        assert np.array_equal(x[np.argmax(left)], chosen[k])
    assert len(np.unique(gp.greedy_points(parameters, x, 40), axis=0)) == 40


@pytest.mark.slow
def test_an_interrupted_fit_goes_on(tmp_path):
    pytest.importorskip("scipy")
    path, counted = tmp_path / "fit.npz", []

    def evaluate(p, fail_after=None):
        counted.append(1)
        if fail_after is not None and len(counted) > fail_after:
            raise KeyboardInterrupt
        return jax.value_and_grad(lambda q: jnp.sum((q["a"] - jnp.arange(6.0)) ** 4) + jnp.sum(q["b"] ** 2))(p)

    with jax.enable_x64(True):
        start = {"a": jnp.zeros(6), "b": jnp.ones(())}
        with pytest.raises(KeyboardInterrupt):
            sgpr.minimise(lambda p: evaluate(p, 9), start, 40, path)
        done = int(np.load(path)["iterations"])
        assert 0 < done < 9
        saved = float(evaluate(jax.tree.map(jnp.asarray, start))[0])
        fit = sgpr.minimise(evaluate, start, 40, path)
        assert fit.value < 1e-3 < saved
        assert done < int(np.load(path)["iterations"]) <= 40
        counted.clear()
        assert sgpr.minimise(evaluate, start, 0, path).value == pytest.approx(fit.value)
        assert len(counted) == 1


@pytest.mark.thorough
def test_more_inducing_points_fit_and_predict_better(tmp_path, here, monkeypatch, capsys):
    pytest.importorskip("scipy")
    monkeypatch.setattr(sgpr_reach, "CLOSE", 1.0)
    assert everything.main(["--scale", "tiny", "--only", "sgpr", "--only", "sgpr_reach", "--results", str(tmp_path)]) == 0
    found = {(row["inducing"], row["column"]): row for row in rows_of(tmp_path, "sgpr")}
    assert found["20", "plain"]["status"].startswith("over the limit: holds ")
    same = [float(found["5", column]["rmse"]) for column in ("plain", "planned")]
    assert same[0] == pytest.approx(same[1], rel=1e-4)
    assert float(found["20", "planned"]["rmse"]) < same[1]
    assert float(found["20", "planned"]["held_bytes"]) <= 300e3
    assert not list((tmp_path / "tiny-cpu" / "unfinished").rglob("*.npz"))
    reach = {row["column"]: row for row in rows_of(tmp_path, "sgpr_reach")}
    assert int(reach["planned"]["inducing"]) > 2 * int(reach["plain"]["inducing"]) > 0
    assert all(float(row["held_bytes"]) <= 300e3 for row in reach.values())


@pytest.mark.parametrize(("bound", "known"), [(5, 0), (8, 8), (9, 9), (100, 97), (1000, 960)])
def test_the_search_for_the_largest_number(bound, known):
    found = sgpr_reach.largest(lambda m: m <= bound)
    assert known - 1 <= found <= bound
    assert found >= bound * (1 - sgpr_reach.CLOSE) - 1 or bound < sgpr_reach.FIRST
