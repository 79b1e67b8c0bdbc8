"""A deterministic world for the recovery protocol: real `Job`, `Saving` and `Participant`s, the rest simulated.

    world = World(pipelines=2, stages=2, microbatches=2, steps=2)
    world.run(in_turn())                                     # all processes act in turn
    world.run(in_turn(), [Fault(17, "kill", Worker(0, 1))])  # the same, with a death at event 17

The world simulates the coordinator, the supervisors, the network and the clock; `node.Node` simulates a worker. The
chooser selects the next event among all messages that may arrive and all processes that may act. So messages are
delayed and overtake each other (except on one connection, as with TCP), timers fire at any time, and a dead process
leaves a part of its messages.

Every run checks the contracts: an op uses the parameters of its step; no survivor runs an op twice; every stage sums
each micro-batch's gradient once; peers that save or validate are in the same state; and until the end some event is
always possible. A violation raises `Violation` with the events that led to it.

(Longer than other files because every event may happen in every state, so the state is one object.)
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from recycle_schedules import Problem, Worker, actions

from recycle_pp.coordinator.checkpoints import Saving
from recycle_pp.protocol.events import (
    CoordinatorReplaced,
    Event,
    HoldExpired,
    LinksBroken,
    MessageReceived,
    Outcome,
    PlanMade,
    Send,
    WorkerDied,
    WorkerEvicted,
    WorkerReady,
    WorkerReturned,
)
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.roles import fill_stages
from recycle_pp.protocol.takeover import find
from recycle_pp.wire.messages.table import Message, is_lasting
from recycle_pp.wire.messages.workers import (
    Assemble,
    Assembled,
    Assembling,
    Broken,
    Digests,
    Donate,
    Leaving,
    Ready,
    Saved,
    SaveFailed,
    State,
)

from .node import Node
from .planning import plan_simply
from .sharded import BLOCKS, LACKING, lacking

Option = tuple[int, str]  # (a node's number or COORDINATOR, its action)
Chooser = Callable[[Sequence[Option]], int]

COORDINATOR = -1
NOWHERE = Path("/nonexistent")  # checkpoints of this world are numbers


class Violation(AssertionError):
    pass


class Fault(NamedTuple):
    """At event `at`, `kind` happens to the process that was started as `worker`.

    kill    it dies; messages that it has sent may be lost
    lose    it is removed although it lives: it works on, and its messages are ignored
    revive  if it is dead, a new process replaces it
    leave   it gets SIGTERM
    cut     its connection to another worker breaks
    reset   its connection to the coordinator breaks; it reconnects later
    flip    a bit of its sharded state flips
    err     its next update of sharded state is wrong
    orphan  the coordinator dies, whatever `worker` is; later a new one takes over from the workers' reports
    """

    at: int
    kind: str
    worker: Worker


@dataclass
class Network:
    """The network between the processes of one start of the job. A restart uses new addresses."""

    wires: dict[tuple[int, Worker, Worker, Any], Any] = field(default_factory=dict)  # (generation, from, to, key)
    published: set[tuple[int, Worker]] = field(default_factory=set)  # workers that listen, by mesh
    cuts: set[tuple[int, Worker, Worker]] = field(default_factory=set)  # connections of a mesh that broke
    graves: set[tuple[int, Worker]] = field(default_factory=set)  # members of a mesh that are dead

    def broken(self, mesh: int, me: Worker, other: Worker) -> bool:
        """Whether this connection is broken."""
        return (mesh, me, other) in self.cuts or (mesh, other) in self.graves


class World:
    def __init__(
        self,
        pipelines: int,
        stages: int,
        microbatches: int,
        steps: int = 2,
        stagger: bool = False,
        evaluate_every: int = 0,
        save_every: int = 0,
        clipped: frozenset[int] = frozenset(),
        misfits: frozenset[tuple[int, int]] = frozenset(),
        copies: int = 0,
        third: bool = False,
        seed: int = 0,
    ) -> None:
        """seed: of the lost messages."""
        self.problem = Problem(pipelines=pipelines, stages=stages, microbatches=microbatches)
        self.stages, self.steps, self.clipped = stages, steps, clipped
        self.misfits = misfits  # (step, attempt) whose sums do not fit
        self.copies = copies  # of each block of sharded state; 0: all workers hold all blocks
        self.third = third  # a worker with a wrong copy is killed
        self.flips = 0  # flipped bits and wrong updates so far
        self.mismatches: list[Worker] = []  # detected workers
        self.found_at = -1  # event that detected the last one
        self.excused = False  # a wrong worker died before its vote, so its messages count
        self.stopped = False  # it was unknown which worker was wrong
        self.stagger, self.evaluate_every, self.save_every = stagger, evaluate_every, save_every
        self.per_pass, self.held_out = 1, pipelines + 1  # of a validation: two passes, the second with one micro-batch
        self.evaluated: list[int] = []  # steps whose validation is complete
        self.saved = 0  # completed steps in the newest checkpoint
        self.restores = 0
        self.lost: int | None = None  # the lost stage that ended the job
        self.events = 0
        self._history: list[tuple[Any, ...]] = []
        self._rng = random.Random(seed)
        self._roles = dict(enumerate(Worker(d, s) for d in range(pipelines) for s in range(stages)))
        self._ranks = {worker: rank for rank, worker in self._roles.items()}  # rank of each process, by its first role
        self._alive: dict[int, Node] = {}  # rank -> process, until its death is noticed
        self._actors: list[Node] = []  # all processes that act, also removed ones
        self._noticing: deque[Node] = deque()  # dead, not noticed yet
        self._mending: deque[int] = deque()  # generations in which a link broke
        self.headless = False  # the coordinator is dead, without a successor so far
        self.takeovers = 0
        self.speculations = self.taken_back = 0  # steps applied early, and those undone
        self._begin(0, range(len(self._roles)))

    # -- running -----------------------------------------------------------------------------------------------

    def run(self, choose: Chooser, faults: Sequence[Fault] = (), limit: int = 100_000) -> World:
        """Runs until the job is finished, or cannot continue (`lost`)."""
        ahead = deque(sorted(faults))
        try:
            while not self._over():
                while ahead and ahead[0].at <= self.events:
                    self._befall(ahead.popleft())
                self._advance(choose)
                if self.events > limit:
                    self.fail("no end in sight")
        except Violation:
            raise
        except Exception as error:
            self.fail(repr(error), error)
        if self.lost is None and not self.stopped:
            self._check_end()
        return self

    def _advance(self, choose: Chooser) -> None:
        options = self._options()
        if not options:
            live = ", ".join(map(str, sorted(self.job.live)))
            self.fail(f"nothing can happen any more ({self.job.phase}, step {self.job.committed + 1}, live {live})")
        who, what = option = options[choose(options)]
        self._history.append(option)
        self.events += 1
        self._happen(who, what)

    def fail(self, what: str, cause: BaseException | None = None) -> None:
        story = "\n".join(" ".join(map(str, entry)) for entry in self._history[-150:])
        raise Violation(f"{what}; the last events (number of the process, what it does):\n{story}") from cause

    def _over(self) -> bool:
        return self.stopped or self.lost is not None or (self.job.phase == "finished" and not self.saving.busy)

    def _check_end(self) -> None:
        if self.job.committed != self.steps - 1:
            self.fail(f"finished after step {self.job.committed} of {self.steps}")
        for node in self._alive.values():
            if node.alive and node.me.worker in self.job.live and node.me.applied != self.steps - 1:
                self.fail(f"{node.me.worker} ends with the parameters after step {node.me.applied}")
        if self.save_every and self.saved != self.steps:
            self.fail(f"the newest checkpoint holds {self.saved} steps of {self.steps}")

    def _options(self) -> list[Option]:
        """The possible next events. Those of a process change only if it is `stale`."""
        found: list[Option] = []
        for node in self._actors:
            if node.stale:
                node.stale = False
                node.options = [(node.number, what) for what in node.can()]
            found += node.options
        if self.headless:
            return [*(option for option in found if option[1] != "is heard"), (COORDINATOR, "takes over")]
        if self._noticing:
            found.append((COORDINATOR, "notices a death"))
        if self._mending:
            found.append((COORDINATOR, "mends"))
        if self.job.phase == "holding":
            found.append((COORDINATOR, "waits no longer"))
        if self._planned is not None:
            found.append((COORDINATOR, "has planned"))
        elif self.job.wants_plan:
            found.append((COORDINATOR, "plans"))
        if self._stage_lost is not None:
            found.append((COORDINATOR, "restores"))
        return found

    def check_parts(self, message: Assemble) -> bool:
        """Whether a checkpoint of sharded state has every block. A part outlives its writer. Only dead workers may have
        taken blocks with them."""
        if self.copies:
            for stage in range(self.stages):
                of = [n for n in self._actors if str(n.me.worker) in message.parts and n.me.worker.stage == stage]
                parts = [node.parts.get(message.step, {}) for node in of]
                if gone := lacking(parts):
                    if held := [node for node in of if node.alive and gone & node.shards.state.keys()]:
                        self.fail(f"the checkpoint of {message.step} steps lacks blocks {gone} that {held} have")
                    return False
                if not all(right for part in parts for right in part.values()):
                    self.deceived(f"the checkpoint of {message.step} steps has wrong blocks {parts} of stage {stage}")
        return True

    def deceived(self, what: str) -> None:
        """A wrong value was accepted."""
        if not self.excused:
            self.fail(what)

    def node(self, number: int) -> Node:
        return self._actors[number]

    def touch(self, worker: Worker | None = None) -> None:
        """Marks the process in this role, or all processes, as stale."""
        for node in self._actors:
            if worker is None or node.me.worker == worker:
                node.stale = True

    def _happen(self, who: int, what: str) -> None:
        if who != COORDINATOR:
            node = self._actors[who]
            node.stale = True
            if what == "is heard":
                self._hear(node, node.outbox.popleft())
            else:
                node.act(what)
        elif what == "mends":
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
            self._drive(HoldExpired(self.job.committed))
        elif what == "restores":
            self._restore()
        else:
            self._dead(self._noticing.popleft())

    # -- the coordinator ---------------------------------------------------------------------------------------

    def _begin(self, first_step: int, ranks: Sequence[int], generation: int = -1) -> None:
        self._new_job(first_step, ranks, generation)
        self.network = Network()
        for rank in ranks:
            self._spawn(rank)

    def _new_job(self, first_step: int, ranks: Sequence[int], generation: int) -> None:
        waiting = {self._roles[rank] for rank in ranks}
        self.fresh_job = partial(
            Job, self.problem, steps=self.steps, planner=plan_simply, derive=actions, clip=1.0, stagger=self.stagger,
            copies=self.copies, third=self.third,
            first_step=first_step, evaluate_every=self.evaluate_every, save_every=self.save_every,
            generation=generation, waiting=waiting,
        )  # fmt: skip
        self.job = self.fresh_job()
        self.saving = Saving(NOWHERE)
        self.log: list[tuple[Event, Outcome]] = []  # of this job
        self._planned: Problem | None = None
        self._stage_lost: int | None = None

    def _spawn(self, rank: int) -> None:
        node = self._alive[rank] = Node(self, len(self._actors), self._roles[rank], self.job.first_step)
        self._actors.append(node)

    def _hear(self, node: Node, message: Message) -> None:
        if node not in self._alive.values():
            return  # removed, so its generation is void
        worker = node.me.worker
        if is_lasting(message):
            node.said[type(message)] = message
        match message:
            case Ready():
                if worker not in self.job.live:
                    self._drive(WorkerReady(worker))
            case Leaving():
                self._drive(WorkerEvicted(worker))
            case Broken():
                self._mending.append(message.generation)
            case SaveFailed():
                self.saving.save_failed(message, worker)
                # with a block lost, the next generation restarts from the previous checkpoint
                self.stopped = self.stopped or (self.saving.failed and message.detail != LACKING)
            case Saved():
                self._send(self.saving.saved(worker, message))
            case Digests():
                self._send(self.saving.compared(worker, message))
                self._judge()
            case Assembling():
                self.saving.assembling(worker, message)
            case Assembled():
                self.saving.assembled(message)
                self.saved = max(self.saved, message.step)
            case State():
                for repeated in message.said:
                    self._hear(node, repeated)
                self._drive(WorkerReturned(worker, message.committed))
                self._send(self.saving.returned(worker))
            case _:
                self._drive(MessageReceived(worker, message))

    def _drive(self, event: Event) -> None:
        outcome = self.job.handle(event)
        self.log.append((event, outcome))
        self._send(outcome.sends)
        for note in outcome.notes:
            self._follow(note)

    def _follow(self, note: dict[str, Any]) -> None:
        if note["event"] == "stage_lost":
            if self._stage_lost is not None:
                self.fail(f"stage {note['stage']} is lost twice")
            self._stage_lost = note["stage"]
        elif note["event"] == "violation":
            if not self.flips:
                self.fail(note["detail"])
            self.stopped = True
        elif note["event"] == "committed" and note["commit"].savers and self.save_every:
            commit = note["commit"]
            self.saving.begin(commit.step + 1, commit.savers, commit.last, self.job.live)
        elif note["event"] == "evaluated":
            if note["microbatches"] != self.held_out or note["val_loss"] != (2**self.held_out - 1) / self.held_out:
                self.fail(f"the validation after step {note['step']} is not of all held-out micro-batches: {note}")
            self.evaluated.append(note["step"])
        elif note["event"] == "mismatch":
            self.mismatches.append(note["worker"])
            self.found_at = self.events
            if self.saving.step == self.job.committed + 1:
                self.saving.abandon()
        elif note["event"] == "untrusted":
            rank, node = next((r, n) for r, n in self._alive.items() if n.me.worker == note["worker"])
            if not node.shards.wrong:
                self.fail(f"{node.me.worker} is killed, and nothing is wrong with it")
            self._kill(node)
            self._dead(node)
            self._spawn(rank)

    def _judge(self) -> None:
        if self.saving.replicas.verdict() is not None and not self.stopped:
            self.stopped = not self.third or self.saving.final
            self.saving.abandon()

    def _send(self, out: list[Send]) -> None:
        nodes = {node.me.worker: node for node in self._alive.values()}
        for to, message in out:
            if to in nodes and not nodes[to].cut_off:
                if isinstance(message, Donate):
                    joiner = nodes.get(message.to)
                    message = msgspec.structs.replace(message, address=joiner and ("node", joiner.number))
                nodes[to].inbox.append(message)
                nodes[to].stale = True

    def _dead(self, node: Node) -> None:
        rank = next((r for r, n in self._alive.items() if n is node), None)
        if rank is None:
            return
        del self._alive[rank]
        self._drive(WorkerDied(node.me.worker))
        self._send(self.saving.died(node.me.worker, self.job.live))
        self._judge()

    def _restore(self) -> None:
        """Mirrors the coordinator when a stage is lost."""
        present = sorted(self._alive)
        again = self.restores and self.saved == self._restored_from
        if (self.job.started and not self.saved) or again or len(present) < self.stages:
            self.lost = self._stage_lost
        else:
            self._roles = fill_stages(self._roles, present, self.stages)
            self.restores, self._restored_from = self.restores + 1, self.saved
            self._alive.clear()  # the old processes act a little longer, and their messages are ignored
            self._begin(self.saved, present, self.job.generation)

    # -- another coordinator -----------------------------------------------------------------------------------

    def _orphan(self) -> None:
        """The coordinator dies. A part of its messages arrives. Deaths that it has not noticed stay unnoticed."""
        self.headless, self._stage_lost = True, None
        self._mending.clear()
        for node in self._actors:
            for _ in range(self._rng.randrange(len(node.inbox) + 1)):
                node.inbox.pop()
        self.touch()

    def _take_over(self) -> None:
        """Mirrors coordinator/successor.py."""
        self.headless, self.takeovers = False, self.takeovers + 1
        self._noticing.clear()
        self._alive = {rank: node for rank, node in self._alive.items() if node.alive}
        for node in self._alive.values():
            while node.inbox:
                node.act("hears")
            node.said |= node.unheard | {type(message): message for message in node.outbox if is_lasting(message)}
            node.outbox.clear()
            node.unheard.clear()
            node.cut_off = False
        found = find({node.me.worker: node.me.state(node.linked) for node in self._alive.values()})
        first_step = max((node.me.committed for node in self._alive.values()), default=self.job.committed) + 1
        self._new_job(first_step, list(self._roles), found.generation)
        if not found.begun:
            for rank in self._roles.keys() - self._alive.keys():
                self._drive(WorkerDied(self._roles[rank]))
        else:
            savers = found.commit.savers if found.commit else []
            if savers and self.save_every and self.saved != found.committed + 1:
                last = found.committed == self.steps - 1
                self.saving.begin(found.committed + 1, savers, last, found.told)
            self._drive(CoordinatorReplaced(found))
            for rank, node in list(self._alive.items()):
                if node.me.worker not in found.live:
                    self._kill(node)
                    self._noticing.pop()
                    self._spawn(rank)
        for node in list(self._alive.values()):
            for message in [message for message in node.saves if isinstance(message, Assembled)][:1]:
                self.saving.assembling(node.me.worker, Assembling(message.step))
        said = [(node, message) for node in self._alive.values() for message in node.said.values()]
        for node, message in sorted(said, key=lambda each: not isinstance(each[1], Assembling | Assembled)):
            self._hear(node, message)
        self._send(self.saving.only(self.job.live))
        self.touch()

    # -- faults ------------------------------------------------------------------------------------------------

    def _befall(self, fault: Fault) -> None:
        rank = self._ranks[fault.worker]
        node = self._alive.get(rank)
        self._history.append(("      ", *fault))
        if fault.kind == "orphan":
            if not self.headless and not self._over():
                self._orphan()
        elif fault.kind == "revive":
            if node is None and not self.headless and self._stage_lost is None:
                self._spawn(rank)
        elif node is None or not node.alive:
            return
        elif fault.kind in ("flip", "err"):
            self.flips += 1
            if fault.kind == "flip":
                node.shards.flip(self.flips, self.events % len(BLOCKS))
            else:
                node.shards.miscomputes = self.flips
        elif fault.kind == "kill":
            self.excused = self.excused or bool(node.shards and node.shards.tainted)
            self._kill(node)
        elif fault.kind == "lose":
            if not self.headless:
                self.excused = self.excused or bool(node.shards and node.shards.tainted)
                self._dead(node)
        elif fault.kind == "reset":
            if not self.headless:
                self._reset(node)
        elif fault.kind == "leave":
            node.outbox.append(Leaving())
            node.stale = True
        else:
            others = [n.me.worker for n in self._alive.values() if n is not node]
            if others:
                self._cut(node, self._rng.choice(others))

    def _reset(self, node: Node) -> None:
        """Only a member may reconnect; another worker is replaced."""
        if node.me.worker in self.job.live:
            node.reset()
        else:
            self._dead(node)

    def _kill(self, node: Node) -> None:
        """Kills a process. A part of its messages arrives, a different one on each connection."""
        me = node.me.worker
        node.alive = False
        node.network.graves.add((node.mesh, me))
        keep, wires = self._rng.random(), node.network.wires
        for wire in [w for w in wires if w[1] == me and w[0] == node.me.generation]:
            if self._rng.random() > keep:
                del wires[wire]
        for _ in range(self._rng.randrange(len(node.outbox) + 1)):
            node.outbox.pop()
        self.touch()
        self._noticing.append(node)

    def gone(self, node: Node) -> None:
        """A process has ended by itself, as ordered."""
        node.alive = False
        node.network.graves.add((node.mesh, node.me.worker))
        self.touch()
        self._noticing.append(node)

    def _cut(self, node: Node, other: Worker) -> None:
        me, wires = node.me.worker, node.network.wires
        node.network.cuts |= {(node.mesh, me, other), (node.mesh, other, me)}
        for wire in [w for w in wires if {w[1], w[2]} == {me, other} and w[0] == node.me.generation]:
            if self._rng.random() < 0.5:
                del wires[wire]
        self.touch()
