"""The recovery contract under faults at every event of small jobs, and in random orders of events of larger ones."""

from dataclasses import replace

import pytest
from recycle_schedules import Problem, Worker, actions, plan

from recycle_pp.protocol.events import MessageReceived, SavingChanged, WorkerDied, WorkerEvicted, WorkerReady
from recycle_pp.protocol.job import _EVENTS, Job
from recycle_pp.protocol.ledger import Record, remainder
from recycle_pp.wire.messages.saving import Finished

from .orders import SHAPES, Order, assert_kept, assert_kept_by_all
from .world import Fault


@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 2), (3, 1, 2), (2, 3, 2), (1, 2, 3)])
def test_without_failures_every_step_is_committed_in_any_order_of_events(shape, stagger):
    for seed in range(20):
        world = Order(shape, steps=3, stagger=stagger, evaluate_every=2, save_every=2, seed=seed).run()
        assert world.coordinator.job.committed == 2
        assert world.coordinator.job.generation == 0


@pytest.mark.parametrize("each", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 2), (2, 3, 1)])
def test_a_death_at_any_event_changes_only_the_assignment_of_work(shape, stagger, each):
    pipelines, stages, _ = shape
    events = Order(shape, steps=2, stagger=stagger).run().events
    for moment in range(0, events, each):
        for victim in [Worker(d, s) for d in range(pipelines) for s in range(stages)]:
            world = Order(shape, (Fault(moment, "kill", victim),), steps=2, stagger=stagger).run()
            assert world.coordinator.lost is None
            assert world.coordinator.job.committed == 1


@pytest.mark.parametrize("each", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 2), (2, 3, 1)])
def test_every_validation_has_all_its_micro_batches_after_a_death_at_any_event(shape, stagger, each):
    pipelines, stages, _ = shape
    order = Order(shape, steps=2, stagger=stagger, evaluate_every=1)
    for moment in range(0, order.run().events, each):
        for victim in [Worker(d, s) for d in range(pipelines) for s in range(stages)]:
            assert replace(order, faults=(Fault(moment, "kill", victim),)).run().coordinator.evaluated == [0, 1]


@pytest.mark.parametrize("each", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("copies", [0, 1])
def test_every_commit_is_applied_if_all_connections_to_the_coordinator_are_reset_at_any_event(copies, stagger, each):
    """A reconnected worker may cause a new generation while the commit is still on its way to another worker."""
    order = Order((3, 1, 2), steps=3, stagger=stagger, copies=copies, evaluate_every=2, save_every=2)
    for moment in range(20, order.run().events, each):  # by then all are members
        resets = tuple(Fault(moment, "reset", Worker(d, 0)) for d in range(3))
        world = replace(order, faults=resets, seed=moment).run()
        assert world.coordinator.job.committed == 2 and world.coordinator.saved == 3


@pytest.mark.parametrize("each", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("kind", ["kill", "orphan"])
def test_a_step_whose_sums_do_not_fit_is_repeated_despite_a_death_at_any_event(kind, stagger, each):
    order = Order((2, 2, 2), steps=3, stagger=stagger, misfits=frozenset({(0, 0), (1, 0), (1, 1)}))
    quiet = order.run()
    assert (quiet.coordinator.job.committed, quiet.coordinator.job.generation) == (2, 3), "three attempts were void"
    for moment in range(0, quiet.events, each):
        world = replace(order, faults=(Fault(moment, kind, Worker(0, 1)),), seed=moment).run()
        assert world.coordinator.lost is None
        assert world.coordinator.job.committed == 2
        notes = [note for _, outcome in world.coordinator.log for note in outcome.notes]
        assert {note["step"] for note in notes if note["event"] == "repeated"} <= {0, 1}


@pytest.mark.parametrize("each", [11, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stagger", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 1, 2), (2, 3, 1)])
def test_a_coordinator_that_dies_at_any_event_is_replaced_and_no_step_is_applied_twice(shape, stagger, each):
    order = Order(shape, steps=2, stagger=stagger, evaluate_every=2, save_every=2)
    for moment in range(0, order.run().events, each):
        dies = Fault(moment, "orphan", Worker(0, 0))
        alone = replace(order, faults=(dies,), seed=moment).run()
        # With this seed, the job may end before event `moment`.
        assert alone.coordinator.takeovers == 1 or alone.events <= moment
        # A worker dies with the coordinator, as if it were on the same node.
        for victim in (Worker(0, 0), Worker(1, 0)):
            world = replace(order, faults=(dies, Fault(moment, "kill", victim)), seed=moment).run()
            assert world.coordinator.lost is None
            assert world.coordinator.job.committed == 1


@pytest.mark.parametrize("stagger", [False, True])
def test_the_death_of_the_last_worker_of_a_stage_is_recognised(stagger):
    world = Order((1, 2, 2), (Fault(30, "kill", Worker(0, 1)),), stagger=stagger).run()
    assert world.coordinator.lost == 1


@pytest.mark.parametrize(("shape", "copies"), [((1, 2, 2), 0), ((1, 2, 2), 1), ((2, 2, 2), 0)])
def test_the_end_is_undone_only_if_a_lost_stage_has_not_saved_its_last_part_or_a_live_worker_has_not_finished(
    shape, copies
):
    ends = []
    for seed in range(5):
        order = Order(shape, steps=4, save_every=2, copies=copies, seed=seed)
        events = order.run().events
        for moment in range(events - 9, events):
            kills = tuple(Fault(moment, "kill", Worker(d, 1)) for d in range(shape[0]))
            ends += undone(replace(order, faults=kills).run())
    assert {*ends} == {False, True}


def undone(world):
    """Whether the loss of stage 1 after the last step undid the end, in a list; [] if the job ended before it."""
    kept, left = [], {*world.assignment}  # left: live members that have not finished
    in_stage = {member for member, worker in world.assignment.items() if worker.stage == 1}
    for event, outcome in world.coordinator.log:
        if isinstance(event, SavingChanged):
            kept = event.kept
        elif isinstance(event, MessageReceived) and isinstance(event.message, Finished):
            left.discard(event.member)
        elif isinstance(event, WorkerDied):
            in_stage.discard(event.member)
            if not in_stage:
                lost = any(note["event"] == "stage_lost" for note in outcome.notes)
                assert lost == bool(left or 1 not in kept)
                return [lost]
            left.discard(event.member)
    return []


def test_a_process_that_was_evicted_during_the_start_and_died_does_not_make_the_next_one_leave():
    problem = Problem(pipelines=2, stages=1, microbatches=2)
    job = Job(problem, steps=3, planner=plan, derive=actions)
    for event in (WorkerReady(0), WorkerEvicted(0), WorkerDied(0)):
        job.handle(event)
    assert not job.leaving


def test_random_deaths_returns_and_delays_keep_the_contract():
    assert_kept(Order.drawn, range(200))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_random_orders_keep_the_contract():
    assert_kept_by_all(Order.drawn)


def test_random_orders_cover_every_fault_and_every_end():
    orders = [Order.drawn(seed) for seed in range(80)]
    worlds = [order.run() for order in orders]
    assert {fault.kind for order in orders for fault in order.faults} == {
        "kill",
        "lose",
        "revive",
        "leave",
        "cut",
        "reset",
        "orphan",
        "sever",
    }
    assert {order.shape for order in orders} == set(SHAPES)
    assert any(world.coordinator.restores for world in worlds) and any(
        world.coordinator.lost is not None for world in worlds
    )


def test_a_profile_that_changes_the_form_of_backwards_within_a_step_leaves_a_valid_problem():
    records = {w: Record(2) for w in map(Worker.parse, ("0.0", "1.0"))}
    for kind in "FIW":
        records[Worker(0, 0)].begin(kind, (0, 0))
        records[Worker(0, 0)].finish()
    problem = Problem(pipelines=2, stages=1, microbatches=1, backward="coupled")
    left = remainder(problem, records, busy={})
    assert left.problem.backward == "mixed"
    assert {op.kind for op in plan(left.problem).ops} <= set("FIWBO")


def job_of_one_pipeline(**state):
    """A job of three stages with one worker each, whose members 0, 1 and 2 are live. state: attributes of the job"""
    job = Job(Problem(pipelines=1, stages=3, microbatches=2), steps=3, planner=plan, derive=actions)
    for name, value in {"live": {0, 1, 2}, **state}.items():
        setattr(job, name, value)
    return job


def test_a_lack_of_memory_after_the_last_step_needs_no_plan():
    job = job_of_one_pipeline(phase="finished", committed=2)
    job.handle(SavingChanged(occupied=True, due=False, kept=[0, 1, 2]))
    for member in (0, 1):
        assert not job.handle(WorkerDied(member)).notes
    assert job.in_flight(Worker(0, 0)) >= 1


def test_a_removed_member_is_killed_even_if_its_stage_is_lost(monkeypatch):
    """Otherwise it would take part again after the restart from a checkpoint."""
    job = job_of_one_pipeline(phase="running")
    monkeypatch.setitem(_EVENTS, WorkerEvicted, lambda job, event: job._evict_wrong({event.member: "a wrong unit"}))
    notes = job.handle(WorkerEvicted(1)).notes
    assert [note["event"] for note in notes] == ["mismatch", "untrusted", "stage_lost"] and notes[1]["member"] == 1
