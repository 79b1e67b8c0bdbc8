"""A deterministic world for the recovery protocol: real `Job`, `Saving` and `Participant`s, the rest simulated.

    world = World(pipelines=2, stages=2, microbatches=2, steps=2)
    world.run(in_turn())                                     # all processes act in turn
    world.run(in_turn(), [Fault(17, "kill", Worker(0, 1))])  # the same, with a death at event 17

The world simulates the supervisors, the network and the clock. `coordinator.Coordinator` simulates the coordinator,
`node.Node` a worker. The chooser selects the next event among all messages that may arrive and all processes that may
act. So messages are delayed and overtake each other (except on one connection, as with TCP), timers fire at any time,
and only some of a dead process's messages arrive.

Every run checks the contracts: an op uses the parameters of its step; no survivor runs an op twice; peers that save or
validate are in the same state; and until the end at least one event is possible. At every commit each layer of each
micro-batch has been computed exactly once, and every block has all its holders. A violation raises `Violation` with the
events that led to it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from recycle_schedules import Problem, Worker

from recycle_pp.protocol.assignment import initial
from recycle_pp.wire.messages.lifecycle import Leaving
from recycle_pp.wire.messages.saving import Assemble
from recycle_pp.wire.messages.units import Layout

from .coordinator import COORDINATOR, Coordinator, Option
from .node import Node
from .sharded import WRONG, blocks_of

Chooser = Callable[[Sequence[Option]], int]
LAYERS = 2  # layers of a stage at the start


class Violation(AssertionError):
    pass


class Fault(NamedTuple):
    """At event `at`, `kind` happens to the process that was started as `worker`.

    kill    it dies; messages that it has sent may be lost
    lose    it is removed although it lives: it keeps working, and its messages are ignored
    revive  if it is dead, a new process replaces it
    leave   it gets SIGTERM
    cut     its connection to another worker breaks
    reset   its connection to the coordinator breaks; it reconnects later
    flip    a bit of its sharded state flips
    err     its next update of sharded state is wrong
    orphan  the coordinator dies, whatever `worker` is; later a new one takes over from the workers' reports
    move    no fault: the stages should have these numbers of `layers`
    set     no fault: a user sets checkpoint.every to layers[0]
    """

    at: int
    kind: str
    worker: Worker
    layers: tuple[int, ...] = ()


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
        understudy: bool = False,
        shuffled: bool = False,
        patience: int | None = 0,
        seed: int = 0,
    ) -> None:
        """
        shuffled  whether members play random workers
        patience  events for which the job waits for followers, unless nothing else can happen; None: forever
        seed      selects the messages that are lost in a death
        """
        self.patience = patience
        self.problem = Problem(pipelines=pipelines, stages=stages, microbatches=microbatches)
        self._problems: dict[tuple[int, ...], Problem] = {}  # by number of layers of each stage
        self.layout = layout_of([LAYERS] * stages)  # at the start
        self.stages, self.steps, self.clipped = stages, steps, clipped
        self.misfits = misfits  # (step, attempt) whose sums do not fit
        self.copies = copies  # copies of each block of sharded state; 0: all workers hold all blocks
        self.understudy = understudy  # a stage with one live worker gets one
        self.third = third  # a worker with a wrong copy is killed
        self.flips = 0  # flipped bits and wrong updates so far
        self.excused = False  # whether a wrong value could not be detected, as its worker died before the vote
        self.stagger, self.evaluate_every, self.save_every = stagger, evaluate_every, save_every
        self.per_pass, self.held_out = 1, pipelines + 1  # a validation has two passes, the second with one micro-batch
        self.events = 0
        self._history: list[tuple[Any, ...]] = []
        self.rng = random.Random(seed)
        workers = list(initial(pipelines, stages).values())
        self.assignment = dict(enumerate(self.rng.sample(workers, len(workers)) if shuffled else workers))
        self.actors: list[Node] = []  # all processes that act, including removed ones
        self.speculations = self.taken_back = 0  # steps applied early, and those rolled back
        self.coordinator = Coordinator(self)
        self.coordinator.begin()
        self._ranks = {worker: member for member, worker in self.coordinator.job.assignment.items()}  # at the start

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
                    self.fail(f"not finished after {limit} events")
        except Violation:
            raise
        except Exception as error:
            self.fail(repr(error), error)
        if self.coordinator.lost is None and not self.coordinator.stopped:
            self._check_end()
        return self

    def _advance(self, choose: Chooser) -> None:
        options = self._options()
        if not options:
            job = self.coordinator.job
            live = ", ".join(map(str, sorted(job.live)))
            self.fail(f"deadlock: no event is possible ({job.phase}, step {job.committed + 1}, live {live})")
        who, what = option = options[choose(options)]
        self._history.append(option)
        self.events += 1
        self._happen(who, what)

    def fail(self, what: str, cause: BaseException | None = None) -> None:
        story = "\n".join(" ".join(map(str, entry)) for entry in self._history[-150:])
        raise Violation(f"{what}; the last events (process number, action):\n{story}") from cause

    def _over(self) -> bool:
        coordinator = self.coordinator
        return (
            coordinator.stopped
            or coordinator.lost is not None
            or (coordinator.job.phase == "finished" and not coordinator.saving.busy)
        )

    def _check_end(self) -> None:
        coordinator = self.coordinator
        if coordinator.job.committed != self.steps - 1:
            self.fail(f"finished after step {coordinator.job.committed} of {self.steps}")
        for node in coordinator.alive.values():
            if node.alive and node.me.member in coordinator.job.live and node.me.applied != self.steps - 1:
                self.fail(f"{node.me.worker} ends with the parameters after step {node.me.applied}")
        if self.save_every and coordinator.saved != self.steps:
            self.fail(f"the newest checkpoint is of {coordinator.saved} steps, not of {self.steps}")

    def _options(self) -> list[Option]:
        """The possible next events. Those of a process are computed again only if it is `stale`."""
        found: list[Option] = []
        for node in self.actors:
            if node.stale:
                node.stale = False
                node.options = [(node.number, what) for what in node.can()]
            found += node.options
        return self.coordinator.options(found)

    def check_parts(self, message: Assemble) -> bool:
        """Whether a checkpoint has every block. Fails if a live worker holds a missing block, or if a block is wrong.

        The part of a checkpoint outlives the worker that wrote it.
        """
        of = [node for node in self.actors if str(node.me.worker) in message.parts]
        parts = [node.parts.get(message.step, {}) for node in of]
        if gone := set(blocks_of(range(LAYERS * self.stages))).difference(*parts):
            # A process that was removed although it lives has older state.
            if held := [node for node in of if node.alive and gone & node.shards.after(message.step - 1)]:
                self.fail(f"the checkpoint of {message.step} steps lacks blocks {gone} that {held} have")
            return False
        if not all(right for part in parts for right in part.values()):
            self.deceived(f"the checkpoint of {message.step} steps has wrong blocks {parts}")
        return True

    def check_commit(self, voters: Sequence[Node]) -> None:
        """Checks a step that has just been committed, by the state of all voters."""
        job, computed = self.coordinator.job, Counter()
        step = job.committed
        for stage, layers in job.units.layout.items():
            peers = [node for node in voters if node.me.worker.stage == stage]
            if any(node.layers != layers for node in peers):
                self.fail(f"stage {stage} has layers {layers}, but its workers have {[node.layers for node in peers]}")
            computed.update(peers[0].reduced[step])
            if any(node.reduced[step] != peers[0].reduced[step] for node in peers):
                self.fail(f"workers {peers} have different sums in step {step}")
            holders = Counter(block for node in peers for block in node.shards.state)
            for block in blocks_of(layers):
                if holders[block] < min(self.copies or len(peers), len(peers)):
                    self.fail(f"block {block} has {holders[block]} holders of {len(peers)} workers after step {step}")
        once = {(layer, mb): 1 for layer in range(LAYERS * self.stages) for mb in self.problem.microbatch_keys()}
        computed.pop(WRONG, None)
        if computed != once:
            self.fail(f"in step {step}, gradients are not counted once per (layer, micro-batch): {computed}")

    def problem_of(self, layout: Layout) -> Problem:
        """The planning problem of this layout: the time of a stage is its number of layers."""
        counts = tuple(len(layout[stage]) for stage in range(self.stages))
        if counts not in self._problems:
            self._problems[counts] = self.problem.replace(durations={"F": [*counts]})
        return self._problems[counts]

    def deceived(self, what: str) -> None:
        """Called when a wrong value was accepted. Fails, unless it could not be detected."""
        if not self.excused:
            self.fail(what)

    def node(self, number: int) -> Node:
        return self.actors[number]

    def touch(self, member: int | None = None) -> None:
        """Marks the processes of this member, or of all members, as stale."""
        for node in self.actors:
            if member is None or node.me.member == member:
                node.stale = True

    def _happen(self, who: int, what: str) -> None:
        if who != COORDINATOR:
            node = self.actors[who]
            node.stale = True
            if what == "delivers":
                self.coordinator.handle(node, node.outbox.popleft())
            else:
                node.act(what)
        else:
            self.coordinator.act(what)

    # -- faults ------------------------------------------------------------------------------------------------

    def _befall(self, fault: Fault) -> None:
        coordinator = self.coordinator
        rank = self._ranks[fault.worker]
        node = coordinator.alive.get(rank)
        self._history.append(("      ", *fault))
        if fault.kind == "orphan":
            if not coordinator.headless and not self._over():
                coordinator.orphan()
        elif fault.kind == "move":
            if not coordinator.headless:
                coordinator.want(layout_of(fault.layers))
        elif fault.kind == "set":
            if not coordinator.headless:
                coordinator.change({"checkpoint.every": fault.layers[0]})
        elif fault.kind == "revive":
            if node is None and not coordinator.headless and coordinator.stage_lost is None:
                coordinator.spawn(rank)
        elif node is None or not node.alive:
            return
        elif fault.kind in ("flip", "err"):
            self.flips += 1
            if fault.kind == "flip":
                node.shards.flip(self.flips, self.events)
            else:
                node.shards.miscomputes = self.flips
        elif fault.kind == "kill":
            self.excused = self.excused or bool(node.shards.tainted)
            self.kill(node)
        elif fault.kind == "lose":
            if not coordinator.headless:
                self.excused = self.excused or bool(node.shards.tainted)
                coordinator.dead(node)
        elif fault.kind == "reset":
            if not coordinator.headless:
                self._reset(node)
        elif fault.kind == "sever":
            for donor in coordinator.alive.values():
                donor.break_streams(None if donor is node else node.me.member)
        elif fault.kind == "leave":
            node.outbox.append(Leaving())
            node.stale = True
        else:
            others = [n.me.member for n in coordinator.alive.values() if n is not node]
            if others:
                self._cut(node, self.rng.choice(others))

    def _reset(self, node: Node) -> None:
        """Resets a worker's connection to the coordinator. Only a member may reconnect; other workers are replaced."""
        if node.me.member in self.coordinator.job.live:
            node.reset()
        else:
            self.coordinator.dead(node)

    def kill(self, node: Node) -> None:
        """Kills a process. A random part of its messages arrives, a different one on each connection."""
        me = node.me.member
        node.alive = False
        node.network.graves.add((node.mesh, me))
        keep, wires = self.rng.random(), node.network.wires
        for wire in [w for w in wires if w[1] == me and w[0] == node.me.generation]:
            if self.rng.random() > keep:
                del wires[wire]
        for _ in range(self.rng.randrange(len(node.outbox) + 1)):
            node.outbox.pop()
        self.touch()
        self.coordinator.noticing.append(node)

    def gone(self, node: Node) -> None:
        """Called when a process has ended by itself, as ordered."""
        node.alive = False
        node.network.graves.add((node.mesh, node.me.member))
        self.touch()
        self.coordinator.noticing.append(node)

    def _cut(self, node: Node, other: int) -> None:
        me, wires = node.me.member, node.network.wires
        node.network.cuts |= {(node.mesh, me, other), (node.mesh, other, me)}
        for wire in [w for w in wires if {w[1], w[2]} == {me, other} and w[0] == node.me.generation]:
            if self.rng.random() < 0.5:
                del wires[wire]
        self.touch()


def layout_of(counts: Sequence[int]) -> Layout:
    """The layout in which the stages have these numbers of layers."""
    ends = list(accumulate(counts))
    return {stage: list(range(end - n, end)) for stage, (n, end) in enumerate(zip(counts, ends, strict=True))}
