"""The coordinator of the simulated world: the real `Job` and `Saving`, driven by the events that the world selects.

coordinator = Coordinator(world)
coordinator.begin()                          # starts a job with a process for each worker
coordinator.options(found)                   # the possible next events
coordinator.act("plans")                     # runs an event of its own
coordinator.handle(node, message)              # a process's message has arrived
coordinator.orphan()                         # the coordinator dies; the event "takes over" starts its successor
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from recycle_schedules import Problem, Worker, actions

from recycle_pp.coordinator.checkpoints import Saving
from recycle_pp.protocol.assignment import spawned
from recycle_pp.protocol.events import (
    CoordinatorReplaced,
    Event,
    HoldExpired,
    LinksBroken,
    MessageReceived,
    MoveWanted,
    Outcome,
    PlanMade,
    ProblemChanged,
    Restarted,
    SavingChanged,
    Send,
    SettingsChanged,
    WorkerDescribed,
    WorkerDied,
    WorkerEvicted,
    WorkerReady,
    WorkerReturned,
)
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.takeover import find
from recycle_pp.wire.messages.ctl import Value
from recycle_pp.wire.messages.generations import Adopt, Broken, SteadyPlan
from recycle_pp.wire.messages.lifecycle import Donate, Leaving, Ready
from recycle_pp.wire.messages.saving import Assembled, Assembling, Digests, Saved, SaveFailed
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import Message, is_lasting
from recycle_pp.wire.messages.units import Layout
from recycle_pp.wire.messages.workers import State

from .network import Network
from .node import Node
from .planning import plan_simply
from .sharded import LACKING

if TYPE_CHECKING:
    from .world import World

Option = tuple[int, str]  # (a node's number or COORDINATOR, its action)
COORDINATOR = -1
NOWHERE = Path("/nonexistent")  # checkpoints of this world are numbers


class Coordinator:
    def __init__(self, world: World) -> None:
        self._world = world
        self.mismatches: list[Worker] = []  # workers found to have a wrong copy
        self.found_at = -1  # event that detected the newest of them
        self.stopped = False  # whether the job stopped because it was unknown which worker was wrong
        self.commits: list[Commit] = []
        self.evaluated: list[int] = []  # steps whose validation is complete
        self.saved = 0  # completed steps in the newest checkpoint
        self.restores = 0
        self.lost: int | None = None  # the lost stage that ended the job
        self.alive: dict[int, Node] = {}  # member -> process, until its death is noticed
        self.noticing: deque[Node] = deque()  # dead, not noticed yet
        self._mending: deque[int] = deque()  # generations in which a link broke
        self.headless = False  # whether the coordinator is dead and has no successor yet
        self.takeovers = 0
        self._expiry: HoldExpired | None = None  # newest expiry of the time that the job waits for a follower
        self.expired = 0  # how often the job has given up a follower
        self._expires = 0  # event from which on the job must not wait any longer
        self.moves: Counter[str] = Counter()  # how the moves ended
        self.switched_at = -1  # event at which the last move was adopted
        self.took_over: Counter[Worker] = Counter()  # workers that understudies have had to play
        self._taking_over: dict[int, Worker] = {}  # understudy -> the worker it plays once the generation is adopted
        self.in_step_at = -1  # event at which an understudy was in step for the first time
        self._spawned: dict[int, Worker] = {}  # the worker that each member's newest process was started as

    def options(self, found: list[Option]) -> list[Option]:
        """The possible next events: those of the processes, `found`, and its own."""
        if self.headless:
            return [*(option for option in found if option[1] != "delivers"), (COORDINATOR, "takes over")]
        if self.noticing:
            found.append((COORDINATOR, "notices a death"))
        if self._mending:
            found.append((COORDINATOR, "mends"))
        waits = self._world.patience is None or (found and self._world.events < self._expires)
        if self._waiting and not waits:
            found.append((COORDINATOR, "waits no longer"))
        if self._planned is not None:
            found.append((COORDINATOR, "has planned"))
        elif self.job.wants_plan:
            found.append((COORDINATOR, "plans"))
        if self.stage_lost is not None:
            found.append((COORDINATOR, "restores"))
        return found

    @property
    def _waiting(self) -> bool:
        """Whether the job waits for a follower, which it may have to give up."""
        job, expiry = self.job, self._expiry
        if job.phase == "holding":
            return True
        return job.phase == "running" and expiry == HoldExpired(job.generation, job.committed + 1)

    def act(self, what: str) -> None:
        if what == "mends":
            if self._mending.popleft() == self.job.generation:
                self._drive(LinksBroken())
        elif what == "takes over":
            self._take_over()
        elif what == "plans":  # in a thread; the job may want another plan in the meantime
            self._planned = self.job.problem_now()
            self.job.steady.plan(self._planned)
        elif what == "has planned":
            problem, self._planned = self._planned, None
            self._drive(PlanMade(problem))
        elif what == "waits no longer":
            assert self._expiry is not None
            self.expired += 1
            self._drive(self._expiry)
        elif what == "restores":
            self._restore()
        else:
            self.dead(self.noticing.popleft())

    # -- a job -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._new_job(0, -1, self._world.assignment, self._world.layout)
        self._spawn_all(list(self.job.assignment))

    def _spawn_all(self, members: Sequence[int]) -> None:
        self._world.network = Network()
        for member in members:
            self.spawn(member)

    def _new_job(self, first_step: int, generation: int, assignment: Mapping[int, Worker], layout: Layout) -> None:
        world = self._world
        self.fresh_job = partial(
            Job, world.problem_of(layout), steps=world.steps, planner=plan_simply, derive=actions, clip=1.0,
            stagger=world.stagger, copies=world.copies, third=world.third, understudy=world.understudy,
            first_step=first_step, evaluate_every=world.evaluate_every, save_every=world.save_every,
            generation=generation, assignment=dict(assignment),
        )  # fmt: skip
        self.job = self.fresh_job()
        self.saving = Saving(NOWHERE, lambda: self.job.assignment)
        self.log: list[tuple[Event, Outcome]] = []  # of this job
        self._planned: Problem | None = None
        self.stage_lost: int | None = None
        self._taking_over.clear()

    def spawn(self, member: int) -> None:
        world = self._world
        worker = self._spawned[member] = self.job.assignment[member]
        layers = self.job.units.layout.get(worker.stage, world.layout[worker.stage])
        node = self.alive[member] = Node(self._world, len(world.actors), member, worker, self.job.first_step, layers)
        world.actors.append(node)

    # -- messages and deaths -----------------------------------------------------------------------------------

    def handle(self, node: Node, message: Message) -> None:
        if node not in self.alive.values():
            return  # the process was removed, so its generation is void
        member = node.me.member
        if is_lasting(message):
            node.said[type(message)] = message
        match message:
            case Ready():
                self._drive(WorkerDescribed(member, "", message.units))
                if member not in self.job.live:
                    self._drive(WorkerReady(member))
            case Leaving():
                self._drive(WorkerEvicted(member))
            case Broken():
                self._mending.append(message.generation)
            case SaveFailed():
                self.saving.save_failed(message, member)
                # If a block is lost, the next generation restarts from the previous checkpoint.
                self.stopped = self.stopped or (self.saving.failed and message.detail != LACKING)
            case Saved():
                self._send(self.saving.saved(member, message))
            case Digests():
                self._send(self.saving.compared(member, message))
                self._judge()
            case Assembling():
                self.saving.assembling(member, message)
            case Assembled():
                self.saving.assembled(message)
                self.saved = max(self.saved, message.step)
            case State():
                for repeated in message.said:
                    self.handle(node, repeated)
                self._drive(WorkerReturned(member, message.committed))
                self._send(self.saving.returned(member))
            case _:
                self._drive(MessageReceived(member, message))

    def want(self, layout: Layout) -> None:
        self._drive(MoveWanted(layout, self._world.problem_of(layout)))

    def change(self, values: dict[str, Value]) -> None:
        self._drive(SettingsChanged(values))

    def _drive(self, event: Event) -> None:
        heirs = self._heirs(event)
        outcome = self.job.handle(event)
        if any(note["event"] == "stage_lost" for note in outcome.notes):
            if heirs:
                self._world.fail(f"a stage is lost although members {heirs} can take it over")
            if any(note["event"] == "move_ended" and note["how"] == "switched" for note in outcome.notes):
                self._world.fail("a move lost a stage")
        if self.in_step_at < 0 and any(each.prepared is not None for each in self.job.followers.understudies.values()):
            self.in_step_at = self._world.events
        self.log.append((event, outcome))
        if outcome.expiry is not None:
            self._expiry = outcome.expiry
            self._expires = self._world.events + (self._world.patience or 0)
        self._send(outcome.sends)
        for note in outcome.notes:
            if note["event"] == "committed":
                self._world.check_commit([self.alive[to] for to, what in outcome.sends if isinstance(what, Commit)])
            self._follow(note)
        if self.job.started and self.job.problem != self._world.problem_of(self.job.units.layout):
            self._world.fail(f"the layout is {self.job.units.layout}, but plans are for {self.job.problem}")

    def _heirs(self, event: Event) -> list[int]:
        """The members that must be able to take over a stage whose last worker has died."""
        job = self.job
        if not isinstance(event, WorkerDied) or event.member not in job.live or job.committed == job.steps - 1:
            return []
        stages = Counter(worker.stage for worker in job.workers.values())
        stage = job.assignment[event.member].stage
        return [
            member
            for member, each in job.followers.understudies.items()
            if each.worker is not None
            and (each.worker.stage, stages[stage]) == (stage, 1)
            and each.prepared is not None
            and job.units.leavers({member}, job.workers)
        ]

    def _follow(self, note: dict[str, Any]) -> None:
        world = self._world
        if note["event"] == "stage_lost":
            if self.stage_lost is not None:
                world.fail(f"stage {note['stage']} is lost twice")
            self.stage_lost = note["stage"]
            for member, worker in self._taking_over.items():
                if worker.stage == self.stage_lost and member in self.job.live and self.alive[member].alive:
                    world.fail(
                        f"stage {self.stage_lost} is lost although member {member}, which takes it over, is alive"
                    )
        elif note["event"] == "violation":
            if not world.flips:
                world.fail(note["detail"])
            self.stopped = True
        elif note["event"] == "committed":
            commit = note["commit"]
            self.commits.append(commit)
            self._check_writers()
            if commit.savers and world.save_every:
                self.saving.begin(commit.step + 1, commit.savers, commit.last, self.job.live)
        elif note["event"] == "took_over":
            self.took_over[note["worker"]] += 1
            self._taking_over[note["member"]] = note["worker"]
            self.saving.abandon()
        elif note["event"] == "plan_adopted":
            self._taking_over.clear()
        elif note["event"] == "move_ended":
            self.moves[note["how"]] += 1
            if note["how"] == "switched":
                self.switched_at = world.events
        elif note["event"] == "evaluated":
            if note["microbatches"] != world.held_out or note["val_loss"] != (2**world.held_out - 1) / world.held_out:
                world.fail(f"the validation after step {note['step']} lacks held-out micro-batches: {note}")
            self.evaluated.append(note["step"])
        elif note["event"] == "mismatch":
            self.mismatches.append(self.job.assignment[note["member"]])
            self.found_at = world.events
            if self.saving.step == self.job.committed + 1:
                self.saving.abandon()
        elif note["event"] == "untrusted":
            node = self.alive[note["member"]]
            if not node.shards.wrong:
                world.fail(f"{node.me.worker} is killed although its blocks are right")
            world.kill(node)
            self.dead(node)
            self.spawn(node.me.member)

    def _check_writers(self) -> None:
        """Checks that no checkpoint waits for a member that will not write a part."""
        for member in self.saving.writing & self.alive.keys():
            if self.alive[member].alive and not self.alive[member].saves_until(self.saving.step):
                self._world.fail(f"the next checkpoint waits for member {member}, which writes no part")

    def _judge(self) -> None:
        if self.saving.replicas.verdict() is not None and not self.stopped:
            self.stopped = not self._world.third or self.saving.final
            self.saving.abandon()

    def _send(self, out: list[Send]) -> None:
        """Delivers messages to inboxes. Orders come last, because in a real job they wait for an agreement."""
        for to, message in sorted(out, key=lambda send: isinstance(send.message, Adopt | SteadyPlan)):
            node = self.alive.get(to)
            if node is not None and not node.cut_off:
                if isinstance(message, Donate):
                    joiner = self.alive.get(message.to)
                    message = msgspec.structs.replace(message, address=joiner and ("node", joiner.number))
                node.inbox.append(message)
                node.stale = True

    def dead(self, node: Node) -> None:
        member = node.me.member
        if self.alive.get(member) is not node:
            return
        del self.alive[member]
        if kept := self.saving.kept():
            self._drive(SavingChanged(occupied=False, due=False, kept=kept))
        self._drive(WorkerDied(member))
        self._send(self.saving.died(member, self.job.live))
        self._judge()

    def _restore(self) -> None:
        """Restarts the job after the loss of a stage, or ends it, like the real coordinator."""
        world = self._world
        present = sorted(self.alive)
        again = self.restores and self.saved == self._restored_from
        if (self.job.started and not self.saved) or again or len(present) < world.stages:
            self.lost = self.stage_lost
        else:
            self.restores, self._restored_from = self.restores + 1, self.saved
            self.alive.clear()  # the old processes act a little longer, and their messages are ignored
            self.saving.restarted()
            self.stage_lost = None
            self._taking_over.clear()
            self._drive(Restarted(self.saved, present))
            self._drive(ProblemChanged(world.problem_of(world.layout)))
            self._spawn_all(present)

    # -- another coordinator -----------------------------------------------------------------------------------

    def orphan(self) -> None:
        """The coordinator dies. Only some of its messages arrive, and pending notices of deaths are lost."""
        world = self._world
        self.headless, self.stage_lost = True, None
        self._mending.clear()
        for node in world.actors:
            for _ in range(world.rng.randrange(len(node.inbox) + 1)):
                node.inbox.pop()
        world.touch()

    def _take_over(self) -> None:
        """A new coordinator takes over, as in coordinator/successor.py."""
        world = self._world
        self.headless, self.takeovers = False, self.takeovers + 1
        self.noticing.clear()
        self.alive = {rank: node for rank, node in self.alive.items() if node.alive}
        for node in self.alive.values():
            while node.inbox:
                node.act("receives")
            node.said |= node.lost_messages | {type(message): message for message in node.outbox if is_lasting(message)}
            node.outbox.clear()
            node.lost_messages.clear()
            node.cut_off = False
        found = find({member: node.me.state(node.linked) for member, node in self.alive.items()})
        first_step = max((node.me.committed for node in self.alive.values()), default=self.job.committed) + 1
        assignment = spawned(self._spawned, self.alive.keys(), world.problem.pipelines, world.stages)
        self._new_job(first_step, found.generation, assignment, found.layout or world.layout)
        if not found.begun:
            for member in assignment.keys() - self.alive.keys():
                self._drive(WorkerDied(member))
        else:
            savers = found.commit.savers if found.commit else []
            if savers and world.save_every and self.saved != found.committed + 1:
                last = found.committed == world.steps - 1
                self.saving.begin(found.committed + 1, savers, last, found.informed)
            self._drive(CoordinatorReplaced(found))
            for member, node in list(self.alive.items()):
                if member not in found.live:
                    world.kill(node)
                    self.noticing.pop()
                    self.spawn(member)
        for node in list(self.alive.values()):
            for message in [message for message in node.saves if isinstance(message, Assembled)][:1]:
                self.saving.assembling(node.me.member, Assembling(message.step))
        said = [(node, message) for node in self.alive.values() for message in node.said.values()]
        for node, message in sorted(said, key=lambda each: not isinstance(each[1], Assembling | Assembled)):
            self.handle(node, message)
        self._send(self.saving.only(self.job.live))
        world.touch()
