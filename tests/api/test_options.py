"""Sizes, options and the limit that results from them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eqsat_mem import options
from eqsat_mem.errors import EqsatMemError, OptionError
from eqsat_mem.options import Options, format_bytes, parse_bytes, resolve_limit


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (2**30, 2**30),
        (2**63 - 1, 2**63 - 1),
        (np.int32(512), 512),
        (np.uint64(2**40), 2**40),
        (np.array(7), 7),
        (jnp.int32(9), 9),
        ("512", 512),
        ("512 B", 512),
        ("1kB", 1000),
        ("64MiB", 64 * 2**20),
        ("1GiB", 2**30),
        ("1.5 GB", 1_500_000_000),
        ("0.29 kB", 290),
        ("  2 TiB ", 2 * 2**40),
        ("1. PB", 10**15),
        (".5PiB", 2**49),
        ("1gib", 2**30),
        ("1KB", 1000),
        ("1.0001 KiB", 1024),
        ("64M", 64 * 2**20),
        ("8G", 2**33),
        ("2k", 2048),
        ("1Gi", 2**30),
        ("1e9", 10**9),
        ("1.5e+3 kB", 1_500_000),
        (1.5e9, 1_500_000_000),
        (0.8 * 2**30, 858_993_459),
        (np.float32(8), 8),
    ],
)
def test_sizes_that_mean_something(value, size):
    parsed = parse_bytes(value)
    assert parsed == size
    assert type(parsed) is int


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (True, "is of type bool"),
        (np.True_, "is of type bool"),
        (None, "is of type NoneType"),
        (1j, "is of type complex"),
        (float("nan"), "is not finite"),
        (-np.inf, "is not finite"),
        (0.5, "is less than one byte"),
        ([1], "is of type list"),
        (b"1GiB", "is of type bytes"),
        (np.arange(3), "is of type ndarray"),
        (0, "is less than one byte"),
        (-1, "is less than one byte"),
        ("0 GiB", "is less than one byte"),
        ("0.5B", "is less than one byte"),
        (2**63, "is more than 2^63 - 1 bytes"),
        ("9" * 30, "is more than 2^63 - 1 bytes"),
        ("1 XB", "has the unknown unit 'XB'"),
        ("64Q", "has the unknown unit 'Q'"),
        ("1.5", "has no unit"),
        ("1e-3", "is not a number with a unit"),
        ("", "is not a number with a unit"),
        ("GiB", "is not a number with a unit"),
        ("-1GiB", "is not a number with a unit"),
        ("nan", "is not a number with a unit"),
        ("inf GiB", "is not a number with a unit"),
        ("1e999", "is not a number with a unit"),
        ("1 000 B", "is not a number with a unit"),
        ("1,5 GB", "is not a number with a unit"),
        ("٣ GB", "is not a number with a unit"),
    ],
)
def test_sizes_that_mean_nothing(value, problem):
    with pytest.raises(OptionError) as caught:
        parse_bytes(value, "tensor_split_size")
    message = str(caught.value)
    assert message.startswith("tensor_split_size = ")
    assert problem in message
    assert message.endswith(
        'A size is a number of bytes (2**30) or text with a unit: "64MiB", "1.5 GB", "8G" '
        "(kB MB GB TB PB are powers of 1000, KiB MiB GiB TiB PiB and K M G T P of 1024)."
    )


def test_the_wording_of_a_size_error():
    with pytest.raises(OptionError, match=r"^memory_limit = '1 XB' has the unknown unit 'XB'\. A size is a number of bytes"):
        parse_bytes("1 XB")


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(OptionError) as caught:
        parse_bytes("x" * 10_000)
    assert len(str(caught.value)) < 300


def test_option_errors_are_value_errors_too():
    assert issubclass(OptionError, ValueError)
    assert issubclass(OptionError, EqsatMemError)


@given(st.integers(1, 2**60))
@example(2**55 + 1)
def test_a_shown_size_parses_back_within_a_hundredth_of_its_unit(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.01)
    assert parse_bytes(format_bytes(size, round_up=True)) >= size


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (64 * 2**20, "64 MiB"), (122_880**2 * 4, "56.25 GiB")],
)
def test_how_sizes_are_shown(size, text):
    assert format_bytes(size) == text


def test_options_are_checked_and_hashable():
    chosen = Options(memory_limit="1GiB", tensor_split_size="1 MB", rules=["mine.egg"], max_rows=np.int64(9))
    assert chosen.memory_limit == 2**30
    assert chosen.tensor_split_size == 10**6
    assert chosen.rules == ("mine.egg",)
    assert chosen == Options(memory_limit=2**30, tensor_split_size=10**6, rules="mine.egg", max_rows=9)
    assert hash(chosen) == hash(Options(memory_limit=2**30, tensor_split_size=10**6, rules="mine.egg", max_rows=9))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory_limit": "much"}, "memory_limit = 'much' is not a number with a unit"),
        ({"tensor_size_threshold": -5}, "tensor_size_threshold = -5 is less than one byte"),
        ({"accuracy": "exact"}, 'accuracy must be "bitwise", "reassociate" or "all", not \'exact\'.'),
        ({"accuracy": ["all"]}, "accuracy must be"),
        ({"rules": 3}, "rules must be a path or a sequence of paths, not 3."),
        ({"rules": [3]}, "rules must be a path or a sequence of paths, not [3]."),
        ({"max_rows": 0}, "max_rows must be a whole number above zero, not 0."),
        ({"max_iterations": True}, "max_iterations must be a whole number above zero, not True."),
        ({"max_seconds": float("nan")}, "max_seconds must be a number of seconds above zero, not nan."),
        ({"max_seconds": "1"}, "max_seconds must be a number of seconds above zero, not '1'."),
        ({"verify": 1}, "verify must be True or False, not 1."),
        ({"tiles": None}, "tiles must be True or False, not None."),
    ],
)
def test_options_that_mean_nothing(given, message):
    with pytest.raises(OptionError) as caught:
        Options(**given)
    assert str(caught.value).startswith(message)


def test_the_limit_is_the_argument_then_the_variable_then_the_device(monkeypatch):
    monkeypatch.setattr(options, "device_capacity", lambda: 7)
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "3 kB")
    assert resolve_limit(Options(memory_limit=5)) == 5
    assert resolve_limit(Options()) == 3000
    monkeypatch.setenv("EQSAT_MEM_LIMIT", " ")
    assert resolve_limit(Options()) == 7
    monkeypatch.delenv("EQSAT_MEM_LIMIT")
    assert resolve_limit(Options()) == 7


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("EQSAT_MEM_LIMIT", "plenty")
    with pytest.raises(OptionError, match=r"^EQSAT_MEM_LIMIT = 'plenty' is not a number"):
        resolve_limit(Options())


def test_the_capacity_of_this_device_is_a_size():
    assert parse_bytes(options.device_capacity()) > 2**20


def test_a_device_with_an_allocator_tells_its_own_capacity(monkeypatch):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 123}

    monkeypatch.setattr("jax.local_devices", lambda: [Device()])
    assert options.device_capacity() == 123


def test_an_unknown_capacity_asks_for_a_limit(monkeypatch):
    monkeypatch.delattr("os.sysconf")
    with pytest.raises(OptionError, match=r"is not known: pass memory_limit, or set EQSAT_MEM_LIMIT\.$"):
        options.device_capacity()


def test_rules_are_chosen_by_name():
    assert Options(only_rules="splitting").only_rules == ("splitting",)
    assert Options(without_rules=["neg-neg", "distance.egg"]).without_rules == ("neg-neg", "distance.egg")
    for wrong in (3, ["neg-neg", 3]):
        with pytest.raises(OptionError, match="only_rules must be the name of a rule or a rule file"):
            Options(only_rules=wrong)
