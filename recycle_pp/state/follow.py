"""Brings a worker's units up to date while the job continues. The worker copies their committed state, then applies
each step's gradients, until a commit makes it a holder.

    following = Following(stage, optimizer, participant, lock, token, interface, inject)     # on every worker
    following.start(synced=lambda step, session: ...)        # donors connect to following.address
    session.expect = following.expect                        # the coordinator begins a session
    following.relayout(layers)                               # the executor takes the layers that have arrived

A joiner follows the units of its role, and writes them into its stage. A member of a stage that will gain layers
follows the units of these layers, and writes them into memory beside its stage, because the stage trains meanwhile.

In both cases the coordinator begins a session, and assigns units to donors (`state.donations`). The units may be in the
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
from recycle_pp.wire.messages.lifecycle import Expect
from recycle_pp.wire.messages.states import StatePart, StepGradient
from recycle_pp.wire.messages.units import UnitId, unpacked

from .donations import EXPONENTS, PATIENCE, Inject

_log = logging.getLogger(__name__)


@dataclass
class _Session:
    """A session in which this worker follows units.

    layers     see `Expect`
    member     whether this worker was a member when the session began
    optimizer  receives the state: the worker's own, or one beside it; None before the first message
    have       unit -> newest step in its state
    exponents  newest step in the exponents
    over       whether `relayout` has taken the layers
    """

    number: int
    layers: list[int]
    member: bool
    optimizer: StageOptimizer | None = None
    have: dict[UnitId, int] = field(default_factory=dict)
    exponents: int = -1
    streams: list[Stream] = field(default_factory=list)
    over: bool = False


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
        self.relaid: Callable[[], None] = lambda: None  # called when the layers of the stage have changed

    def start(self, synced: Callable[[int, int], None]) -> None:
        """Receives states and steps in threads.

        synced(step, session): called each time all units of the session have the state after `step`"""
        threading.Thread(target=self._accept, args=(synced,), name="join", daemon=True).start()

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
            self._session = _Session(message.session, message.layers, member)
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

    def _relayout(self, layers: Sequence[int], arriving: list[StageOptimizer]) -> None:
        stage, optimizer = self._stage, self._optimizer
        known = {*stage.layout.layers}.union(*(of.tensors.layout.layers for of in arriving))
        if missing := [layer for layer in layers if layer not in known]:
            arriving = [*arriving, optimizer.beside(stage.arriving(missing))]
        with self._changed:
            stage.relayout(layers, [of.tensors for of in arriving])
            optimizer.relayout(arriving)
            self._participant.relayout(stage.layout.ids)
        self.relaid()

    def _accept(self, synced: Callable[[int, int], None]) -> None:
        while not self._closed:
            with suppress(TransferError):  # no donor has connected
                stream = self._receiver.accept(timeout=PATIENCE, idle=PATIENCE)
                threading.Thread(target=self._follow, args=(stream, synced), name="follow", daemon=True).start()

    def _follow(self, stream: Stream, synced: Callable[[int, int], None]) -> None:
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
                    if complete:
                        synced(about.step, about.session)
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

    def _take(self, session: _Session, about: StatePart | StepGradient, tensors: dict[str, Tensor]) -> bool:
        """Applies a message. Returns whether all units now have the state after `about.step`."""
        if session.optimizer is None:
            session.optimizer = self._begin(session)
            self._inject("join", about.step)
        of, layout = session.optimizer.tensors, session.optimizer.tensors.layout
        exponents = {int(name.removeprefix(EXPONENTS)): t for name, t in tensors.items() if name.startswith(EXPONENTS)}
        if exponents and about.step >= session.exponents:
            of.gradients.take_exponents_of_layers(exponents)
            session.exponents = about.step
        names = unpacked(about.units)
        units = [layout.number(unit) for unit in names]
        if isinstance(about, StatePart):
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
            (self._participant.followed if session.member else self._participant.caught_up)(about.step, session.have)
        return True

    def _begin(self, session: _Session) -> StageOptimizer:
        """The optimizer that follows the units of a new session."""
        if session.member:
            return self._optimizer.beside(self._stage.arriving(session.layers))
        if session.layers != [*self._stage.layout.layers]:
            self._relayout(session.layers, [])
        self._optimizer.start_following()
        return self._optimizer
