"""Brings a worker's units up to date while the job continues. The worker copies their committed state, then applies
each step's gradients, until a commit makes it a holder.

    donations = Donations(optimizer, gradients, token, inject)        # on every worker
    session.donate = donations.asked
    executor.on_commit.append(donations.committed)

    following = Following(optimizer, gradients, participant, token, interface, inject)   # on the returning worker
    following.start(synced=lambda step, session: ...)                 # donors connect to following.address

The coordinator assigns units to donors (`Donate`). A thread of each donor copies and sends the assigned units in parts
of a few units. After each commit the thread sends the step's reduced gradient for the units sent so far. The follower's
units may have the states of different steps. When all of them have the state of the same step, the follower can become
a member.

A donor keeps no copy of its state and never waits for a follower. Its optimizer waits at most until one part is copied
(a few milliseconds, see `PART`). If a stream breaks, the coordinator starts another session, with other donors if one
died. At the first message of a session, the follower closes the streams of older sessions, because their donors may
have stopped responding. If more than `WAITING` gradients are queued for a follower, the donor drops them and restarts
from its newest state.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from recycle_pp.comm.transfer import Receiver, Stream, TransferError, connect
from recycle_pp.numerics.gradients import Gradients, Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.participant import Participant
from recycle_pp.wire.messages.lifecycle import Donate
from recycle_pp.wire.messages.states import StatePart, StepGradient
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.units import UnitId, packed, unpacked

Inject = Callable[[str, int], None]  # callback for fault injection: (moment, step)
_log = logging.getLogger(__name__)
# Maximum number of elements of a part in each vector, unless a single unit has more. Such a part has 12 MB of state and
# is copied in about 3 ms.
PART = 1 << 20
# Maximum number of queued gradients per follower. The limit is not in bytes, because a single gradient has a third of
# the state's size. With two queued gradients, a follower with complete state can fall one step behind and still catch
# up.
WAITING = 2
PATIENCE = 3600.0  # seconds of silence before a stream times out; a step may take long, and heartbeats detect deaths


class _Step(NamedTuple):
    """A commit as sent to followers. reduced: the gradient; None if the update was skipped."""

    step: int
    scale: float | None
    reduced: Reduced | None
    exponents: Tensor


class Donations:
    """The donor's side. `asked` runs in the listening thread, `committed` in the executor. Neither blocks."""

    def __init__(self, optimizer: StageOptimizer, gradients: Gradients, token: str, inject: Inject) -> None:
        self._optimizer, self._gradients, self._token, self._inject = optimizer, gradients, token, inject
        self._lock = threading.Lock()
        self._newest: _Step | None = None  # without its gradient
        self._asked: list[Donate] = []  # requests that arrived before the first commit
        self._donors: list[_Donor] = []

    def asked(self, message: Donate) -> None:
        """Starts sending units to the worker at the address in the message."""
        with self._lock:
            if self._newest is None:
                self._asked.append(message)
            else:
                self._begin(message, self._newest)

    def committed(self, commit: Commit, reduced: Reduced) -> None:
        """Queues the step for all followers. Call it after the optimizer has applied the step."""
        gradient = None if commit.scale is None else reduced
        step = _Step(commit.step, commit.scale, gradient, self._gradients.exponents)
        with self._lock:
            self._newest = step._replace(reduced=None)
            self._donors = [donor for donor in self._donors if donor.is_alive()]
            for donor in self._donors:
                donor.committed(step)
            asked, self._asked = self._asked, []
            for message in asked:
                self._begin(message, self._newest)

    def _begin(self, message: Donate, newest: _Step) -> None:
        self._donors.append(_Donor(self._optimizer, self._gradients, message, self._token, newest))
        self._inject("donate", newest.step + 1)  # the step in progress


class _Donor(threading.Thread):
    """Sends to one follower until the stream breaks, or until this worker no longer holds one of the units."""

    def __init__(
        self, optimizer: StageOptimizer, gradients: Gradients, message: Donate, token: str, begin: _Step
    ) -> None:
        super().__init__(name="donate", daemon=True)
        self._optimizer, self._gradients, self._message, self._token = optimizer, gradients, message, token
        self._units = [gradients.layout.number(unit) for unit in unpacked(message.units)]
        self._changed = threading.Condition()
        self._waiting: deque[_Step] = deque()  # commits that have not been sent
        self._newest = begin  # the newest commit sent
        self._sent = 0  # number of units sent
        self.start()

    def committed(self, step: _Step) -> None:
        with self._changed:
            self._waiting.append(step)
            if len(self._waiting) > WAITING:  # too slow: restart from the newest state
                self._waiting.clear()
                self._newest, self._sent = step, 0
            self._changed.notify()

    def run(self) -> None:
        address = self._message.address
        assert address is not None  # set by the coordinator
        try:
            with connect(address, self._token, idle=PATIENCE) as stream:
                while True:
                    self._send_next(stream)
        except TransferError as error:
            _log.info("stopped sending state to %s: %s", address, error)
        except KeyError as error:
            _log.info("stopped sending state: this worker no longer holds unit %s", error)

    def _send_next(self, stream: Stream) -> None:
        """Sends the next commit or the next part of the state. If there is neither, waits for a commit."""
        with self._changed:
            sent = self._sent
            step = self._waiting.popleft() if self._waiting else None
            newest = step or self._newest
            self._newest = newest
            if step is None and sent == len(self._units):
                self._changed.wait()
                return
        session, of, ids = self._message.session, self._message.of, self._gradients.layout.ids
        if step is not None:
            if sent:  # before the first part the follower has no units to update
                units = self._units[:sent]
                names = packed(ids[unit] for unit in units)
                gradient = {} if step.reduced is None else {"gradient": self._gradient(step.reduced, units)}
                stream.send(StepGradient(session, step.step, names, of, step.scale), gradient | _sent(step))
            return
        units = self._part(sent)
        part = self._optimizer.copy(units, newest=newest.step)
        if part is None:  # the state is speculative, or includes a step that was not sent
            with self._changed:
                self._changed.wait_for(lambda: self._waiting, timeout=0.001)
            return
        names = packed(ids[unit] for unit in units)
        stream.send(StatePart(session, newest.step, names, of), part | _sent(newest))
        with self._changed:
            if self._sent == sent and self._newest is newest:  # otherwise `committed` has restarted the transfer
                self._sent = sent + len(units)

    def _part(self, first: int) -> list[int]:
        """The units from index `first` on, up to PART elements in total, but at least one unit."""
        sizes, size = self._gradients.layout.unit_sizes, 0
        units: list[int] = []
        for unit in self._units[first:]:
            size += sizes[unit]
            if units and size > PART:
                break
            units.append(unit)
        return units

    def _gradient(self, reduced: Reduced, units: Sequence[int]) -> Tensor:
        if reduced.units is None and units == list(range(len(units))):
            return reduced.flat[: self._gradients.layout.span(range(len(units))).stop]
        grads = self._gradients.grads(reduced)
        return torch.cat([grads[unit] for unit in units])


class Following:
    """The follower's side. The constructor starts to listen."""

    def __init__(
        self,
        optimizer: StageOptimizer,
        gradients: Gradients,
        participant: Participant,
        token: str,
        interface: str,
        inject: Inject,
    ) -> None:
        self._optimizer, self._gradients, self._participant = optimizer, gradients, participant
        self._inject = inject
        self._receiver = Receiver(interface, token)
        self._taking = threading.Lock()
        self._session = -1  # the newest session from which a message has arrived
        self._streams: list[tuple[int, Stream]] = []  # streams of that session
        self._have: dict[UnitId, int] = {}  # unit -> newest step in its state
        self._exponents = -1  # newest step in the exponents
        self._closed = False
        self.address = self._receiver.address

    def start(self, synced: Callable[[int, int], None]) -> None:
        """Receives states and steps in threads, until this worker is a member.

        synced(step, session): called each time all units of the session have the state after `step`"""
        threading.Thread(target=self._accept, args=(synced,), name="join", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._receiver.close()

    def _accept(self, synced: Callable[[int, int], None]) -> None:
        while self._participant.generation < 0 and not self._closed:
            with suppress(TransferError):  # no donor has connected
                stream = self._receiver.accept(timeout=PATIENCE, idle=PATIENCE)
                threading.Thread(target=self._follow, args=(stream, synced), name="follow", daemon=True).start()

    def _follow(self, stream: Stream, synced: Callable[[int, int], None]) -> None:
        try:
            with stream:
                while True:
                    about, tensors = stream.receive()
                    with self._taking:
                        if about.session < self._session or self._participant.generation >= 0:
                            return  # the donor was replaced, or this worker is a member and reduces gradients itself
                        if all(of is not stream for _, of in self._streams):
                            self._streams.append((about.session, stream))
                        complete = self._take(about, tensors)
                    if complete:
                        synced(about.step, about.session)
        except TransferError as error:
            _log.info("lost the donor: %s", error)  # the coordinator starts another session

    def _take(self, about: StatePart | StepGradient, tensors: dict[str, Tensor]) -> bool:
        """Applies a message. Returns whether all units now have the state after `about.step`."""
        if about.session > self._session:
            self._begin(about)
        if (exponents := tensors.pop("exponents", None)) is not None and about.step >= self._exponents:
            self._gradients.take_exponents(exponents)
            self._exponents = about.step
        names, layout = unpacked(about.units), self._gradients.layout
        units = [layout.number(unit) for unit in names]
        if isinstance(about, StatePart):
            self._optimizer.take(units, tensors)
        elif about.scale is not None:
            nothing = torch.empty(0)
            reduced = Reduced(tensors["gradient"], nothing, nothing, [], True, units=tuple(units))
            self._optimizer.follow(reduced, about.step, about.scale)
        self._have |= dict.fromkeys(names, about.step)
        if len(self._have) < about.of or set(self._have.values()) != {about.step}:
            return False
        self._participant.caught_up(about.step, self._have)
        return True

    def _begin(self, about: StatePart | StepGradient) -> None:
        """Starts a session. Closes the streams of older sessions, because their donors may have stopped responding."""
        for session, stream in self._streams:
            if session < about.session:
                stream.close()
        self._streams = [(session, stream) for session, stream in self._streams if session == about.session]
        self._session, self._have, self._exponents = about.session, {}, -1
        self._optimizer.start_following()
        self._inject("join", about.step)


def _sent(step: _Step) -> dict[str, Tensor]:
    """The exponents. Every message includes them, because they are much smaller than the units."""
    return {"exponents": step.exponents} if len(step.exponents) else {}
