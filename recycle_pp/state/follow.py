"""Brings a worker's units up to date while the job continues. The worker copies their committed state, then applies
each step's gradients, until a commit makes it a holder.

    following = Following(stage, optimizer, participant, lock, token, interface, inject)     # on every worker
    following.start(synced=lambda step, session: ...)        # donors connect to following.address
    session.expect = following.expect                        # the coordinator begins a session
    following.relayout(layers)                               # the executor takes the layers that have arrived
    stage, optimizer, early = following.take_over()          # the executor plays the worker of another stage

A joiner follows the units of its role, and writes them into its stage. A member of a stage that will gain layers
follows the units of these layers, and writes them into memory beside its stage, because the stage trains meanwhile.

An understudy follows all units of another stage in the same way. It builds that stage, too, so it can play its worker
at any time (`protocol.understudies`).

In all cases the coordinator begins a session, and assigns units to donors (`state.donations`). The units may be in the
states after different steps. When all of them are in the state after the same step, the follower is in step (`synced`).
If a stream breaks, the coordinator begins another session, with other donors if one died. Then all streams of older
sessions are closed, because their donors may have stopped responding.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recycle_pp.comm.transfer import Receiver, Stream, TransferError
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.participant import Participant
from recycle_pp.protocol.understudy import Understudy
from recycle_pp.wire.messages.lifecycle import Expect, NoRoom, Prepared, Synced
from recycle_pp.wire.messages.states import About, EarlyGradient, StatePart
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.units import UnitId, unpacked

from .donations import EXPONENTS, PATIENCE, Inject

_log = logging.getLogger(__name__)


@dataclass
class _Session:
    """A session in which this worker follows units.

    layers     see `Expect`
    member     whether this worker was a member when the session began
    elements   see `Expect`
    optimizer  receives the state: the worker's own, or one beside it; None before the first message
    have       unit -> newest step in its state
    exponents  newest step in the exponents
    over       whether `relayout` has taken the layers, or `take_over` the stage
    understudy progress as an understudy, and
    stage      the stage that it follows; else None
    early      step -> newest gradient, before the commit
    """

    number: int
    layers: list[int]
    member: bool
    elements: int = 0
    optimizer: StageOptimizer | None = None
    have: dict[UnitId, int] = field(default_factory=dict)
    exponents: int = -1
    streams: list[Stream] = field(default_factory=list)
    over: bool = False
    understudy: Understudy | None = None
    stage: Stage | None = None
    early: dict[int, Reduced] = field(default_factory=dict)


class Full(Exception):
    """There is no room for the state of another stage."""

    def __init__(self, message: NoRoom) -> None:
        super().__init__()
        self.message = message


class Following:
    """The follower's side. The constructor starts to listen, for as long as the worker lives.

    lock: guards `participant`. A thread that holds it never waits for `_taking`.
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: StageOptimizer,
        participant: Participant,
        lock: threading.RLock,
        token: str,
        interface: str,
        inject: Inject,
    ) -> None:
        self._stage, self._optimizer, self._participant, self._inject = stage, optimizer, participant, inject
        self._receiver = Receiver(interface, token)
        self._taking = threading.Lock()  # held while a message is applied or layers change
        self._changed = threading.Condition(lock)  # guards the next two attributes
        self._session = _Session(-1, [], member=False)
        self._closed = False
        self.address = self._receiver.address
        # build: makes a stage and its optimizer, for an understudy. The other two are called when the layers of the
        # stage have changed, and when an understudy has built another stage.
        self.build: Callable[[int], tuple[Stage, StageOptimizer]]
        self.room: Callable[[int], tuple[int, int]]  # elements of a stage -> bytes that it needs, bytes that are free
        self.relaid: Callable[[], None] = lambda: None
        self.built: Callable[[Stage], None] = lambda stage: None

    def start(self, send: Callable[[Message], None]) -> None:
        """Receives states and steps in threads.

        send: for messages to the coordinator. `Synced` each time all units of the session have the state after a step,
            `Prepared` each time an understudy can complete a commit, `NoRoom` if it cannot begin"""
        self._send = send
        threading.Thread(target=self._accept, name="join", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._receiver.close()

    def expect(self, message: Expect) -> None:
        """Begins a session. Called by the listening thread; does not block. Never between the adoption of another
        layout and the next commit, so nothing is dropped that `relayout` needs."""
        with self._changed:
            old, member = self._session, self._participant.generation >= 0
            if member:
                self._participant.followed(-1, ())
            new = self._session = _Session(message.session, message.layers, member, message.elements)
            new.understudy = message.worker and Understudy(message.worker, message.session)
            self._participant.understudy = new.understudy
            self._changed.notify_all()
        for stream in old.streams:
            stream.close()

    def relayout(self, layers: Sequence[int]) -> None:
        """Gives the stage these layers, between two steps. Those that have arrived bring their state. Those that the
        stage lacks otherwise have none: their units must be copied before they are used. Called by the executor."""
        with self._taking:
            session = self._session
            arriving, session.optimizer = session.optimizer if session.member else None, None
            session.over = True
            self._relayout(layers, [] if arriving is None else [arriving])

    def take_over(self) -> tuple[Stage, StageOptimizer, dict[int, Reduced]]:
        """The stage that this understudy plays from now on, in the state after the newest committed step, and the
        gradient of the next step, if one has come. Called by the executor."""
        with self._taking:
            session = self._session
            self._apply_due(session)
            assert session.stage is not None and session.optimizer is not None
            self._stage, self._optimizer, session.over = session.stage, session.optimizer, True
            session.stage = session.optimizer = None
            return self._stage, self._optimizer, session.early

    def _relayout(self, layers: Sequence[int], arriving: list[StageOptimizer]) -> None:
        with self._changed:
            _relayout(self._stage, self._optimizer, layers, arriving)
            self._participant.relayout(self._stage.layout.ids)
        self.relaid()

    def _accept(self) -> None:
        while not self._closed:
            with suppress(TransferError):  # no donor has connected
                stream = self._receiver.accept(timeout=PATIENCE, idle=PATIENCE)
                threading.Thread(target=self._follow, args=(stream,), name="follow", daemon=True).start()

    def _follow(self, stream: Stream) -> None:
        try:
            with stream:
                while True:
                    about, tensors = stream.receive()
                    session = self._expected(about.session, stream)
                    if session is None:
                        return  # the donor was replaced
                    with self._taking:
                        if session.over or (not session.member and self._participant.generation >= 0):
                            return  # this worker reduces the gradients itself
                        complete = self._take(session, about, tensors)
                    if complete and isinstance(about, EarlyGradient):
                        self._send(Prepared(about.generation, about.step, about.session))
                    elif complete:
                        self._send(Synced(about.step, about.session))
        except Full as error:
            self._send(error.message)
        except TransferError as error:
            _log.info("lost the donor: %s", error)  # the coordinator starts another session

    def _expected(self, number: int, stream: Stream) -> _Session | None:
        """The session with this number; None if a newer one has begun. The donor may connect before `expect`."""
        with self._changed:
            self._changed.wait_for(lambda: self._session.number >= number or self._closed)
            if self._session.number != number:
                return None
            if all(of is not stream for of in self._session.streams):
                self._session.streams.append(stream)
            return self._session

    def _take(self, session: _Session, about: About, tensors: dict[str, Tensor]) -> bool:
        """Applies a message. Returns whether all units now have the state after `about.step`, or will have it after the
        commit."""
        if session.optimizer is None:
            session.optimizer = self._begin(session)
            self._inject("join", about.step)
        if session.understudy is not None:
            self._apply_due(session)
        if isinstance(about, EarlyGradient):
            return self._keep(session, about, tensors["gradient"])
        of, layout = session.optimizer.tensors, session.optimizer.tensors.layout
        exponents = {int(name.removeprefix(EXPONENTS)): t for name, t in tensors.items() if name.startswith(EXPONENTS)}
        if exponents and about.step >= session.exponents:
            of.gradients.take_exponents_of_layers(exponents)
            session.exponents = about.step
        names = unpacked(about.units)
        units = [layout.number(unit) for unit in names]
        if isinstance(about, StatePart):
            if session.understudy is not None:
                with self._changed:
                    session.understudy.restart()
            session.optimizer.take(units, tensors)
        elif about.scale is not None:
            nothing = torch.empty(0)
            reduced = Reduced(tensors["gradient"], nothing, nothing, [], True, units=tuple(units))
            session.optimizer.follow(reduced, about.step, about.scale)
        session.have |= dict.fromkeys(names, about.step)
        if len(session.have) < about.of or {*session.have.values()} != {about.step}:
            return False
        with self._changed:
            if self._session is not session:
                return False
            if session.understudy is not None:
                session.understudy.reached(about.step)
                return True
            (self._participant.followed if session.member else self._participant.caught_up)(about.step, session.have)
        return True

    def _begin(self, session: _Session) -> StageOptimizer:
        """The optimizer that follows the units of a new session."""
        if session.understudy is not None:
            needed, free = self.room(session.elements)
            if needed > free:
                raise Full(NoRoom(session.number, needed, free))
            session.stage, optimizer = self.build(session.understudy.worker.stage)
            if session.layers != [*session.stage.layout.layers]:
                _relayout(session.stage, optimizer, session.layers, [])
            session.understudy.units = session.stage.layout.ids
            self.built(session.stage)
            return optimizer
        if session.member:
            return self._optimizer.beside(self._stage.arriving(session.layers))
        if session.layers != [*self._stage.layout.layers]:
            self._relayout(session.layers, [])
        self._optimizer.start_following()
        return self._optimizer

    # -- understudies ------------------------------------------------------------------------------------------

    def _keep(self, session: _Session, about: EarlyGradient, gradient: Tensor) -> bool:
        """Keeps a gradient until the commit of its step. Returns whether no other one is missing for this commit.

        If the step is repeated, the exponents follow from the last attempt, as on the donor."""
        assert session.understudy is not None and session.optimizer is not None
        tensors, nothing = session.optimizer.tensors, torch.empty(0)
        if about.attempt:
            self._apply_due(session)
            tensors.gradients.begin_again(about.attempt, session.early.get(about.step))
        session.early[about.step] = Reduced(gradient.to(tensors.device), nothing, nothing, [], about.finite)
        with self._changed:
            return session.understudy.received(about.step, about.generation)

    def _apply_due(self, session: _Session) -> None:
        """Applies the commits whose gradients are here."""
        assert session.understudy is not None and session.optimizer is not None
        with self._changed:
            due = session.understudy.take_due()
        for commit in due:
            session.optimizer.step(session.early.pop(commit.step), commit.step, commit.scale)
            session.optimizer.tensors.gradients.clear()
            session.have = dict.fromkeys(session.have, commit.step)
        if due:
            session.exponents = due[-1].step
            session.early = {step: of for step, of in session.early.items() if step > due[-1].step}


def _relayout(stage: Stage, optimizer: StageOptimizer, layers: Sequence[int], arriving: list[StageOptimizer]) -> None:
    """Gives a stage these layers. Those that have arrived bring their state; other new ones have none."""
    known = {*stage.layout.layers}.union(*(of.tensors.layout.layers for of in arriving))
    if missing := [layer for layer in layers if layer not in known]:
        arriving = [*arriving, optimizer.beside(stage.arriving(missing))]
    stage.relayout(layers, [of.tensors for of in arriving])
    optimizer.relayout(arriving)
