"""A worker comes back: a peer streams its committed state to it while both, and the job, go on.

    donations = Donations(optimizer, gradients, token, strike)        # on every worker
    session.donate = donations.asked
    executor.on_commit.append(donations.committed)

    joining = Joining(optimizer, gradients, participant, token, interface, strike)   # on the returning worker
    joining.start(synced=lambda step, session: ...)                   # at joining.address

The state (parameters and both moments) is sent part by part, from its first element to its last, by a thread that
copies one part at a time. After each commit the step's reduced gradient follows, of those elements that have been sent,
and the joiner applies the very same update to them: what it has is always the state after one step, and once it has all
it is a peer. So the donor keeps no copy of its state, waits for nobody, and its optimizer is delayed by the copy of one
part at most (`PART`: a few milliseconds). If either side dies the stream breaks and nothing else happens: the
coordinator finds another donor. A new donor takes the place of the one before at once, which may hang rather than be
dead. A joiner so slow that more than `WAITING` gradients wait for it begins again with the newest state: nothing grows
without end.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from recycle_pp.comm.transfer import Receiver, Stream, TransferError, connect
from recycle_pp.numerics.gradients import Gradients, Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.participant import Participant
from recycle_pp.wire.messages.states import StatePart, StepGradient
from recycle_pp.wire.messages.workers import Address, Commit, Donate

Strike = Callable[[str, int], None]  # an injected fault may strike here: (moment, step)
_log = logging.getLogger(__name__)
PART = 1 << 20  # elements of each vector in a part: 12 MB of state, copied in some 3 ms
# Gradients that wait while one is on its way. A gradient is a third of the state, so a bound of a fifth of the state
# would stop every joiner; with two waiting steps a joiner that has all may be late by one step and catch up.
WAITING = 2
VECTORS = ("parameters", "means", "squares")
PATIENCE = 3600.0  # seconds that a stream may be silent: a step may take long, and heartbeats see to the dead


class _Step(NamedTuple):
    """A commit, as it is told to a joiner. gradient: flat, read only; None where the update was skipped."""

    step: int
    scale: float | None
    gradient: Tensor | None
    exponents: Tensor


class Donations:
    """`asked` comes from the listening thread, `committed` from the executor; neither waits for a joiner."""

    def __init__(self, optimizer: StageOptimizer, gradients: Gradients, token: str, strike: Strike) -> None:
        self._optimizer, self._gradients, self._token, self._strike = optimizer, gradients, token, strike
        self._lock = threading.Lock()
        self._newest: _Step | None = None  # without its gradient
        self._asked: list[Donate] = []  # before the first commit
        self._donors: list[_Donor] = []

    def asked(self, message: Donate) -> None:
        """The coordinator's `donate`: feed the worker at that address, from now on."""
        with self._lock:
            if self._newest is None:
                self._asked.append(message)
            else:
                self._begin(message, self._newest)

    def committed(self, commit: Commit, reduced: Reduced) -> None:
        """The state is that after `commit.step`."""
        gradient = None if commit.scale is None else reduced.flat
        step = _Step(commit.step, commit.scale, gradient, self._gradients.exponents)
        with self._lock:
            self._newest = step._replace(gradient=None)
            self._donors = [donor for donor in self._donors if donor.is_alive()]
            for donor in self._donors:
                donor.committed(step)
            asked, self._asked = self._asked, []
            for message in asked:
                self._begin(message, self._newest)

    def _begin(self, message: Donate, newest: _Step) -> None:
        assert message.address is not None  # the coordinator has put it in
        self._donors.append(_Donor(self._optimizer, message.address, self._token, message.session, newest))
        self._strike("donate", newest.step + 1)  # the step under way


class _Donor(threading.Thread):
    """Feeds one joiner until the stream breaks."""

    def __init__(self, optimizer: StageOptimizer, address: Address, token: str, session: int, begin: _Step) -> None:
        super().__init__(name="donate", daemon=True)
        self._optimizer, self._address, self._token, self._session = optimizer, address, token, session
        self._changed = threading.Condition()
        self._waiting: deque[_Step] = deque()  # commits that the joiner has not been told of
        self._told = begin  # the newest that it has
        self._sent = 0  # elements of the state
        self.start()

    def committed(self, step: _Step) -> None:
        with self._changed:
            self._waiting.append(step)
            if len(self._waiting) > WAITING:  # too slow: the state of now is worth more than what has led to it
                self._waiting.clear()
                self._told, self._sent = step, 0
            self._changed.notify()

    def run(self) -> None:
        try:
            with connect(self._address, self._token, idle=PATIENCE) as stream:
                while True:
                    self._send_next(stream)
        except TransferError as error:
            _log.info("the joiner at %s takes no more: %s", self._address, error)

    def _send_next(self, stream: Stream) -> None:
        """A commit, or the next part of the state, or nothing for now."""
        with self._changed:
            start = self._sent
            step = self._waiting.popleft() if self._waiting else None
            self._told = told = step or self._told
            if step is None and start == self._optimizer.size:
                self._changed.wait()
                return
        if step is not None:
            if start:  # before the first part there is nothing to update
                gradient = {} if step.gradient is None else {"gradient": step.gradient[:start]}
                stream.send(StepGradient(self._session, step.step, start, step.scale), gradient | _sent(step))
            return
        stop = min(start + PART, self._optimizer.size)
        part = self._optimizer.part(start, stop, newest=told.step)
        if part is None:  # a step is in it that is not told yet, or not agreed on
            with self._changed:
                self._changed.wait_for(lambda: self._waiting, timeout=0.001)
            return
        about = StatePart(self._session, told.step, start, stop)
        stream.send(about, dict(zip(VECTORS, part, strict=True)) | _sent(told))
        with self._changed:
            if self._sent == start and self._told is told:  # else it begins again
                self._sent = stop


class Joining:
    """Listens from the start; `address` is where donors connect."""

    def __init__(
        self,
        optimizer: StageOptimizer,
        gradients: Gradients,
        participant: Participant,
        token: str,
        interface: str,
        strike: Strike,
    ) -> None:
        self._optimizer, self._gradients, self._participant = optimizer, gradients, participant
        self._strike = strike
        self._receiver = Receiver(interface, token)
        self._taking = threading.Lock()
        self._stream: Stream | None = None  # from the newest donor
        self._closed = False
        self.address = self._receiver.address

    def start(self, synced: Callable[[int, int], None]) -> None:
        """Takes states and steps in threads, until this worker is a member; `synced(step, session)` whenever its whole
        state is that after `step`."""
        threading.Thread(target=self._accept, args=(synced,), name="join", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._receiver.close()

    def _accept(self, synced: Callable[[int, int], None]) -> None:
        while self._participant.generation < 0 and not self._closed:
            with suppress(TransferError):  # nobody came
                stream = self._receiver.accept(timeout=PATIENCE, idle=PATIENCE)
                with self._taking:
                    before, self._stream = self._stream, stream
                if before is not None:
                    before.close()
                threading.Thread(target=self._follow, args=(stream, synced), name="follow", daemon=True).start()

    def _follow(self, stream: Stream, synced: Callable[[int, int], None]) -> None:
        try:
            with stream:
                while True:
                    about, tensors = stream.receive()
                    with self._taking:
                        if self._stream is not stream or self._participant.generation >= 0:
                            return  # of a donor that has been replaced; or a member, which has these gradients itself
                        have = self._take(about, tensors)
                    if have == self._optimizer.size:
                        synced(about.step, about.session)
        except TransferError as error:
            _log.info("the donor is gone: %s", error)  # the coordinator finds another one

    def _take(self, about: StatePart | StepGradient, tensors: dict[str, Tensor]) -> int:
        """Applies a parcel; how many elements of the state, from the first on, are then as after `about.step`."""
        if (exponents := tensors.pop("exponents", None)) is not None:
            self._gradients.take_exponents(exponents)
        if isinstance(about, StatePart):
            if about.start == 0:
                self._strike("join", about.step)
            self._optimizer.put_part(about.start, list(tensors.values()))
            have = about.stop
        else:
            have = about.start
            if about.scale is not None:
                self._optimizer.step_first(tensors["gradient"], about.step, about.scale)
        if have == self._optimizer.size:
            self._participant.applied = self._participant.committed = about.step
        return have


def _sent(step: _Step) -> dict[str, Tensor]:
    """Every message has them: a few for a block of thousands of elements."""
    return {"exponents": step.exponents} if len(step.exponents) else {}
