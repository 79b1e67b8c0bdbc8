"""A worker of the simulated world. Counters and version numbers stand for the tensors of a real worker.

Its program mirrors the executor, line by line, as a generator. It yields None wherever other events may happen, or a
condition to wait for. The control thread (`act("receives")`), and the threads that build links, write checkpoints and
receive state on a returning worker are separate actions.

This file is longer than others because all of these share the state of one worker, as in a real process.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs
from recycle_schedules import Action, OpKind, Tensor, TensorKind, Worker
from recycle_schedules.ops import input_of, output_of

from recycle_pp.protocol.ballot import make_vote
from recycle_pp.protocol.holdings import NOTHING, Holdings
from recycle_pp.protocol.participant import Orders, Participant
from recycle_pp.protocol.understudy import Understudy
from recycle_pp.protocol.validation import numbered
from recycle_pp.wire.messages.generations import Adopt, Announce, Broken, SteadyPlan
from recycle_pp.wire.messages.lifecycle import Donate, Expect, Leave, Prepared, Ready, StreamLost, Synced
from recycle_pp.wire.messages.saving import Assemble, Assembled, Assembling, Digests, Finished, Save, Saved, SaveFailed
from recycle_pp.wire.messages.steps import Commit, Evaluated
from recycle_pp.wire.messages.table import Message, is_lasting
from recycle_pp.wire.messages.units import UnitId, unpacked

from .sharded import LACKING, WRONG, Shards, Sums, blocks_of, described

if TYPE_CHECKING:
    from .world import World

Program = Generator[Callable[[], bool] | None, None, None]


class Void(Exception):
    """Raised by the program when its orders are no longer valid."""


Parcel = dict[UnitId, tuple[int, int | None]] | tuple[int, Sums] | None


class Stream(NamedTuple):
    """A stream from a donor to a joiner: the state of some units after a step, then the gradients of every later step.

    Parcels are (step, content). The content is the state that the donor's shards have `given`; None, for a gradient
    sent after its commit; or (generation, sums), for a gradient sent before its commit."""

    to: int
    message: Donate
    parcels: deque[tuple[int, Parcel]]


class Boundary(NamedTuple):
    """A tensor between two stages. wrong: it derives from a wrong block. layer: the last layer before the boundary."""

    step: int
    wrong: bool
    layer: int


class Node:
    def __init__(
        self, world: World, number: int, member: int, worker: Worker, first_step: int, layers: Collection[int]
    ) -> None:
        self.world, self.number, self.me = world, number, Participant(member, worker)
        self.role = worker  # the worker that its executor plays; `me.worker` is newer for a moment after an adoption
        self.alive = self.stale = True
        self.options: list[tuple[int, str]] = []
        self.me.committed = self.me.applied = first_step - 1
        self.layers = list(layers)
        self._described = set(layers)  # layers in its newest `Ready`
        self.shards, self.arriving = Shards(self, layers, first_step - 1), Shards(self, (), -1)
        self.me.holdings = Holdings(member, blocks_of(layers), first_step - 1)
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque([Ready(("node", number), "simulated", units=described(layers))])
        self.cut_off = False  # its connection to the coordinator was reset
        self.lost_messages: dict[type[Message], Message] = {}  # lasting messages that were lost in the reset
        self.network = world.network
        self.mesh = -1  # generation that made its connections
        self.said: dict[type[Message], Message] = {}  # lasting messages that are repeated to a new coordinator
        self.saves: deque[Message] = deque()  # checkpoint parts to write, then checkpoints to assemble
        self._streams: list[Stream] = []  # from its donors
        self._have: dict[UnitId, int] = {}  # unit -> newest step, in the current session
        self._session = -1  # the newest session
        self._following = False  # whether it follows units in that session
        self.standing_in = Shards(self, (), NOTHING)  # the state of another stage, if it is an understudy
        self._early: dict[int, Sums] = {}  # step -> newest gradient of that stage
        # progress of `standing_in`; the same object as `me.understudy` until this worker takes the role on
        self._heir: Understudy | None = None
        self._sent_early = -1, -1  # step and generation of the newest gradient sent before its vote
        # messages held back after a role is announced, until this worker takes the role on
        self._deferred: list[Message] = []
        self._linking: Announce | None = None  # the generation whose links it builds
        self._linked = -1
        self._asked: list[Donate] = []  # joiners that wait for this worker's state
        self._fed: list[Stream] = []  # to joiners
        # completed steps -> block of sharded state in its part of that checkpoint -> whether the block is right
        self.parts: dict[int, dict[UnitId, bool]] = {}
        self._left = False
        self._done, self._wanted = first_step, -1  # steps in the parameters; steps in a requested checkpoint
        self._answer: Message | None = None  # answer to that request, once it is known
        self._log: dict[tuple[int, Tensor], Boundary] = {}
        self._received: dict[tuple[int, Tensor], Boundary] = {}
        self._sums: Sums = Counter()
        self.reduced: dict[int, Sums] = {}
        self._reductions = 0  # collectives in this generation
        self._ran: set[tuple[int, str, Any]] = set()
        self._blocked: Callable[[], bool] | None = None
        self._program = self._run()

    # -- what can happen ---------------------------------------------------------------------------------------

    def can(self) -> Iterator[str]:
        """The possible next events of this process. Messages of a dead worker still arrive."""
        if self.outbox and not self.cut_off:
            yield "delivers"
        if self.alive:
            if self.cut_off:
                yield "reconnects"
            if self.inbox:
                yield "receives"
            if self._blocked is None or self._blocked():
                yield "runs"
            if self._linking and all((self.mesh, member) in self.network.published for member in self._members):
                yield "links"
            if self.saves:
                yield "saves"
            for number, stream in enumerate(self._streams):
                if stream.parcels and stream.message.session <= self._session:
                    yield f"takes {number}"

    @property
    def linked(self) -> bool:
        return self._linked == self.me.generation

    def act(self, what: str) -> None:
        if what == "runs":
            self._blocked = next(self._program)
        elif what == "receives":
            self._handle(self.inbox.popleft())
        elif what == "links":
            assert self._linking is not None
            self._linked, self._linking = self._linking.generation, None
        elif what == "reconnects":
            self.cut_off = False
            self._lose()
            said = list(self.lost_messages.values())
            self.outbox.append(structs.replace(self.me.state(self.linked), said=said))
            self.lost_messages.clear()
        elif what == "saves":
            saved = self.saves.popleft()
            if isinstance(saved, SaveFailed) or (isinstance(saved, Saved) and saved.whole):
                self._answer = saved
            self.outbox.append(saved)
        else:
            stream = self._streams[int(what.removeprefix("takes "))]
            self._take(stream.message, *stream.parcels.popleft())

    def break_streams(self, to: int | None) -> None:
        """Breaks the streams to this member. None: to all followers. The members at both ends report it."""
        for stream in [stream for stream in self._fed if to in (None, stream.to)]:
            self._fed.remove(stream)
            stream.parcels.clear()
            for node in self.world.coordinator.alive.values():
                if node.alive and node.me.member in (self.me.member, stream.to):
                    node.outbox.append(StreamLost(stream.message.session))
        self.world.touch()

    def reset(self) -> None:
        """Breaks the connection to the coordinator. All messages in flight are lost, in both directions."""
        self.cut_off = self.stale = True
        self.inbox.clear()
        self._lose()

    def _lose(self) -> None:
        self.lost_messages |= {type(message): message for message in self.outbox if is_lasting(message)}
        self.outbox.clear()

    def _handle(self, message: Message) -> None:
        me = self.me
        if me.role != self.role and isinstance(message, Expect | Donate | Save | Assemble):
            self._deferred.append(message)
            return
        match message:
            case Announce():
                self._following = self._following and me.generation >= 0
                self.outbox.append(me.announce(message))
                self._handle_deferred()
                self._linking, self._linked, self._reductions = message, -1, 0
                self._members = message.members
                self.mesh = message.base
                if (self.mesh, me.member) not in self.network.published:
                    self.network.published.add((self.mesh, me.member))
                    self.world.touch()
            case Adopt():
                for step in me.adopt(message):
                    self.outbox.append(SaveFailed(step, "it plays another worker now"))
            case SteadyPlan():
                me.plan(message)
            case Commit():
                me.commit(message)
            case Expect():
                self._session, self._have, self._following = message.session, {}, True
                if me.generation < 0:  # a joiner
                    self._relayout(message.layers)
                    self.shards.forget()
                else:
                    own, other = ((), message.layers) if message.worker else (message.layers, ())
                    self.arriving, self.standing_in = Shards(self, own, NOTHING), Shards(self, other, NOTHING)
                    me.followed(NOTHING, ())
                    me.understudy = self._heir = message.worker and Understudy(
                        message.worker, message.session, blocks_of(other)
                    )
                    self._early.clear()
                    self._describe(other)
            case Donate():
                if message.address is not None:  # otherwise the joiner has died in the meantime
                    self._asked.append(message)
            case Save() if message.step == self._wanted:
                if self._answer is not None:  # repeated after a reset, or by another coordinator
                    self.outbox.append(self._answer)
            case Save():
                self._wanted, self._answer = message.step, None
                if self._done >= self._wanted and self.shards.seen:
                    self.saves.append(SaveFailed(self._wanted, "its state has changed"))
                elif self._done >= self._wanted:
                    self._save(self._wanted, whole=True)
            case Assemble():
                self.outbox.append(Assembling(message.step))
                whole = self.world.check_parts(message)
                self.saves.append(Assembled(message.step) if whole else SaveFailed(message.step, LACKING))
            case Leave():
                self._left = True

    # -- the executor ------------------------------------------------------------------------------------------

    def _run(self) -> Program:
        me = self.me
        while True:
            if me.worker != self.role:
                self._play(me.worker)
            yield from self._settle()
            yield lambda: self._left or bool(me.commits) or me.undo or me.again or self._ready()
            if self._left:
                self.world.gone(self)
                yield lambda: False
            if me.worker != self.role or me.commits or me.undo or me.again or me.orders is None:
                continue
            with suppress(Void):
                yield from self._follow(me.orders)

    def _ready(self) -> bool:
        return self.me.orders is not None and self._linked == self.me.generation

    def _follow(self, orders: Orders) -> Program:
        me = self.me
        if orders.layers != self.layers:
            self._following = False
            self._relayout(orders.layers)
        self._describe(self.layers)
        yield from self.shards.begin(orders)
        if orders.evaluate is not None:
            yield from self._evaluate(orders, orders.evaluate)
        step = me.committed + 1
        if orders.copy is not None:
            yield from self._copy(orders, step, orders.copy)
        if me.record(step).reduced:
            self._vote(orders, step)
        while step < self.world.steps:
            yield from self._run_step(orders, step)
            step += 1
        self.outbox.append(Finished({}))
        while True:
            yield lambda: self._void(orders) or bool(me.commits)
            yield from self._settle(orders)

    def _run_step(self, orders: Orders, step: int) -> Program:
        me = self.me
        if step not in orders.steps:
            yield lambda: orders.steady is not None or self._void(orders)
            self.check(orders)
        actions = orders.steps.get(step, orders.steady)
        assert actions is not None
        for action in actions:
            yield from self._settle(orders)
            if action.kind.computes:
                yield from self._compute(orders, step, action, actions)
            elif action.kind is OpKind.REDUCE:
                yield from self._await_turn(orders, step)
                yield from self._reduce(orders, step)
                self._vote(orders, step)
            elif action.peer is not None and action.kind.takes:
                key = (step, action.tensor)
                self.send(
                    orders,
                    self._member(action.peer),
                    key,
                    self._received[key] if key in self._received else self._log[key],
                )
            yield None
        yield from self._await_turn(orders, step)
        if orders.stagger and not self._is_barrier(step) and me.committed == step - 1:
            ahead = me.applied == step  # updated in an earlier generation; peers may need its weights again
            if not ahead:
                me.speculate(step)
                self.world.speculations += 1
            if not ahead:
                self.shards.step(step, ahead=True)
            yield from self.shards.send_weights(orders, step)
            if not ahead:
                return
        if step > me.committed:
            yield lambda: bool(me.commits) or self._void(orders)
        yield from self._settle(orders)

    def _compute(self, orders: Orders, step: int, action: Action, actions: list[Action]) -> Program:
        me, kind, mb, stages = self.me, action.kind, action.microbatch, self.world.stages
        assert mb is not None
        if kind.adds_gradient:
            yield from self._await_turn(orders, step)
        takes = input_of(kind, mb, self.role.stage, stages)
        if takes and (step, takes) not in self._received:
            sender = next(a.peer for a in actions if a.peer and a.kind.makes and a.tensor == takes)
            assert sender is not None
            yield from self.receive(orders, self._member(sender), (step, takes))
            self._received[step, takes] = self.arrived
        self.check(orders)
        self.shards.check_weights(step - 1)
        record = me.record(step)
        record.begin(kind, mb)
        if me.applied != step - 1:
            self.world.fail(f"{self.role} runs {kind}{mb} of step {step} with parameters after step {me.applied}")
        if takes and self._received[step, takes]._replace(wrong=False) != self._boundary(step, takes):
            self.world.fail(
                f"{self.role} runs {kind}{mb} of step {step} on a wrong tensor: {self._received[step, takes]}"
            )
        yield None  # the op runs; other events may happen
        if me.records.get(step) is record:
            if (step, kind, mb) in self._ran:
                self.world.fail(f"{self.role} repeats {kind}{mb} of step {step}")
            self._ran.add((step, kind, mb))
        makes = output_of(kind, mb, self.role.stage, stages)
        wrong = bool(self.shards.tainted) or (takes is not None and self._received[step, takes].wrong)
        if makes:
            self._log[step, makes] = self._boundary(step, makes)._replace(wrong=wrong)
        if kind.completes_gradient:
            self._sums.update((layer, mb) for layer in self.layers)
        if wrong:
            self._sums[WRONG] = 1
        if takes:
            self._received.pop((step, takes))
        record.finish()

    def _boundary(self, step: int, tensor: Tensor) -> Boundary:
        """The expected content of a tensor that this stage makes or takes, if nothing is wrong."""
        kind, _, maker = tensor
        below = (kind is TensorKind.ACTIVATION) != (maker == self.role.stage)
        return Boundary(step, False, self.layers[0] - 1 if below else self.layers[-1])

    def _evaluate(self, orders: Orders, step: int) -> Program:
        me, losses, stages = self.me, {}, self.world.stages
        yield lambda: orders.forward is not None or self._void(orders)
        self.check(orders)
        assert orders.forward is not None
        pipelines, total = self.world.problem.pipelines, self.world.held_out
        for number, action in numbered(orders.forward, pipelines, self.world.per_pass, total):
            self.check(orders)
            mb = action.microbatch
            assert mb is not None
            if action.kind is OpKind.FORWARD:
                takes = input_of(OpKind.FORWARD, mb, self.role.stage, stages)
                if takes:
                    sender = next(a.peer for a in orders.forward if a.kind.makes and a.tensor == takes)
                    assert sender is not None
                    yield from self.receive(orders, self._member(sender), ("validation", step, (number, takes)))
                    if self.arrived != self._boundary(step, takes):
                        self.world.fail(f"{self.role} validates step {step} on the tensor {self.arrived}")
                if me.applied != step:
                    self.world.fail(f"{self.role} validates step {step} with parameters after step {me.applied}")
                if not output_of(OpKind.FORWARD, mb, self.role.stage, stages):
                    losses[number] = 2.0**number
            elif action.kind is OpKind.SEND_ACTIVATION:
                assert action.peer is not None
                key, made = ("validation", step, (number, action.tensor)), self._boundary(step, action.tensor)
                self.send(orders, self._member(action.peer), key, made)
            yield None
        if losses:
            self.outbox.append(Evaluated(step, losses, total))

    def _await_turn(self, orders: Orders, step: int) -> Program:
        while step > self.me.committed + 1:
            yield lambda: bool(self.me.commits) or self._void(orders)
            yield from self._settle(orders)
        yield from self._settle(orders)

    def _is_barrier(self, step: int) -> bool:
        every = [n for n in (self.world.evaluate_every, self.world.save_every) if n]
        return step == self.world.steps - 1 or any((step + 1) % n == 0 for n in every)

    # -- the end of a step -------------------------------------------------------------------------------------

    def _reduce(self, orders: Orders, step: int) -> Program:
        """Every peer sends its sums to all others. If a peer dies meanwhile, its sums reach only some of them."""
        yield from self.shards.reduce(orders, self._sums)
        mine = Counter(self._sums)
        total = Counter(mine)
        self._reductions += 1
        key = ("reduce", self._reductions)
        for peer in self.peers():
            self.send(orders, peer, key, mine)
            yield None
        for peer in self.peers():
            yield from self.receive(orders, peer, key)
            total.update(self.arrived)
        yield from self.shards.take_gradients(orders)
        self._hold(orders, step, total)

    def _copy(self, orders: Orders, step: int, source: int) -> Program:
        self._reductions += 1
        key = ("copy", self._reductions)
        if source == self.me.member:
            for peer in self.peers():
                self.send(orders, peer, key, Counter(self.reduced[step]))
                yield None
            return
        yield from self.receive(orders, source, key)
        if not self.me.record(step).reduced:
            self._hold(orders, step, self.arrived)

    def _hold(self, orders: Orders, step: int, total: Sums) -> None:
        self.check(orders)
        self.reduced[step] = total
        self.shards.hold(orders, total)
        self.me.record(step).reduced = True

    def _vote(self, orders: Orders, step: int) -> None:
        counts = [self.reduced[step][self.layers[0], mb] for mb in self.world.problem.microbatch_keys()]
        squares = [4.0 if step in self.world.clipped else 0.01]
        losses = [1.0] * len(counts)
        fits = (step, self.me.attempt.coarser) not in self.world.misfits
        held = self.shards.inspected()
        for stream in self._fed:
            if stream.message.early:
                stream.parcels.append((step, (orders.generation, Counter(self.reduced[step]))))
                self._sent_early = step, orders.generation
                self.world.touch(stream.to)
        self.outbox.append(
            make_vote(orders.generation, step, squares, True, fits, counts, losses, self.me.speaks, *held)
        )

    def _settle(self, orders: Orders | None = None) -> Program:
        me, validate, applied = self.me, [], False
        while (me.commits or me.undo or me.again) and me.worker == self.role:
            if me.undo:
                self._forget_after(me.applied)
                self.shards.undo()
                me.taken_back()
                self.world.taken_back += 1
            if me.again:
                self._forget_after(me.committed)
                self._sums.clear()
                self.reduced.pop(me.committed + 1, None)
                me.begins_again()
            commit = me.next_commit()
            if commit is None:
                continue
            ahead = me.applied == commit.step
            me.applied, applied = commit.step, True
            yield None
            self.shards.confirm() if ahead else self.shards.step(commit.step)
            if any(n != 1 for of, n in self.reduced[commit.step].items() if of != WRONG):
                self.world.fail(f"{self.role} applies a gradient not counted once: {self.reduced[commit.step]}")
            self._feed(commit)
            self._sums.clear()
            self.reduced.pop(commit.step)
            self._log = {k: v for k, v in self._log.items() if k[0] > commit.step}
            self._received = {k: v for k, v in self._received.items() if k[0] > commit.step}
            if commit.evaluate:
                validate.append(commit.step)
            self._done = commit.step + 1
            self._saves = me.holdings.saves.pop(commit.step, [])
            if commit.savers and self.world.save_every:
                if self.shards.seen:
                    self.saves.append(SaveFailed(commit.step + 1, "its state has changed"))
                    continue
                self.saves.append(Digests(commit.step + 1, {"weights": str(me.applied), **self.shards.digests()}))
            if me.member in commit.savers or self._wanted == self._done:
                self._save(commit.step + 1, whole=self._wanted == self._done)
        if orders is not None:
            self.check(orders)
            if applied:
                yield from self.shards.send_weights(orders, me.committed)
            for step in validate:
                yield from self._evaluate(orders, step)

    def _forget_after(self, step: int) -> None:
        self._ran = {r for r in self._ran if r[0] <= step}
        self._log = {k: v for k, v in self._log.items() if k[0] <= step}
        self._received = {k: v for k, v in self._received.items() if k[0] <= step}

    def _save(self, step: int, whole: bool) -> None:
        if not self.world.save_every:
            return
        units = self.shards.state if whole else self._saves
        self.parts[step] = self.parts.get(step, {}) | self.shards.saved(step - 1, units)
        if self.me.applied != step - 1:
            self.world.fail(f"{self.role} saves {step} steps with parameters after step {self.me.applied}")
        self.saves.append(Saved(step, whole, str(self.role)))

    def saves_until(self, step: int) -> bool:
        """Whether this worker must still save or report a checkpoint of at most this number of steps."""
        reports = (*self.saves, *self.outbox, *self.lost_messages.values())
        return self._done < step or any(isinstance(each, Saved | SaveFailed) for each in reports)

    # -- messages ----------------------------------------------------------------------------------------------

    def peers(self) -> list[int]:
        return [peer for peer in self.me.peers if peer != self.me.member]

    def _member(self, worker: Worker) -> int:
        return next(member for member, played in self._members.items() if played == worker)

    def send(self, orders: Orders, to: int, key: Any, what: Any) -> None:
        self.check(orders)
        if self.network.broken(self.mesh, self.me.member, to):
            self._break(orders)
        self.network.wires[orders.generation, self.me.member, to, key] = what
        self.world.touch(to)

    def receive(self, orders: Orders, sender: int, key: Any) -> Program:
        """Waits for a message and stores it in `_arrived`."""
        wires, wire = self.network.wires, (orders.generation, sender, self.me.member, key)
        yield lambda: wire in wires or self._void(orders) or self.network.broken(self.mesh, self.me.member, sender)
        self.check(orders)
        if wire not in wires:
            self._break(orders)
        self.arrived = wires.pop(wire)

    def _break(self, orders: Orders) -> None:
        self.me.orders = None
        self.outbox.append(Broken(orders.generation))
        raise Void

    def _void(self, orders: Orders) -> bool:
        return self.me.orders is not orders

    def check(self, orders: Orders) -> None:
        if self.me.orders is not orders:
            raise Void

    # -- following units ---------------------------------------------------------------------------------------

    def _relayout(self, layers: list[int]) -> None:
        """Gives the stage these layers. It then holds those blocks of new layers that have arrived."""
        if self._sums or self.reduced or self._log or self._received:
            self.world.fail(f"{self.me.worker} changes its layers in the middle of a step")
        self.shards.relayout(layers, self.arriving)
        self.layers, self.arriving = list(layers), Shards(self, (), -1)
        self.me.relayout(blocks_of(layers))

    def _describe(self, layers: Collection[int]) -> None:
        if not self._described.issuperset(layers):
            self._described |= {*layers}
            self.outbox.append(Ready(("node", self.number), "simulated", units=described(sorted(self._described))))

    def _play(self, worker: Worker) -> None:
        """Restarts the executor with the stage that this understudy has followed."""
        self._apply_due()
        self.role, self.shards, self.standing_in = worker, self.standing_in, Shards(self, (), NOTHING)
        self.layers = [*self.shards.exponents]
        self._sums.clear()
        for of in (self.reduced, self._log, self._received, self._ran, self._fed, self._asked, self._early):
            of.clear()
        self._handle_deferred()

    def _handle_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            self._handle(message)

    def _apply_due(self) -> None:
        assert self._heir is not None
        for commit in self._heir.take_due():
            self.standing_in.apply(commit.step, self._early.pop(commit.step))

    def _feed(self, commit: Commit) -> None:
        """Called after a commit. Sends the state to new followers, and the step's gradients to the others."""
        step = commit.step
        for stream in list(self._fed):
            if not self.shards.state.keys() >= {*unpacked(stream.message.units)}:
                self._fed.remove(stream)  # other workers hold some of its units now
                continue
            if not stream.message.early or self._sent_early != (step, commit.generation):
                stream.parcels.append((step, None))
            self.world.touch(stream.to)
        for message in self._asked:
            assert message.address is not None
            joiner = self.world.node(message.address[1])
            units = unpacked(message.units)
            held = self.shards.given()
            if not held.keys() >= {*units}:
                continue  # other workers hold some of them now
            state = {unit: held[unit] for unit in units}
            stream = Stream(joiner.me.member, message, deque([(step, state)]))
            joiner._streams.append(stream)
            self.world.touch(stream.to)
            self._fed.append(stream)
        self._asked = []

    def _take(self, message: Donate, step: int, state: Parcel) -> None:
        """Takes a donor's parcel, unless the session is over."""
        if message.session < self._session or not self._following:
            return
        if message.early:
            self._stand_in(message, step, state)
            return
        assert not isinstance(state, tuple)
        units, joins = unpacked(message.units), self.me.generation < 0
        for unit in units:
            if state is None and self._have[unit] != step - 1:
                self.world.fail(f"{self.me.worker} gets the gradients of step {step} after step {self._have[unit]}")
            self._have[unit] = step
        if joins:
            self.shards.follow(units, step, state, self.layers)
        else:
            self.arriving.follow(units, step, state, {unit.layer for unit in units})
        if len(self._have) == message.of and set(self._have.values()) == {step}:
            self.me.caught_up(step, self._have) if joins else self.me.followed(step, self._have)
            self.outbox.append(Synced(step, message.session))

    def _stand_in(self, message: Donate, step: int, state: Parcel) -> None:
        """Takes a parcel as an understudy."""
        assert self._heir is not None
        self._apply_due()
        if isinstance(state, tuple):
            generation, self._early[step] = state
            if self._heir.received(step, generation):
                self.outbox.append(Prepared(generation, step, message.session))
        else:
            if state is not None:
                self._heir.restart()
            self.standing_in.follow(unpacked(message.units), step, state, list(self.standing_in.exponents))
            self._heir.reached(step)
