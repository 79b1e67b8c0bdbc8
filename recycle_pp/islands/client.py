"""A worker's part in the rounds: uploads its deltas, reads those of other islands, and computes theta during training.

    client = Client(settings, optimizer, send)
    position = client.open(position)          # at the start, before the worker is ready; raises ValueError
    client.begin(generation, holders, me)     # in every generation: the holders of this worker's units
    client.aim(message)                       # another worker has computed a newer theta
    client.apply(order); client.cut(order); client.committed(order, step)      # at a commit, in the executor's thread
    client.close(finished=True)

A thread lists the store every few seconds, and carries out the decision of `rounds.decide` for the units of this
worker. So no process gathers the whole model. If the store fails, training continues, and the thread tries again.

All holders of a unit cut the same delta. The first holder uploads it. A few seconds later, the other holders upload
what is still missing, because the first holder may have died.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from recycle_pp.config.settings import Settings
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.numerics.outer_state import MOMENTUM, RESIDUAL, THETA
from recycle_pp.storage.store import Store, StoreError
from recycle_pp.wire.messages.islands import (
    CutMissing,
    OuterOrder,
    OuterState,
    RoundGoal,
    RoundReady,
    RoundStatistics,
    StoreTraffic,
)
from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.units import UnitId

from . import objects, rounds, written
from .codec import Floats, encode, seal
from .fragments import changes, takes_part
from .leader import Leader
from .opening import opened
from .outer import difference, merged
from .reader import Reader
from .rounds import Apply, Close, Position, Share
from .theta import Outer, advanced

SOON, LATER = 0.2, 5.0  # seconds between two listings of the store: minimum and maximum
TURN = 3.0  # seconds after which the next holder of a unit uploads what is missing
STORE_SECONDS = 20.0  # how long to retry a failing request
LAST_SECONDS = 5.0  # how long to retry a failing request at the end of a job
TRAFFIC_SECONDS = 5.0  # between two messages about the traffic


@dataclass(frozen=True)
class _Cut:
    """The deltas that this worker cut. number: the round. contents: unit -> the unit's part of an object"""

    number: int
    share: Share
    contents: Mapping[UnitId, bytes]
    at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class _Result:
    """Theta and momentum after `applied` rounds. first: whether this island writes snapshots of it"""

    applied: int
    outer: Mapping[UnitId, Outer]
    statistics: list[RoundStatistics]
    first: bool


class Client:
    def __init__(self, settings: Settings, optimizer: StageOptimizer, send: Callable[[Message], None]) -> None:
        """send: sends a message to the coordinator"""
        self._settings, self._islands, self._optimizer, self._send = settings, settings.islands, optimizer, send
        assert self._islands.name is not None and self._islands.store is not None
        self._me, self._url = self._islands.name, self._islands.store
        self._samples = settings.parallel.pipelines * settings.parallel.microbatches * settings.parallel.microbatch_size
        self._changed = threading.Condition()  # guards the attributes below, up to `_closed` and `_resumed`
        self._order: OuterOrder | None = None  # of the newest commit; at the start, the position of the checkpoint
        self._step = 0  # number of committed steps
        self._generation = -1
        self._turns: dict[UnitId, int] = {}  # unit of this worker -> number of holders before this worker
        self._cut: _Cut | None = None
        self._result: _Result | None = None
        self._reported = -1, -1  # (generation, number of rounds) of the last `RoundReady`
        self._goal = 0  # number of rounds in the newest theta of another worker, see `RoundGoal`
        self._uploads: list[tuple[float, str, bytes]] = []  # (due time, path, content) of checksums and snapshots
        self._closed = self._resumed = False
        # Only the thread uses these.
        self._store: Store | None = None
        self._closings: dict[int, dict[str, Share]] = {}
        # (round, time at which this island's delta of that round was complete in the store)
        self._complete: tuple[int, float] | None = None
        self._leader = Leader(settings, send)
        self._sent = self._received = 0
        self._answered = self._told = time.monotonic()
        self._failure = self._told_failure = ""

    # -- the start -----------------------------------------------------------------------------------------------

    def open(self, position: OuterState | None, patience: float = 0.0, origin: str | None = None) -> OuterState:
        """The position to start from; see `opening.opened`, also for `origin`. Raises ValueError, with one sentence.

        patience: seconds for which to try again if the store cannot be used"""
        until = time.monotonic() + patience
        while True:
            try:
                store = Store(self._url, STORE_SECONDS)
                found = opened(store, self._settings, self._optimizer.tensors, position, origin)
                break
            except StoreError as error:
                if time.monotonic() >= until:
                    raise
                self._failure = str(error)
                self._report_traffic()
                time.sleep(SOON)
        self._answered, self._failure = time.monotonic(), ""
        with self._changed:
            self._order = OuterOrder(found)
            self._resumed = found.applied > 0
        return found

    def start(self) -> None:
        threading.Thread(target=self._serve, name="islands", daemon=True).start()

    # -- in the executor's thread --------------------------------------------------------------------------------

    def begin(
        self, generation: int, position: OuterState, holders: Mapping[UnitId, Sequence[Member]], me: Member
    ) -> None:
        """Begins a generation. holders: the holders of all units of the stage, first holder first"""
        turns = {unit: of.index(me) for unit, of in holders.items() if me in of}
        with self._changed:
            self._generation, self._turns, self._order = generation, turns, OuterOrder(position)
            self._goal = 0
            if self._result is not None and not self._result.outer.keys() >= turns.keys():
                self._result = None  # computed again, because this worker now holds different units
            cut = self._cut
            has = cut.contents.keys() if cut is not None and cut.number == position.applied else set()
            resumed, self._resumed = self._resumed, False
            self._changed.notify()
        if resumed:  # the island may have ended before it uploaded the checksums of this round
            uploads = self._checksums(position.applied, self._theta)
            with self._changed:
                self._uploads += uploads
        stored = position.mine.get(position.applied) == position.sent  # whether an earlier start uploaded the delta
        lacks = [(unit, [*holders[unit]]) for unit in self._in_round(position.applied) if unit not in has]
        if position.sent is not None and not stored and lacks:
            self._send(CutMissing(generation, position.sent, lacks))

    def aim(self, message: RoundGoal) -> None:
        """Another worker has computed a newer theta than this one. Called in the session's thread."""
        with self._changed:
            if message.generation == self._generation:
                self._goal = message.applied
                self._changed.notify()

    def apply(self, order: OuterOrder) -> None:
        """Replaces theta, and merges the weights with it. Call it before the update of the step."""
        with self._changed:
            assert self._order is not None
            result, before = self._result, self._order.state.applied
            # The coordinator orders that a round be applied only after every worker has computed theta after it.
            assert result is not None and result.applied == order.apply, (result and result.applied, order)
        layout, values = self._layout, {}
        for unit in self._turns:
            if not changes(unit.layer, before, result.applied, self._islands.fragments):
                continue
            outer, number = result.outer[unit], layout.number(unit)
            weights = self._optimizer.outer(number)["model"].numpy()
            vectors = {THETA: outer.theta, MOMENTUM: outer.momentum}
            if self._islands.mix < 1:
                vectors["model"] = merged(weights, outer.theta, self._islands.mix)
            values[number] = {name: torch.from_numpy(vector) for name, vector in vectors.items()}
        self._optimizer.replace(values)
        uploads = self._checksums(result.applied, lambda unit: result.outer[unit].theta)
        if result.first and result.applied % self._islands.snapshot_every == 0:
            uploads += self._snapshot(result)
        with self._changed:
            self._result, self._cut = None, None
            self._uploads += uploads

    def cut(self, order: OuterOrder) -> None:
        """Cuts the deltas of this worker's units that the round synchronises. Call it after the update of the step."""
        layout, contents, values = self._layout, {}, {}
        for unit in self._in_round(order.state.applied):
            number = layout.number(unit)
            own = {name: vector.numpy() for name, vector in self._optimizer.outer(number).items()}
            delta = difference(own[THETA], own["model"], own[RESIDUAL])
            codes, sent = encode(delta, self._islands.bits)
            contents[unit] = seal(codes, unit_digest(layout, number), delta.size, self._islands.bits)
            values[number] = {RESIDUAL: torch.from_numpy(delta - sent)}
        self._optimizer.replace(values)
        state = order.state
        assert state.sent is not None
        with self._changed:
            self._cut = _Cut(state.applied, Share(state.sent, order.samples * self._samples), contents)

    def committed(self, order: OuterOrder, step: int) -> None:
        """Call it after every commit, last."""
        with self._changed:
            self._order, self._step = order, step + 1
            if order.apply is not None or order.cut:
                self._changed.notify()

    def close(self, finished: bool) -> None:
        """Ends the thread.

        finished: whether the job has ended. If so, also uploads the last checksums, and deletes the lease, so that
                  other islands do not wait for this one
        """
        with self._changed:
            self._closed = True
            leads, uploads = self._leads(), [(path, of) for _, path, of in self._uploads if path.endswith(".sums")]
            self._changed.notify()
        if not finished:
            return
        try:
            store = Store(self._url, LAST_SECONDS)
            for path, content in uploads:
                store.put_if_absent(path, content)
            if leads:
                self._leader.leave(store)
        except StoreError:
            return  # the lease will expire

    # -- the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        wait = SOON
        while True:
            with self._changed:
                self._changed.wait(wait)
                if self._closed:
                    return
                active = self._order is not None and self._generation >= 0
                busy = self._order is not None and self._order.state.sent is not None and self._result is None
            try:
                if active:
                    if self._store is None:
                        self._store = Store(self._url, STORE_SECONDS)  # reads the cloud's access keys again
                    self._look(self._store)
                self._answered, self._failure = time.monotonic(), ""
            except ValueError as error:  # StoreError, or an object with invalid content
                self._store, self._failure = None, str(error)
            self._report_traffic()
            wait = min(LATER, wait * 1.3) if not busy else SOON if wait > 2 else min(2.0, wait * 1.2)

    def _look(self, store: Store) -> None:
        with self._changed:
            order, turns, cut, uploads = self._order, dict(self._turns), self._cut, list(self._uploads)
            generation = self._generation
        assert order is not None
        listing = store.objects()
        view, state = objects.View.of(listing, self._islands.fragments), order.state
        self._renew(store, view)
        if cut is not None and cut.number == state.applied and state.applied not in view.closed:
            self._upload(store, view, cut, turns)
        for due, path, content in uploads:
            if due > time.monotonic():
                continue
            if path not in listing:
                store.put_if_absent(path, content)
                self._sent += len(content)
                self._renew(store, view)
            with self._changed:
                self._uploads.remove((due, path, content))
        if leads := self._leads(view):
            self._leader.maintain(store, view, state)
        closings = self._read_closings(store, view, state.applied)
        if leads:
            self._leader.report(view, closings, generation)
        at = Position(state.applied, state.sent is not None)
        decision = rounds.decide(view, closings, self._me, at, self._waited(view, at), self._islands.patience)
        if isinstance(decision, Close) and leads:
            content = rounds.closing_text(decision.islands, self._me)
            store.put_if_absent(objects.closed_path(decision.number), content)
            self._changed_soon()
        elif isinstance(decision, Apply):
            with self._changed:
                goal, reported = self._goal, self._reported[1] if self._reported[0] == generation else 0
            chosen = rounds.chosen(view, closings, self._me, at, decision, goal, reported)
            if chosen is not None:
                self._compute(store, view, closings, chosen)

    def _upload(self, store: Store, view: objects.View, cut: _Cut, turns: Mapping[UnitId, int]) -> None:
        """Uploads the deltas that are missing in the store, if it is this worker's turn."""
        delivered = view.delivered.get(cut.number, {}).get(self._me)
        if delivered is not None:
            return
        waited = time.monotonic() - cut.at
        due = [unit for unit, turn in turns.items() if waited >= TURN * turn and unit in cut.contents]
        there = store.list(f"rounds/{cut.number:06d}/{self._me}")
        contents = {unit: cut.contents[unit] for unit in due}
        for path, content in written.deltas(self._me, cut.number, cut.share, contents):
            if there.get(path) != len(content):
                store.put(path, content)
                self._sent += len(content)
                self._renew(store, view)
        self._changed_soon()

    def _compute(self, store: Store, view: objects.View, closings: rounds.Closings, path: Apply) -> None:
        """Computes theta of this worker's units, and reports it."""
        with self._changed:
            result, generation, turns = self._result, self._generation, dict(self._turns)
            if self._reported == (generation, path.applied) and result is not None:
                return
            assert self._order is not None
            first = self._order.state.applied
        mine = self._mine(store, view, closings, first, path.applied)
        if result is None or result.applied != path.applied or not result.outer.keys() >= turns.keys():
            result = self._computed(store, view, closings, path, generation, turns)
        if result is None:
            return
        with self._changed:
            if self._generation != generation or self._order is None or self._order.state.applied >= path.applied:
                return
            told = self._reported[1] == path.applied
            self._result, self._reported = result, (generation, path.applied)
        self._report_traffic(now=True)  # before `RoundReady`, so that the record of the round includes this traffic
        self._send(RoundReady(generation, path.applied, [] if told else result.statistics, mine))

    def _computed(
        self,
        store: Store,
        view: objects.View,
        closings: rounds.Closings,
        path: Apply,
        generation: int,
        turns: Mapping[UnitId, int],
    ) -> _Result | None:
        """None if a new generation has begun, because its commits drop units that this worker no longer holds."""
        layout, islands = self._layout, self._islands
        reader = Reader(store, view, closings, layout, islands.bits, lambda: self._renew(store, view))
        found: dict[UnitId, Outer] = {}
        statistics = {number: _statistics(number, closings[number]) for number in path.rounds}
        for unit in sorted(turns):
            number = layout.number(unit)
            with self._changed:
                if self._generation != generation:
                    return None
                vectors = self._optimizer.outer(number)
            before = Outer(vectors[THETA].numpy(), vectors[MOMENTUM].numpy())
            first = turns[unit] == 0
            of, part = reader.unit(unit, unit_digest(layout, number)), path.of_layer(unit.layer, islands.fragments)
            after = advanced(before, part, closings, of, islands.lr, islands.momentum, measured=first)
            found[unit] = after.outer
            for each in after.rounds if first else ():
                statistics[each.number] = _added(statistics[each.number], each.square, each.dots, each.refused)
        self._received += reader.received
        names = sorted(closings[path.rounds[-1]]) if path.rounds else []
        return _Result(path.applied, found, list(statistics.values()), names[:1] == [self._me])

    def _renew(self, store: Store, view: objects.View) -> None:
        """Renews the island's lease if this is due. Called after each transfer, because the lease may expire during
        many transfers."""
        if not self._leads(view):
            return
        with self._changed:
            order, step, closed = self._order, self._step, self._closed
        if order is not None and not closed:
            self._leader.renew(store, order.state, step)

    def _leads(self, view: objects.View | None = None) -> bool:
        """Whether this worker is the first holder of the first unit of the model (`Leader`)."""
        first = UnitId(min(view.layout if view is not None else self._layout.layers, default=0), 0)
        return self._turns.get(first) == 0

    # -- helpers -------------------------------------------------------------------------------------------------

    @property
    def _layout(self) -> Layout:
        return self._optimizer.tensors.layout

    def _read_closings(self, store: Store, view: objects.View, first: int) -> rounds.Closings:
        """The closings of all rounds from `first` on whose deltas are in the listing."""
        for number in view.closed & view.delivered.keys():
            if number >= first and number not in self._closings:
                self._closings[number] = rounds.closing_of(store.get(objects.closed_path(number)))
        self._closings = {number: of for number, of in self._closings.items() if number >= first}
        return self._closings

    def _mine(
        self, store: Store, view: objects.View, closings: rounds.Closings, first: int, applied: int
    ) -> dict[int, int]:
        """See `rounds.own`. Reads the closings of rounds whose deltas were deleted too, because a snapshot contains
        them."""
        skipped = sorted(number for number in view.closed - closings.keys() if first <= number < applied)
        read = {number: rounds.closing_of(store.get(objects.closed_path(number))) for number in skipped}
        return rounds.own({**closings, **read}, self._me, first, applied)

    def _waited(self, view: objects.View, at: Position) -> float:
        """Seconds since this island's delta was complete."""
        if self._me not in view.delivered.get(at.applied, {}):
            return 0.0
        if self._complete is None or self._complete[0] != at.applied:
            self._complete = at.applied, time.monotonic()
        return time.monotonic() - self._complete[1]

    def _checksums(self, applied: int, theta: Callable[[UnitId], Floats]) -> list[tuple[float, str, bytes]]:
        """The objects with checksums of theta after `applied` rounds, for the units that the last of these rounds has
        synchronised. Each object is due when it is this worker's turn."""
        units = self._in_round(applied - 1)
        return [
            (time.monotonic() + TURN * turn, *each)
            for turn in sorted({*self._turns.values()})
            for each in written.checksums(self._me, applied - 1, [u for u in units if self._turns[u] == turn], theta)
        ]

    def _in_round(self, number: int) -> list[UnitId]:
        """The units of this worker that a round synchronises."""
        return [unit for unit in self._turns if takes_part(unit.layer, number, self._islands.fragments)]

    def _theta(self, unit: UnitId) -> Floats:
        """Theta of a unit of this worker, as in the newest commit."""
        theta: Floats = self._optimizer.outer(self._layout.number(unit))[THETA].numpy()
        return theta

    def _snapshot(self, result: _Result) -> list[tuple[float, str, bytes]]:
        """The objects of a snapshot, for the units of which this worker is the first holder."""
        mine = {unit: result.outer[unit] for unit, turn in self._turns.items() if turn == 0}
        return [(0.0, *each) for each in written.snapshot(result.applied, mine)]

    def _changed_soon(self) -> None:
        with self._changed:
            self._changed.notify()

    def _report_traffic(self, now: bool = False) -> None:
        """now: whether to report it even if the last report is recent"""
        time_ = time.monotonic()
        failing = time_ - self._answered if self._failure else 0.0
        changed = self._sent or self._received or self._failure or self._told_failure
        if not changed or (time_ - self._told < TRAFFIC_SECONDS and not now):
            return
        self._send(StoreTraffic(self._sent, self._received, failing, self._failure))
        self._told, self._told_failure, self._sent, self._received = time_, self._failure, 0, 0


def unit_digest(layout: Layout, number: int) -> bytes:
    """16 bytes that identify a unit: its name and its size."""
    return hashlib.blake2b(f"{layout.unit_names[number]} {layout.unit_sizes[number]}".encode(), digest_size=16).digest()


def _statistics(number: int, closing: Mapping[str, Share]) -> RoundStatistics:
    return RoundStatistics(number, {name: share.samples for name, share in closing.items()}, 0.0, {})


def _added(
    of: RoundStatistics, square: float, dots: Mapping[str, Mapping[str, float]], refused: Sequence[str]
) -> RoundStatistics:
    total = {name: dict(others) for name, others in of.dots.items()}
    for name, others in dots.items():
        for other, dot in others.items():
            total.setdefault(name, {})[other] = total.get(name, {}).get(other, 0.0) + dot
    return RoundStatistics(of.round, of.shares, of.square + square, total, [*of.refused, *refused])
