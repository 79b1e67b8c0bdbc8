"""A mistake in telemetry is said once and ends nothing; a median of any number of values takes little memory."""

import pickle
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.telemetry.guard import guarded, guarded_returning
from recycle_pp.telemetry.lines import Lines
from recycle_pp.telemetry.running_median import MOST, RunningMedian
from recycle_pp.telemetry.warn import warn_once


@pytest.fixture(autouse=True)
def nothing_said_yet():
    warn_once.cache_clear()


def test_the_same_mistake_is_said_once_whatever_its_words(capsys):
    @guarded
    def fails(step):
        raise ValueError(f"step {step} is odd")

    for step in range(5):
        assert fails(step) is None
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "telemetry failed in fails: ValueError at test_guard.py:" in said[0]


def test_what_is_asked_for_has_a_value_all_the_same(capsys):
    @guarded_returning(dict)
    def spans(step):
        return {step: 1 / step}

    assert spans(2) == {2: 0.5} and spans(0) == {}
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_file_that_cannot_be_made_loses_its_lines_and_is_said_once(tmp_path, capsys):
    lines = Lines(tmp_path / "nowhere" / "metrics.jsonl")
    for step in range(3):
        lines.write({"step": step})
    lines.close()
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written: No such file or directory") == 1


@given(st.lists(st.floats(-1e9, 1e9), max_size=50))
def test_the_median_of_few_values_is_exact(values):
    assert RunningMedian(values).median == (median(values) if values else None)


@pytest.mark.parametrize("count", [MOST - 1, MOST, 3 * MOST, 100_000])
def test_the_median_of_many_is_that_of_values_spread_over_all_of_them(count):
    spread = RunningMedian(float(value) for value in range(count))
    assert len(pickle.dumps(spread)) < 20 * MOST, "the values that it keeps"
    assert abs(spread.median - count / 2) < count / MOST * 4
