"""When a step is committed, and what stops a job with wrong gradients."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.protocol.ballot import Ballot, ProtocolViolation, make_vote
from recycle_pp.wire.frames import encode

LIVE = {2 * d + s: Worker(d, s) for d in (0, 2, 3) for s in (0, 1)}  # W(1, s) have died
LOSSES = [0.5, 1.0, 1.5, 2.0]


def vote(worker, squares=(0.25,), counts=(1, 1, 1, 1), losses=LOSSES, finite=True, fits=True, first=0):
    return make_vote(0, 7, squares, finite, fits, counts, losses, speaks=worker.pipeline == first)


def ballot(clip=None):
    return Ballot(step=7, stages=2, microbatches=4, clip=clip)


def test_a_step_is_committed_when_all_live_workers_have_voted():
    of = ballot()
    for member, worker in LIVE.items():
        assert not of.complete(LIVE)
        of.cast(member, worker, vote(worker))
    decision = of.decide()
    assert of.complete(LIVE)
    assert (decision.step, decision.norm, decision.scale, decision.loss) == (7, math.sqrt(0.5), 1.0, 1.25)


def test_the_vote_of_a_dead_worker_is_not_required_and_does_not_disturb():
    of = ballot()
    of.cast(2, Worker(1, 0), vote(Worker(1, 0)))
    for member, worker in LIVE.items():
        assert not of.complete(LIVE)
        of.cast(member, worker, vote(worker))
    assert of.complete(LIVE)


@given(st.randoms())
def test_the_decision_does_not_depend_on_the_order_of_votes(random):
    of, order = ballot(clip=0.1), random.sample(list(LIVE.items()), len(LIVE))
    for member, worker in order:
        of.cast(member, worker, vote(worker))
    assert of.decide().scale == pytest.approx(0.1 / math.sqrt(0.5), rel=1e-5)


@pytest.mark.parametrize("n", [0, 2])
def test_a_micro_batch_counted_twice_or_never_stops_the_job(n):
    with pytest.raises(ProtocolViolation, match=f"micro-batch 2 is in the gradient {n} times, not once"):
        ballot().cast(7, Worker(3, 1), vote(Worker(3, 1), counts=(1, 1, n, 1)))


@pytest.mark.parametrize(
    "other", [{"squares": (0.26,)}, {"losses": [0.5, 1.0, 1.5, 2.5]}, {"finite": False}, {"fits": False}]
)
def test_peers_with_different_sums_stop_the_job(other):
    of = ballot()
    of.cast(1, Worker(0, 1), vote(Worker(0, 1)))
    of.cast(0, Worker(0, 0), vote(Worker(0, 0), squares=(9.0,)))  # another stage
    with pytest.raises(ProtocolViolation, match=r"workers 0\.1 and 3\.1 have different reduced gradients"):
        of.cast(7, Worker(3, 1), vote(Worker(3, 1), **other))


def test_a_nan_gradient_skips_the_step_and_peers_with_different_nans_agree():
    of = ballot(clip=1.0)
    for member, worker in LIVE.items():
        nan = math.nan if worker.pipeline else -math.nan  # NaN has many bit patterns
        of.cast(member, worker, vote(worker, squares=(nan,), finite=False))
    assert of.decide().scale is None


def test_only_one_worker_of_a_stage_sends_its_values():
    assert len(encode(make_vote(0, 7, [1.0] * 500, True, True, [1] * 8192, LOSSES * 2048, speaks=False))) < 120


def test_sums_that_do_not_fit_are_not_committed_unless_a_gradient_is_not_finite():
    def ballot(**said):
        of = Ballot(step=7, stages=2, microbatches=4, clip=1.0)
        of.cast(0, Worker(0, 0), vote(Worker(0, 0)))
        of.cast(1, Worker(0, 1), vote(Worker(0, 1), **said))
        return of

    assert ballot().misfits == []
    assert ballot(fits=False).misfits == [1]
    poisoned = ballot(fits=False, finite=False)
    assert poisoned.misfits == [] and poisoned.decide().scale is None
