"""Limits that hold for every policy, and the expected results of each in simple cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.simulation.availability import Availability, Change
from recycle_pp.simulation.compare import compare
from recycle_pp.simulation.costs import Costs, Recovery
from recycle_pp.simulation.job import Job
from recycle_pp.simulation.moves import Moves
from recycle_pp.simulation.policies import NAMES
from recycle_pp.simulation.step_times import StepTimes

FREE = Moves(0.0, 0.0, (0.0,), "none")
NOTHING = Costs(Recovery((0.0,), (0.0,), "none"), 1e30, *(1e-9,) * 6, moves=FREE)
"""Costs with which changes take no time."""


@st.composite
def availabilities(draw, machines: int) -> Availability:
    """Any machines may be lost and return at any time, even all at once."""
    up, changes, now = set(range(machines)) - draw(st.sets(st.integers(0, machines - 1), max_size=3)), [], 0.0
    absent = frozenset(range(machines)) - up
    for _ in range(draw(st.integers(0, 25))):
        now += draw(st.sampled_from([0.0, 0.3, 5.0, 70.0, 900.0]))
        machine = draw(st.integers(0, machines - 1))
        changes.append(Change(now, machine, machine not in up))
        up ^= {machine}
    return Availability(machines, now + 50.0, tuple(changes), absent)


@st.composite
def simulations(draw):
    D, P, M = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    seconds = st.sampled_from([0.01, 0.05, 0.2])
    durations = {kind: [draw(seconds) for _ in range(P)] for kind in "FIW"}
    job = Job.of(
        pipelines=D, stages=P, microbatches=M, layers=draw(st.integers(P, 12)), durations=durations,
        memory=draw(st.sampled_from([None, {"base": "1f1b", "extra": 1}])),
        optimizer=draw(st.sampled_from(["staggered", "barrier"])),
    )  # fmt: skip
    there = draw(availabilities(D * P + draw(st.integers(0, 2))))
    return job, there, draw(st.sampled_from([Costs(), NOTHING])), draw(st.integers(0, 9))


@settings(max_examples=25, deadline=None)
@given(simulations())
def test_no_policy_beats_the_bound_and_the_shares_of_time_add_up(simulation):
    job, there, costs, seed = simulation
    result = compare(job, there, costs, NAMES, seed=seed, plans=3)
    bound = result.outcomes["bound"]
    for name, outcome in result.outcomes.items():
        assert outcome.steps <= bound.steps * (1 + 1e-9), name
        assert sum(outcome.shares.values()) == pytest.approx(1), name
        assert all(share > -1e-9 for share in outcome.shares.values()), (name, outcome.shares)
        assert outcome.steps >= 0 and outcome.redone >= 0
        times = [at for at, _, _ in outcome.curve]
        assert times == sorted(times) and times[-1] <= there.seconds


JOB = Job.of(pipelines=3, stages=4, microbatches=6)
QUIET = Availability(12, 7200.0, ())


def relative(there: Availability, costs: Costs = NOTHING, job: Job = JOB) -> dict[str, float]:
    return {name: o.relative for name, o in compare(job, there, costs, NAMES).outcomes.items()}


def test_without_losses_the_other_policies_reach_1f1b_and_ours_has_fewer_bubbles():
    found = relative(QUIET)
    assert all(found[name] == pytest.approx(1) for name in ("spares", "torchft", "oobleck", "recycle"))
    assert found["restart"] == pytest.approx(1, abs=0.01)
    assert found["bamboo"] == pytest.approx(3 / 4), "each forward runs twice"
    assert found["rerouted"] == found["rebalanced"] == pytest.approx(27 / 19), "the proven optimum"
    assert found["bound"] == pytest.approx(27 / 18)


def test_the_worked_example_with_one_permanent_loss():
    """W(1,2) is dead. A step needs 27 slots with re-routing, like 1F1B without a death, and at best 20.3 if layers can
    move."""
    found = relative(Availability(12, 1e5, (Change(0.0, 6, False),)))
    assert found["rerouted"] == pytest.approx(1, abs=1e-3)
    assert found["recycle"] == pytest.approx(1, abs=1e-3)
    assert found["rebalanced"] > 27 / 21.3
    assert found["torchft"] == pytest.approx(2 / 3, abs=1e-3)
    assert found["restart"] == pytest.approx(27 / 36, abs=1e-3), "9 micro-batches on each of two pipelines"
    assert found["spares"] == pytest.approx(27 / 36, abs=1e-3)
    assert found["bound"] == pytest.approx(27 / 18 * 11 / 12, abs=1e-3)


def test_a_lost_stage_restarts_from_the_checkpoint_and_too_few_machines_stop_the_job():
    lost = tuple(Change(100.0, machine, False) for machine in (2, 6, 10))  # all machines of stage 2
    costs = Costs(restart=50.0)
    found = compare(JOB, Availability(12, 300.0, lost), costs, ["rerouted"]).outcomes["rerouted"]
    assert found.redone * 1.9 == pytest.approx(100, rel=0.05), "all steps of 1.9 s since the start: no checkpoint yet"
    assert found.shares["recovering"] * 12 * 300 == pytest.approx(9 * 50, rel=0.05)
    few = tuple(Change(100.0, machine, False) for machine in range(9))
    stopped = compare(JOB, Availability(12, 300.0, few), costs, ["rerouted"]).outcomes["rerouted"]
    assert stopped.steps == pytest.approx(0, abs=1e-6)


def test_a_returning_machine_takes_part_once_it_has_the_state():
    there = Availability(12, 1000.0, (Change(100.0, 6, False), Change(200.0, 6, True)))
    costs = Costs(start=60.0, bandwidth=1e9)
    found = compare(JOB, there, costs, ["rerouted"]).outcomes["rerouted"]
    assert found.shares["away"] * 12 * 1000 == pytest.approx(100)
    assert found.shares["idle"] * 12 * 1000 == pytest.approx(60 + 16 + 1.35, rel=0.01), "start, 16 GB, half a step"


def test_moving_layers_costs_their_transfer_slower_steps_and_a_stall():
    there = Availability(12, 20_000.0, (Change(5000.0, 6, False),))
    costs = NOTHING, replace(NOTHING, moves=Moves(10.0, 0.5, (30.0,), "flags"), bandwidth=1e9)
    free, dear = (compare(JOB, there, of, ["rebalanced"]).outcomes["rebalanced"] for of in costs)
    assert dear.shares["recovering"] * 20_000 == pytest.approx(30 * 11 / 12, abs=1), "the stall of the switch"
    assert free.steps - dear.steps > 30 * free.steps / 20_000, "and slower steps in the old layout"


def test_layers_do_not_move_for_outages_that_end_before_the_move_pays():
    """A machine is away for 10 s of every 1000 s. At first, the policy may expect longer outages."""
    changes = [Change(1000.0 * k + after, 6, up) for k in range(1, 20) for after, up in ((0.0, False), (10.0, True))]
    there = Availability(12, 20_000.0, tuple(changes))
    costs = replace(NOTHING, start=1.0, bandwidth=1e9, moves=replace(FREE, stalls=(5.0,)))
    found = compare(JOB, there, costs, ["rerouted", "rebalanced"]).outcomes
    assert found["rebalanced"].steps > 0.99 * found["rerouted"].steps


def test_a_spare_is_used_before_a_restart():
    there = Availability(13, 10000.0, (Change(5000.0, 3, False),))
    costs = Costs(swap=20.0)
    assert relative(there, costs)["spares"] == pytest.approx(1 - 20 / 10000, abs=1e-3)


def test_the_reference_is_1f1b_on_even_layers_whatever_the_limits_of_our_plans():
    for memory, optimizer in ((None, "staggered"), ({"base": "1f1b", "extra": 2}, "barrier")):
        job = Job.of(pipelines=6, stages=4, microbatches=12, memory=memory, optimizer=optimizer)
        assert StepTimes(job).reference == pytest.approx(45 * 0.1)
