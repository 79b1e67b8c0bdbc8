"""Layers move after a death and back after a return: the coordinator's handler with a real job of the protocol."""

import asyncio

from recycle_schedules import Worker

from recycle_pp.coordinator.job import new_job
from recycle_pp.coordinator.rebalancing import Rebalancing
from recycle_pp.fitting.model_layers import ModelLayers
from recycle_pp.fitting.problem import with_less_memory
from recycle_pp.protocol.events import MessageReceived, ProblemChanged, WorkerDescribed, WorkerDied, WorkerReady
from recycle_pp.wire.messages.generations import Announce, Holds, Report
from recycle_pp.wire.messages.lifecycle import Donate, Expect, Synced
from recycle_pp.wire.messages.steps import Vote

from ..in_process import small
from .states import job_state

SETTINGS = small(
    model__layers=8, model__split=[4, 4], emulate__mode="sleep", parallel__pipelines=3, parallel__microbatches=6,
    schedule__rebalance="always", schedule__profile_steps=0, run__steps=100,
)  # fmt: skip
LAYERS = {0: [-1, 0, 1, 2, 3], 1: [4, 5, 6, 7, 8]}
DEAD = 5  # the member that plays W(2,1)


class Trainer:
    """A job with its handler, driver and planner. Workers answer at once.

    expected  member -> (session, layers) that it must follow
    donated   messages to donors
    layouts   layouts of the announced generations
    """

    def __init__(self):
        self.job = new_job(SETTINGS, 0)
        self.state = job_state(SETTINGS, self.job)
        for member in self.job.assignment:
            self.state.roster.enter(member).alive = True
        self.handler = Rebalancing(self.state, self, self)
        self.expected, self.donated, self.layouts = {}, [], []
        for member, worker in self.job.assignment.items():
            units = {layer: [(f"layers.{layer}.w", 10)] for layer in LAYERS[worker.stage]}
            self.drive(WorkerDescribed(member, "host", units))
        for member in self.job.assignment:
            self.drive(WorkerReady(member))

    def prepare(self, problem):
        self.prepared = problem

    def drive(self, event):
        outcome = self.job.handle(event)
        self.handler.handled(event, outcome)
        for to, message in outcome.sends:
            match message:
                case Announce():
                    holds = Holds([], message.committed, message.committed)
                    report = Report(message.generation, [], ahead=False, busy=0.0, holds=holds)
                    self.layouts.append(message.layout)
                    self.drive(MessageReceived(to, report))
                case Expect():
                    self.expected[to] = message.session, message.layers
                case Donate():
                    self.donated.append(message)
        return outcome

    async def commit(self):
        """Commits a step, and lets receivers catch up with it."""
        job = self.job
        step, generation = job.committed + 1, job.generation
        for member in sorted(job.live):
            squares = [1.0] * len(self.job.units.layout[job.assignment[member].stage])
            losses = [1.0] * 18
            vote = Vote(generation, step, True, True, [], b"", squares, losses)
            self.drive(MessageReceived(member, vote))
        assert job.committed == step
        for member, (session, layers) in sorted(self.expected.items()):
            if layers and member in job.followers:
                self.drive(MessageReceived(member, Synced(step, session)))
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


def test_a_limit_that_was_lowered_during_a_move_stays_after_the_switch():
    async def scenario():
        trainer, short = Trainer(), Worker(0, 0)
        await trainer.commit()
        trainer.drive(WorkerDied(DEAD))
        trainer.state.roster[DEAD].alive = False
        await trainer.commit()
        before = trainer.job.problem.limit(short)
        trainer.drive(ProblemChanged(with_less_memory(trainer.job.problem, short, before)))
        for _ in range(3):
            await trainer.commit()
        assert names(trainer) == ["rebalancing", "rebalanced"]
        assert trainer.job.problem.limit(short) == before - 1

    asyncio.run(scenario())


def names(trainer):
    return [event.name() for event in trainer.state.recorder.whole]


def test_a_move_that_has_begun_is_abandoned_once_a_user_switches_rebalancing_off():
    async def scenario():
        trainer = Trainer()
        await trainer.commit()
        trainer.drive(WorkerDied(DEAD))
        trainer.state.roster[DEAD].alive = False
        await trainer.commit()
        trainer.state.change({"schedule.rebalance": "never"})
        for _ in range(4):
            await trainer.commit()
        assert names(trainer) == ["rebalancing", "rebalancing_abandoned"]
        assert trainer.state.recorder.whole[1].detail == "schedule.rebalance is never now"
        job = trainer.job
        assert job.units.layout == LAYERS and job.phase == "running" and not job.followers.newest(0)

    asyncio.run(scenario())


def test_a_death_moves_layers_and_a_return_moves_them_back():
    async def scenario():
        trainer = Trainer()
        await trainer.commit()
        assert names(trainer) == [], "all workers take part"
        trainer.drive(WorkerDied(DEAD))
        trainer.state.roster[DEAD].alive = False
        await trainer.commit()
        assert names(trainer) == ["rebalancing"]
        target = tuple(trainer.state.recorder.whole[0].layout)
        assert sum(target) == 8 and target[0] > 4, "stage 1 has lost a worker"
        gained = [*range(4, target[0])]
        assert {m: layers for m, (_, layers) in trainer.expected.items()} == {0: gained, 2: gained, 4: gained}
        assert {of.to for of in trainer.donated} == {0, 2, 4}
        for _ in range(3):
            await trainer.commit()
        assert names(trainer) == ["rebalancing", "rebalanced"]
        job, layers = trainer.job, ModelLayers(SETTINGS)
        assert layers.counts(job.units.layout) == layers.counts(trainer.layouts[-1]) == target
        assert job.units.layout[0][0] == -1 and job.units.layout[1][-1] == 8, "embedding and head stay"
        assert job.problem_now() == trainer.prepared, "its plan was made before the switch"
        assert job.problem.per_stage("F")[0] > job.problem.per_stage("F")[1]
        assert trainer.state.profile.layout == target and job.phase == "running"

        units = {layer: [(f"layers.{layer}.w", 10)] for layer in job.units.layout[1]}
        trainer.drive(WorkerDescribed(DEAD, "host", units))
        trainer.drive(WorkerReady(DEAD))
        for _ in range(6):
            await trainer.commit()
        assert names(trainer)[2:] == ["rebalancing", "rebalanced"] and len(job.live) == 6
        assert job.units.layout == LAYERS and trainer.state.profile.layout == (4, 4), "the explicit split is back"

    asyncio.run(scenario())
