"""An error in telemetry is reported once and does not end the job. A running median takes constant memory."""

import pickle
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.telemetry.guard import guarded, guarded_returning
from recycle_pp.telemetry.lines import Lines
from recycle_pp.telemetry.running_median import CAPACITY, RunningMedian
from recycle_pp.telemetry.warn import warn_once


@pytest.fixture(autouse=True)
def no_warnings_yet():
    warn_once.cache_clear()


def test_the_same_error_is_reported_once_although_its_message_differs(capsys):
    @guarded
    def fails(step):
        raise ValueError(f"step {step} is odd")

    for step in range(5):
        assert fails(step) is None
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "telemetry failed in fails: ValueError at test_guard.py:" in warnings[0]


def test_a_function_that_fails_returns_its_default(capsys):
    @guarded_returning(dict)
    def spans(step):
        return {step: 1 / step}

    assert spans(2) == {2: 0.5} and spans(0) == {}
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_file_that_cannot_be_created_is_reported_once(tmp_path, capsys):
    lines = Lines(tmp_path / "nowhere" / "metrics.jsonl")
    for step in range(3):
        lines.write({"step": step})
    lines.close()
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written: No such file or directory") == 1


@given(st.lists(st.floats(-1e9, 1e9), max_size=50))
def test_the_median_of_few_values_is_exact(values):
    assert RunningMedian(values).median == (median(values) if values else None)


@pytest.mark.parametrize("count", [CAPACITY - 1, CAPACITY, 3 * CAPACITY, 100_000])
def test_the_median_of_many_values_is_close(count):
    values = RunningMedian(float(value) for value in range(count))
    assert len(pickle.dumps(values)) < 20 * CAPACITY, "the size of the kept values is limited"
    assert abs(values.median - count / 2) < count / CAPACITY * 4
