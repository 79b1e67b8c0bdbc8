"""The coordinator's handler begins, replaces and records moves of layers. The job is a fake."""

import asyncio
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.coordinator import planning, rebalancing
from recycle_pp.coordinator.rebalancing import Rebalancing
from recycle_pp.fitting import layout_search
from recycle_pp.fitting.layout_search import Found
from recycle_pp.fitting.problem import initial_problem, relaid_problem
from recycle_pp.protocol.events import MoveWanted, Outcome, Send
from recycle_pp.protocol.live_problem import LiveProblem, all_workers
from recycle_pp.telemetry.background import now
from recycle_pp.wire.messages.generations import Resumed
from recycle_pp.wire.messages.lifecycle import Donate
from recycle_pp.wire.messages.steps import Commit

from ..in_process import small
from .states import job_state

JOB = {
    "model__layers": 32, "emulate__mode": "sleep", "emulate__O": 0.0, "parallel__pipelines": 3, "parallel__stages": 4,
    "parallel__microbatches": 6, "run__steps": 10_000, "schedule__profile_steps": 0,
}  # fmt: skip
EVEN = {0: [-1, *range(8)], 1: [*range(8, 16)], 2: [*range(16, 24)], 3: [*range(24, 33)]}
MEASURED = {
    "durations_seconds": {kind: [0.06] * 4 for kind in "FIWBO"}, "steps": 3, "turn_seconds": 0.0,
    "message_seconds": 0.0, "sum_seconds": [0.0] * 4, "boundary_bytes": [8] * 3, "layout": [8] * 4,
}  # fmt: skip
DEAD = 6  # the member that plays W(1,2)


BEST = {(): (8, 8, 8, 8), (2,): (9, 9, 5, 9), (2, 3): (10, 10, 6, 6)}
"""The best layout, by the stages that have lost a worker."""


def search(problem, live, layers, current, keep=None):
    """Stands in for `layout_search.search`, which takes a second."""
    dead = all_workers(problem) - live
    target = keep if keep and not dead else BEST[tuple(sorted(worker.stage for worker in dead))]
    if target == current:
        return None
    whole = relaid_problem(problem, layers.settings(target), current, target)
    return Found(target, whole, LiveProblem().of(whole, live), now=0.54, then=0.42, bytes=7_000_000, most=2_600_000)


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(rebalancing, "search", search)
    monkeypatch.setattr(rebalancing, "time", CLOCK)


class Job:
    """A fake job with the attributes that the handler reads."""

    def __init__(self, settings):
        self.problem, self.units = initial_problem(settings), SimpleNamespace(layout=EVEN)
        self.assignment = {d * 4 + s: Worker(d, s) for d in range(3) for s in range(4)}
        self.live, self.followers, self.phase = set(self.assignment), set(), "running"
        self.first_step, self.committed, self.generation = 0, -1, 0

    @property
    def workers(self):
        return {member: self.assignment[member] for member in sorted(self.live)}


class Trainer:
    """A coordinator's handler with a fake job, driver and planner."""

    def __init__(self, mode="auto", folder="nowhere", **changes):
        self.job = Job(settings := small(**JOB | {"schedule__rebalance": mode} | changes))
        self.state = job_state(settings, self.job, folder)
        self.state.run.later = now
        for member in self.job.assignment:
            rank = self.state.roster.enter(member)
            rank.incarnation, rank.alive = 0, True
        self.asked, self.prepared, self.open = [], [], False
        self.handler = Rebalancing(self.state, self, self)
        self.note("plan_adopted")

    def note(self, name, sends=(), **fields):
        self.handler.handled(None, Outcome(list(sends), [{"event": name, **fields}]))

    def prepare(self, problem):
        self.prepared.append(problem)

    def change(self, problem):
        self.job.problem = problem

    def drive(self, event):
        assert isinstance(event, MoveWanted)
        self.asked.append(self.state.layers.counts(event.layout))
        if self.open:
            self.note("move_ended", how="replaced", layout={}, detail="")
        self.open = event.layout != self.job.units.layout
        if self.open:
            self.wanted = event
            self.note("move_begun", layout=event.layout, receivers={0: [8], 4: [8]})

    def die(self, member=DEAD, explained=True):
        self.job.live.discard(member)
        rank = self.state.roster[member]
        rank.alive, rank.died, rank.explained = False, 0, 0 if explained else -1

    def switch(self):
        """Switches to the new layout, as after the last commit in the old one."""
        self.job.units.layout, self.job.problem, self.open = self.wanted.layout, self.wanted.problem, False
        self.job.generation += 1
        self.note("plan_adopted")
        self.note("move_ended", how="switched", layout=self.wanted.layout, detail="")

    async def commit(self, count=1):
        """Commits steps of half a second, and waits for the search after each."""
        for _ in range(count):
            CLOCK.now += 0.5
            self.job.committed += 1
            self.note("committed", commit=Commit(0, self.job.committed, 1.0, 1.0, 1.0))
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    @property
    def events(self):
        return self.state.recorder.whole


def played(scenario, **changes):
    """The trainer after `scenario(trainer)`."""

    async def play():
        trainer = Trainer(**changes)
        await scenario(trainer)
        return trainer

    return asyncio.run(play())


async def death(trainer):
    await trainer.commit()
    trainer.die()
    await trainer.commit()


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_layers_move_to_the_best_layout_after_a_death_and_its_plan_is_prepared(mode):
    trainer = played(death, mode=mode)
    [layout] = trainer.asked
    assert layout == (9, 9, 5, 9)
    wanted = trainer.wanted
    assert wanted.layout[0][0] == -1 and wanted.layout[3][-1] == 32, "embedding and head stay"
    assert wanted.problem.per_stage("F") == pytest.approx([0.02 * n / 8 for n in layout])
    assert not wanted.problem.dead
    [prepared] = trainer.prepared
    assert prepared.dead == {Worker(1, 2)} and prepared.durations == wanted.problem.durations


def test_the_real_search_finds_a_layout_for_the_job(monkeypatch):
    monkeypatch.setattr(rebalancing, "search", layout_search.search)
    trainer = played(death, model__split=[8, 8, 8, 8])
    [layout] = trainer.asked
    assert sum(layout) == 32 and layout[2] < 8


async def much_later(trainer):
    await death(trainer)
    await trainer.commit(5)


def test_a_move_is_requested_once_while_nothing_changes():
    assert len(played(much_later).asked) == 1


def test_with_rebalance_never_no_layer_moves():
    assert played(much_later, mode="never").asked == []


@pytest.mark.parametrize(("stays", "moves"), [(None, True), ("blocks.1 has no parameters of its own", False)])
def test_layers_of_another_model_move_if_its_workers_report_them_as_movable(stays, moves):
    async def scenario(trainer):
        await trainer.commit()
        trainer.die()
        await trainer.commit()
        assert trainer.asked == [], "no worker has described the model"
        trainer.state.layers.describe(32, stays, {layer: [("w", 9)] for layer in range(32)})
        trainer.note("plan_adopted")
        await trainer.commit()

    trainer = played(scenario, model__kind="custom", model__build="a:b", model__layers="blocks")
    assert trainer.asked == [(9, 9, 5, 9)] * moves


def test_each_stage_keeps_its_only_layer():
    assert played(much_later, model__layers=4).asked == []


def test_no_move_begins_before_a_commit():
    async def scenario(trainer):
        trainer.die()
        trainer.note("plan_adopted")
        assert not trainer.handler._searching
        await trainer.commit()

    assert len(played(scenario).asked) == 1


@pytest.mark.parametrize("phase", ["reporting", "holding", "ended"])
def test_no_move_begins_while_the_job_does_not_run(phase):
    async def scenario(trainer):
        trainer.job.phase = phase
        await death(trainer)

    assert played(scenario, mode="always").asked == []


def test_no_move_begins_while_a_joiner_receives_state():
    async def scenario(trainer):
        trainer.die()
        trainer.job.followers.add(DEAD)
        donate = Send(2, Donate(DEAD, Worker(1, 2), 1))
        trainer.note("other", sends=[donate])
        await trainer.commit(2)
        assert trainer.asked == []
        trainer.job.followers.clear()  # the joiner has died
        await trainer.commit()

    assert len(played(scenario, mode="always").asked) == 1


async def death_with_slow_links(trainer):
    """A death. A move then takes longer than the 20 s in which a starting worker is expected, but less than 900 s."""
    trainer.state.profile.links.measured("a", {"b": (0.0, 5e4)})
    await death(trainer)


@pytest.mark.parametrize(
    ("mode", "starts", "moves"), [("auto", False, True), ("auto", True, False), ("always", True, True)]
)
def test_auto_waits_for_a_restarting_worker_and_always_does_not(mode, starts, moves):
    async def scenario(trainer):
        await trainer.commit()
        trainer.die(explained=not starts)  # until the cause is known, the worker may be restarted
        trainer.state.profile.links.measured("a", {"b": (0.0, 5e4)})
        await trainer.commit()
        if starts:
            trainer.state.roster[DEAD].alive = True
            await trainer.commit()

    assert bool(played(scenario, mode=mode).asked) == moves


def test_a_worker_that_is_given_up_is_not_waited_for():
    async def scenario(trainer):
        trainer.die(explained=False)
        trainer.state.profile.links.measured("a", {"b": (0.0, 5e4)})
        await trainer.commit()
        assert trainer.asked == []
        trainer.state.roster[DEAD].explained = 0
        await trainer.commit()

    assert len(played(scenario).asked) == 1


def test_nothing_moves_for_the_last_steps_of_a_run():
    assert played(death, run__steps=3).asked == []


async def death_and_return(trainer):
    await death(trainer)
    trainer.switch()
    await trainer.commit(100)
    trainer.job.live.add(DEAD)
    trainer.job.generation += 1
    await trainer.commit()


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_layers_move_back_when_all_workers_take_part_again(mode):
    assert played(death_and_return, mode=mode).asked[-1] == (8, 8, 8, 8)


def test_a_return_before_the_switch_ends_the_move():
    async def scenario(trainer):
        await death(trainer)
        trainer.job.live.add(DEAD)
        await trainer.commit()

    trainer = played(scenario)
    assert trainer.asked[-1] == (8, 8, 8, 8) and not trainer.open
    assert [event.name() for event in trainer.events] == ["rebalancing", "rebalancing_abandoned"]
    assert trainer.events[-1].layout == [8, 8, 8, 8]


def test_another_death_replaces_the_move():
    async def scenario(trainer):
        await death(trainer)
        trainer.die(3)
        await trainer.commit()

    assert played(scenario).asked == [(9, 9, 5, 9), (10, 10, 6, 6)]


def test_an_explicit_split_is_restored():
    start = {0: [-1, *range(9)], 1: [*range(9, 16)], 2: [*range(16, 24)], 3: [*range(24, 33)]}

    async def scenario(trainer):
        trainer.job.units.layout = start
        trainer.note("plan_adopted")
        await trainer.commit(2)
        assert trainer.asked == [], "the split stays while no worker is dead"
        await death_and_return(trainer)

    assert played(scenario, mode="always", model__split=[9, 7, 8, 8]).asked[-1] == (9, 7, 8, 8)


def test_a_split_chosen_by_auto_may_change_while_all_workers_live():
    async def scenario(trainer):
        trainer.job.units.layout = {0: [-1, *range(9)], 1: [*range(9, 16)], 2: [*range(16, 24)], 3: [*range(24, 33)]}
        trainer.note("plan_adopted")
        await trainer.commit()

    assert played(scenario, model__split="auto", model__auto_split=[9, 7, 8, 8]).asked == [(8, 8, 8, 8)]


def test_a_move_is_recorded_with_both_sides_of_the_comparison_and_its_stall():
    trainer = played(death)
    [begun] = trainer.events
    assert begun.before == [8, 8, 8, 8] and tuple(begun.layout) == trainer.asked[0]
    assert (begun.step_seconds, begun.new_step_seconds, begun.outage_seconds) == (0.54, 0.42, 900)
    assert begun.gain_seconds == pytest.approx(200, rel=0.01) and begun.gain_seconds > 1.5 * begun.cost_seconds > 0
    assert begun.bytes == 7_000_000 and begun.receivers == ["0.0", "1.0"]

    trainer.switch()
    held = trainer.handler._held
    for member in trainer.job.live:
        times = {"resumed": held + (0.03 if member % 4 == 0 else 9.0), "followed": held + 0.01}
        trainer.handler.resumed(trainer.state.roster[member], Resumed(1, times))
    for member in trainer.job.live:  # again, after a death in the first step of the new layout
        trainer.handler.resumed(trainer.state.roster[member], Resumed(2, {"resumed": held + 10, "followed": held + 10}))
    assert len(trainer.events) == 1, "the stall is known when all have resumed"
    asyncio.run(trainer.commit())
    moved = trainer.events[1]
    assert moved.name() == "rebalanced" and moved.layout == begun.layout and moved.first_step == 2
    assert moved.stall_seconds == pytest.approx(0.03), "workers of later stages wait for their input in any step"
    assert 0 <= moved.seconds < 60 and moved.bytes == begun.bytes
    assert (moved.gain_seconds, moved.cost_seconds) == (begun.gain_seconds, begun.cost_seconds)


def test_a_switch_whose_stall_was_not_measured_does_not_make_later_moves_cheaper():
    trainer = played(death)
    trainer.switch()
    asyncio.run(trainer.commit())
    assert trainer.events[1].stall_seconds == 0.0 and not trainer.handler._stalls


def test_a_layout_for_an_old_membership_is_not_used(monkeypatch):
    async def scenario(trainer):
        def slow(*arguments):
            found = search(*arguments)
            if DEAD not in trainer.job.live:
                trainer.job.live.discard(3)  # member 3 dies during the search
            return found

        monkeypatch.setattr(rebalancing, "search", slow)
        await death(trainer)
        assert trainer.asked == []
        await trainer.commit()

    assert played(scenario).asked == [(10, 10, 6, 6)]


def test_the_profile_and_the_traces_follow_the_adopted_layout():
    trainer = played(death)
    assert trainer.state.profile.layout == trainer.state.recorder.layout == (8, 8, 8, 8)
    trainer.switch()
    assert trainer.state.profile.layout == trainer.state.recorder.layout == trainer.asked[0]


def test_after_a_restart_of_all_workers_the_job_has_the_first_layout_and_no_move():
    async def scenario(trainer):
        await death(trainer)
        trainer.switch()
        await trainer.commit()
        trainer.note("restarted", committed=1)
        trainer.job.units.layout, trainer.open = EVEN, False
        trainer.job.live.add(DEAD)
        trainer.note("plan_adopted")
        await trainer.commit(2)

    trainer = played(scenario)
    assert trainer.job.problem.per_stage("F") == pytest.approx((0.02,) * 4)
    assert len(trainer.asked) == 1 and trainer.state.profile.layout == (8, 8, 8, 8)


def test_the_stall_of_a_switch_leaves_out_the_optimizer_steps_in_the_old_layout():
    async def scenario(trainer):
        trainer.state.profile.load(MEASURED)
        await death(trainer)
        trainer.switch()
        held = trainer.handler._held
        for member in trainer.job.live:
            times = {"followed": held, "relaid": held + (0.10 if member % 4 == 2 else 0.06), "resumed": held + 0.06}
            trainer.handler.resumed(trainer.state.roster[member], Resumed(1, times))
        await trainer.commit()

    trainer = played(scenario)
    assert trainer.state.profile.seconds(Worker(0, 2), "O") < 0.04, "stage 2 has fewer layers than before"
    assert trainer.events[-1].stall_seconds == pytest.approx(0.04)


def test_a_new_coordinator_expects_outages_as_long_as_those_before_it(tmp_path):
    async def first(trainer):
        trainer.state.profile.load(MEASURED)
        await death_and_return(trainer)

    async def second(trainer):
        await planning.load(trainer.state.profile, trainer.state.run.profile)
        trainer.note("plan_adopted")
        await death(trainer)

    played(first, folder=tmp_path)
    assert played(second, folder=tmp_path).events[0].outage_seconds == pytest.approx(50, abs=2)
