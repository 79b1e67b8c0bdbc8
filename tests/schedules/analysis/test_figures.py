"""Bubbles, lost ops and redone ops, as defined in docs/figures.md."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Op, OpArrays, OpKind, Problem, Trace, Worker, plan
from recycle_schedules.analysis.figures import bubbles, lost, redone
from recycle_schedules.analysis.one_f_one_b import one_f_one_b


@given(stages=st.integers(1, 6), microbatches=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_bubbles_of_1f1b_match_the_formula(stages: int, microbatches: int) -> None:
    """The share of bubbles is (P - 1) / (M + P - 1)."""
    made = one_f_one_b(Problem(2, stages, microbatches, backward="coupled", optimizer="none"))
    assert bubbles(made).share == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert bubbles(made).by_stage == pytest.approx([bubbles(made).share] * stages)


def test_dead_workers_have_no_bubbles() -> None:
    problem = Problem(2, 1, 4, failed=[Worker(1, 0)], optimizer="none")
    assert bubbles(plan(problem)).share == 0.0


def trace(*ops: tuple[Op, str]) -> Trace:
    problem = Problem(2, 1, 1, failed=[Worker(1, 0)], optimizer="none")
    return Trace(problem, OpArrays.of(problem, [op for op, _ in ops]), status=tuple(status for _, status in ops))


def op(kind: str, microbatch: tuple[int, int], pipeline: int, start: float, end: float) -> Op:
    return Op(OpKind(kind), microbatch, 0, Worker(pipeline, 0), start, end)


def test_a_worker_that_dies_counts_until_its_last_op() -> None:
    died = [(op("F", (1, 0), 1, 0.0, 1.0), "done"), (op("B", (1, 0), 1, 1.5, 2.0), "cut")]
    went_on = [(op("F", (0, 0), 0, 0.0, 1.0), "done"), (op("F", (1, 0), 0, 3.0, 4.0), "redone")]
    assert bubbles(trace(*died, *went_on)).share == pytest.approx(1 - (1.5 + 2.0) / (2.0 + 4.0))


def test_a_lost_backward_counts_as_two_ops_whether_repeated_whole_or_split() -> None:
    died = [(op("F", (1, 0), 1, 0.0, 1.0), "done"), (op("B", (1, 0), 1, 1.0, 3.0), "done")]
    again = [(op("F", (1, 0), 0, 4.0, 5.0), "redone")]
    whole = trace(*died, *again, (op("B", (1, 0), 0, 5.0, 7.0), "redone"))
    halves = [(op("I", (1, 0), 0, 5.0, 6.0), "redone"), (op("W", (1, 0), 0, 6.0, 7.0), "redone")]
    split = trace(*died, *again, *halves)
    assert lost(whole) == redone(whole) == lost(split) == redone(split) == 3


def test_an_op_that_is_lost_twice_counts_as_one_lost_op_and_two_redone_ops() -> None:
    found = trace((op("F", (1, 0), 0, 0.0, 1.0), "redone"), (op("F", (1, 0), 0, 2.0, 3.0), "redone"))
    assert (lost(found), redone(found)) == (1, 2)


def test_a_plan_loses_nothing() -> None:
    made = plan(Problem(1, 2, 2))
    assert (lost(made), redone(made)) == (0, 0)
