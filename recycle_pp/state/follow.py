"""Brings a worker's units up to date while the job continues. The worker copies their committed state, then applies
each step's gradients, until a commit makes it a holder.

    following = Following(stage, optimizer, participant, lock, token, interface, inject)     # on every worker
    following.start(send)                                    # donors connect to following.address
    session.expect = following.expect                        # called when the coordinator begins a session
    following.relayout(layers)                               # adds the layers that have arrived to the stage
    early = following.take_over()                            # replaces the stage with the followed stage

Three kinds of workers follow units:

- A joiner (a worker that enters the running job) follows units of its own stage, and writes them into this stage.
- A member of a stage that will gain layers follows the units of these layers. It writes them into separate memory,
  because its stage continues to train.
- An understudy follows all units of another stage in the same way, and can take over that stage at any time
  (`protocol.understudies`).

In all cases the coordinator begins a session, and assigns units to donors (`state.donations`). Units arrive one after
the other, so their states may belong to different steps. When all units have reached the same step, the follower sends
`Synced`. If a stream breaks, the coordinator begins another session, with other donors if one died. Then all streams of
older sessions are closed, because their donors may have stopped responding.
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
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.participant import Participant
from recycle_pp.protocol.understudy import Understudy
from recycle_pp.wire.messages.lifecycle import Expect, NoRoom, Prepared, StreamLost, Synced
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
    optimizer  the optimizer that receives the state: the worker's own, or a separate one for layers that may move to
               its stage; None before the first message
    have       unit -> last step that its state includes
    exponents  last step whose exponents have been applied; -1 if none
    over       whether `relayout` or `take_over` has moved the layers into the stage
    understudy progress of this worker as an understudy; None if it is not one
    early      for an understudy: uncommitted step -> gradient of its latest attempt
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
    early: dict[int, Reduced] = field(default_factory=dict)


class Full(Exception):
    """There is not enough memory for the state of another stage."""

    def __init__(self, message: NoRoom) -> None:
        super().__init__()
        self.message = message


class Following:
    """The follower's side. The constructor opens a port, which stays open until `close`.

    lock: guards `participant`. A thread that holds `lock` never waits for `_taking`.
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
        suspicion: float | None = None,
    ) -> None:
        self._stage, self._optimizer, self._participant, self._inject = stage, optimizer, participant, inject
        self._receiver = Receiver(interface, token, suspicion)
        self._taking = threading.Lock()  # held while a message is applied or layers change
        self._changed = threading.Condition(lock)  # guards the next two attributes
        self._session = _Session(-1, [], member=False)
        self._closed = False
        self.address = self._receiver.address
        # Callbacks, set by the worker. relaid(): called when the layers of the stage have changed. follows(layout):
        # called when an understudy begins to follow layers. room(elements): returns (bytes that an understudy with this
        # number of elements needs, free bytes)
        self.relaid: Callable[[], None] = lambda: None
        self.follows: Callable[[Layout], None] = lambda layout: None
        self.room: Callable[[int], tuple[int, int]]

    def start(self, send: Callable[[Message], None]) -> None:
        """Starts threads that receive states and steps.

        send(message): sends a message to the coordinator: `Synced` each time all units of the session have reached the
            same step, `StreamLost` if a stream of the session breaks, `Prepared` each time an understudy can complete
            a commit, `NoRoom` if an understudy has too little memory
        """
        self._send = send
        threading.Thread(target=self._accept, name="join", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._receiver.close()

    def expect(self, message: Expect) -> None:
        """Begins a session and drops the old one. Called by the listening thread. Does not block.

        Never called between the adoption of a new layout and the next commit, so it drops no state that `relayout`
        needs."""
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
        """Gives the stage these layers, between two steps. Layers that have arrived keep their state. Other new layers
        have no state, so their units must be copied before they are used. Called by the executor."""
        with self._taking:
            session = self._session
            arriving, session.optimizer = session.optimizer if session.member else None, None
            session.over = True
            self._relayout(layers, [] if arriving is None else [arriving])

    def take_over(self) -> dict[int, Reduced]:
        """Turns the stage into the stage that this understudy has followed. Returns uncommitted step -> its gradient.

        The stage gets the state after the last commit whose gradient has arrived. The returned gradients belong to
        later steps. Called by the executor."""
        with self._taking:
            session = self._session
            self._apply_due(session)
            assert session.understudy is not None and session.optimizer is not None
            arrived, session.optimizer, session.over = session.optimizer, None, True
            self._stage.take_over(session.understudy.worker.stage, arrived.tensors)
            self._optimizer.take_over(arrived)
            return session.early

    def _relayout(self, layers: Sequence[int], arriving: list[StageOptimizer]) -> None:
        with self._changed:
            known = {*self._stage.layout.layers}.union(*(of.tensors.layout.layers for of in arriving))
            if missing := [layer for layer in layers if layer not in known]:
                arriving = [*arriving, self._optimizer.beside(self._stage.arriving(missing))]
            self._stage.relayout(layers, [of.tensors for of in arriving])
            self._optimizer.relayout(arriving)
            self._participant.relayout(self._stage.layout.ids)
        self.relaid()

    def _accept(self) -> None:
        while not self._closed:
            with suppress(TransferError):  # no donor has connected
                stream = self._receiver.accept(timeout=PATIENCE, idle=PATIENCE)
                threading.Thread(target=self._follow, args=(stream,), name="follow", daemon=True).start()

    def _follow(self, stream: Stream) -> None:
        session: _Session | None = None  # session of the latest message
        try:
            with stream:
                while True:
                    about, tensors = stream.receive()
                    session = self._expected(about.session, stream)
                    if session is None:
                        return  # the donor was replaced
                    with self._taking:
                        if session.over or (not session.member and self._participant.generation >= 0):
                            return  # the session has ended: this worker now reduces the gradients itself
                        complete = self._take(session, about, tensors)
                    if complete and isinstance(about, EarlyGradient):
                        self._send(Prepared(about.generation, about.step, about.session))
                    elif complete:
                        self._send(Synced(about.step, about.session))
        except Full as error:
            self._send(error.message)
        except TransferError as error:
            _log.info("lost the donor: %s", error)
            if session is not None and not session.over:
                self._send(StreamLost(session.number))

    def _expected(self, number: int, stream: Stream) -> _Session | None:
        """The session with this number; None if a newer one has begun. Waits if the donor connects before `expect`."""
        with self._changed:
            self._changed.wait_for(lambda: self._session.number >= number or self._closed)
            if self._session.number != number:
                return None
            if all(of is not stream for of in self._session.streams):
                self._session.streams.append(stream)
            return self._session

    def _take(self, session: _Session, about: About, tensors: dict[str, Tensor]) -> bool:
        """Applies a message. Returns whether all units have reached `about.step`; for an early gradient, whether they
        will reach it as soon as the commit arrives."""
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
        if session.member:
            beside = self._optimizer.beside(self._stage.arriving(session.layers))
            if session.understudy is not None:
                session.understudy.units = beside.tensors.layout.ids
                self.follows(beside.tensors.layout)
            return beside
        if session.layers != [*self._stage.layout.layers]:
            self._relayout(session.layers, [])
        self._optimizer.start_following()
        return self._optimizer

    # -- understudies ------------------------------------------------------------------------------------------

    def _keep(self, session: _Session, about: EarlyGradient, gradient: Tensor) -> bool:
        """Keeps a gradient until the commit of its step. Returns whether the gradients of all earlier uncommitted steps
        have arrived too, so that only commits are missing.

        If the step is repeated, computes the exponents from the gradient of the previous attempt, as the donor does."""
        assert session.understudy is not None and session.optimizer is not None
        tensors, nothing = session.optimizer.tensors, torch.empty(0)
        if about.attempt:
            self._apply_due(session)
            tensors.gradients.begin_again(about.attempt, session.early.get(about.step))
        session.early[about.step] = Reduced(gradient.to(tensors.device), nothing, nothing, [], about.finite)
        with self._changed:
            return session.understudy.received(about.step, about.generation)

    def _apply_due(self, session: _Session) -> None:
        """Applies all commits that are next in order and whose gradients have arrived."""
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
