"""The log of a job's events is a complete record of its decisions."""

import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import Problem, Worker, actions

from recycle_pp.config.compose import compose
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.protocol.ballot import make_vote
from recycle_pp.protocol.event_json import decode, encode, fingerprint
from recycle_pp.protocol.events import MessageReceived, PlanMade, ProblemChanged, SavingChanged
from recycle_pp.protocol.snapshot import NotASnapshot, restored, snapshot
from recycle_pp.wire.messages.units import UnitId

from .orders import Order
from .planning import plan_simply
from .world import Fault

KINDS = ("kill", "lose", "leave", "cut", "reset", "orphan", "sever")


@pytest.fixture(scope="module")
def worlds():
    """Jobs with every kind of fault, while layers move and a user changes a setting."""
    found = []
    for seed in range(28):
        kind, victim = KINDS[seed % len(KINDS)], Worker(seed % 2, seed // 2 % 2)
        wanted = Fault(50 + seed, "move", victim, (1, 3) if seed % 2 else (3, 1))
        change = Fault(40, "set", victim, (1,))
        faults = (change, Fault(20 + 7 * seed, kind, victim), Fault(60 + 7 * seed, "revive", victim), wanted)
        order = Order(
            (2, 2, 2),
            faults,
            steps=4,
            patience=200,
            stagger=seed % 2 == 1,
            copies=seed % 3,
            evaluate_every=2,
            save_every=2,
            seed=seed,
        )
        found.append(order.run())
    return found


def test_the_jobs_move_layers(worlds):
    ends = sum((world.coordinator.moves for world in worlds), Counter())
    assert ends["switched"] > 4


@pytest.mark.parametrize("more", [[], ["model.recompute=auto"]])
def test_a_problem_with_memory_in_bytes_is_the_same_in_the_log(more):
    problem = initial_problem(compose(["parallel=2x2", "model=tiny", "parallel.memory=1GB", *more]))
    assert decode(json.loads(encode(PlanMade(problem)))).problem == problem


def test_a_fresh_job_given_the_same_events_decides_the_same(worlds):
    for world in worlds:
        again = world.coordinator.fresh_job()
        for event, outcome in world.coordinator.log:
            assert again.handle(event) == outcome, event


def test_a_job_restored_from_a_snapshot_before_any_event_decides_the_same(worlds):
    for world in worlds:
        again = world.coordinator.fresh_job()
        for event, outcome in world.coordinator.log:
            again = restored(snapshot(again), plan_simply, actions)
            repeated = again.handle(decode(json.loads(encode(event))))
            assert fingerprint(repeated) == fingerprint(outcome), event


def test_outcomes_that_differ_have_different_fingerprints(worlds):
    outcomes = [outcome for world in worlds for _, outcome in world.coordinator.log]
    different = {str(outcome) for outcome in outcomes}
    assert len({fingerprint(outcome) for outcome in outcomes}) == len(different) > 70


@settings(max_examples=30)
@given(st.lists(st.floats(), max_size=4), st.booleans(), st.binary(max_size=20))
def test_a_vote_with_any_floats_and_bytes_survives_the_log(losses, finite, checksums):
    vote = make_vote(3, 7, losses, finite, True, [1.0, 2.0], losses, True, checksums, [UnitId(3, 5)])
    back = decode(json.loads(encode(MessageReceived(3, vote))))
    assert back.message.digest == vote.digest and back.message.checksums == checksums
    pairs = zip(back.message.losses, losses, strict=True)
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def test_a_problem_survives_the_log():
    problem = Problem(
        pipelines=3,
        stages=4,
        microbatches=6,
        failed=[(1, 2)],
        backward="mixed",
        durations={"F": 1.5, "I": [1, 2, 3, 4]},
        speed={"0,1": 0.5},
        memory_limit={"base": "1f1b", "extra": 2},
    )
    assert decode(json.loads(encode(ProblemChanged(problem)))).problem == problem


@pytest.mark.parametrize("data", [b"", b"\x80\x05.", b"cposix\nsystem\n(S'true'\ntR.", b"crecycle_schedules\nplan\n."])
def test_bytes_that_are_not_a_snapshot_are_rejected_and_run_no_code(data):
    with pytest.raises(NotASnapshot):
        restored(data, plan_simply, actions)


def test_a_new_job_has_no_checkpoint_in_progress():
    """So a coordinator must pass the state of saving to each new job again."""
    job = Order((2, 2, 2), steps=1).run().coordinator.fresh_job()
    assert job.saving == SavingChanged(occupied=False, due=False)
    job.handle(SavingChanged(occupied=True, due=True))
    assert job.saving.occupied and job.saving.due
