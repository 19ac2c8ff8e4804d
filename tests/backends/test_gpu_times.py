"""What the model of a GPU predicts, against what was measured on one."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from benchmarks import gpu_times
from eqsat_mem.backends.gpu import measured
from eqsat_mem.backends.gpu.backend import GpuBackend
from eqsat_mem.backends.gpu.targets import named

KNOWN = {card: json.loads(gpu_times.path_of(card).read_text(encoding="utf-8"))["seconds"] for card in gpu_times.CARDS}
EVERY = {name: timed for part in gpu_times.PROGRAMS.values() for name, timed in part.items()}
H100 = named("h100")


@pytest.fixture(scope="module", params=gpu_times.CARDS)
def known(request):
    return request.param, KNOWN[request.param]


@pytest.fixture(scope="module")
def ratios(known):
    card, seconds = known
    return {name: gpu_times.predicted_s(EVERY[name], card) / measured_s for name, measured_s in seconds.items()}


def test_every_program_was_measured():
    """On an H100, with which the model was made; on an H200 all but three that came later."""
    assert set(KNOWN["h100"]) == set(EVERY)
    assert {card: len(set(EVERY) - set(seconds)) for card, seconds in KNOWN.items()} == {"h100": 0, "h200": 3}
    assert all(set(seconds) <= set(EVERY) for seconds in KNOWN.values())


def test_predictions_are_within_a_factor_of_two_of_what_was_measured(ratios):
    assert {name: ratio for name, ratio in ratios.items() if not 0.5 < ratio < 2} == {}


def test_most_predictions_are_within_a_quarter(ratios):
    close = [name for name, ratio in ratios.items() if 0.8 <= ratio <= 1.25]
    assert len(close) >= 0.75 * len(ratios)


def test_predictions_rank_programs_as_measurements_do(known, ratios):
    """Of two programs of one kind that differ by a half or more, the faster is predicted to be."""
    seconds, wrong = known[1], []
    for part in gpu_times.PROGRAMS.values():
        names = [name for name in part if name in seconds]
        for one in names:
            for other in names:
                measured_ratio = seconds[one] / seconds[other]
                if measured_ratio > 1.5 and measured_ratio * ratios[one] / ratios[other] < 1:
                    wrong.append((one, other))
    assert len(wrong) <= 0.02 * sum(math.comb(len(set(part) & set(seconds)), 2) for part in gpu_times.PROGRAMS.values()), wrong


@pytest.mark.parametrize(("rows", "row", "k"), [(64, 2048, 8), (2000, 5000, 3), (1, 10**6, 8), (300, 1024, 1)])
def test_selecting_more_takes_longer(rows, row, k):
    def seconds(rows, row, k):
        return measured.top_k(H100)([(rows, row)], [(rows, k), (rows, k)], {"k": k})

    assert seconds(rows, row, k) <= seconds(4 * rows, row, k)
    assert seconds(rows, row, k) <= seconds(rows, row, 2 * k)


def test_cards_of_one_name_have_weights_of_their_own():
    slow = replace(H100, multiprocessors=H100.multiprocessors // 4)

    def seconds(target):
        backend = GpuBackend.of(target)
        return backend.weights.blocks["top_k"]([(20_000, 4096)], [(20_000, 4)] * 2, {"k": 4}) / backend.device.elements

    first, fewer = seconds(H100), seconds(slow)
    assert fewer == pytest.approx(4 * first)
    assert seconds(H100) == first


def test_rows_that_no_thread_folds_alone_are_those_read_apart():
    weights = [measured.row_fold_weight(extent) for extent in range(1, 2**15)]
    assert max(weights) == measured.APART
    assert min(weights) == 1.0
