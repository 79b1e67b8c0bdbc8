"""A donor sends the state of its units to a follower while it continues to train (`state.follow`).

    donations = Donations(optimizer, gradients, token, inject, send)        # on every worker
    session.donate = donations.asked
    executor.on_decision.append(donations.committed)
    executor.on_vote.append(donations.voting)

The coordinator assigns units to donors (`Donate`). A thread of each donor copies and sends the assigned units, a few at
a time (a part). After each commit the thread sends the step's reduced gradient for the units sent so far. It does not
wait until the donor has updated its own state, because all workers wait for a joiner that lacks only this step. Units
are named by their layers, so a donor continues if other layers of its stage move.

An understudy is a follower that may take over another stage at any time. Once it has received all units, the donor
sends it each step's gradient before the donor votes. The coordinator sends the commit to the understudy.

A donor keeps no copy of its state and never waits for a follower. The donor's optimizer waits at most until one part is
copied (a few milliseconds, see `PART`). If more than `WAITING` gradients are queued for a follower, the donor drops
them and restarts from its newest state.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from recycle_pp.comm.transfer import Stream, TransferError, connect
from recycle_pp.numerics.gradients import Gradients, Reduced
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.wire.messages.lifecycle import Address, Donate, StreamLost
from recycle_pp.wire.messages.states import EarlyGradient, StatePart, StepGradient
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.units import UnitId, packed, unpacked

Inject = Callable[[str, int], None]  # callback for fault injection: (moment, step)
PATIENCE = 3600.0  # seconds of silence before a stream times out; a step may take long, and heartbeats detect deaths
EXPONENTS = "exponents."  # in a message, the tensor "exponents.3" contains the exponents of layer 3
_log = logging.getLogger(__name__)
# Maximum number of parameters in a part, unless a single unit has more. A part of this size has 12 MB of state (float32
# masters and two moments) and is copied in about 3 ms.
PART = 1 << 20
# Maximum number of queued gradients per follower. It is not a limit in bytes, because a single gradient is a third as
# large as the state, so such a limit might not admit even one. With two queued gradients, a follower with complete
# state can fall one step behind and still catch up.
WAITING = 2


class _Step(NamedTuple):
    """A commit as sent to followers.

    reduced    the gradient; None if the update was skipped
    exponents  layer -> its exponents after the step
    layout     layout of `reduced`; a later step may have another layout
    """

    step: int
    scale: float | None
    reduced: Reduced | None
    exponents: dict[int, Tensor]
    layout: Layout


class _Early(NamedTuple):
    """The gradient of a step, sent before the donor votes on this step. attempt: see `Attempt.coarser`"""

    step: int
    generation: int
    attempt: int
    reduced: Reduced
    layout: Layout


class Donations:
    """The donor's side. `asked` runs in the listening thread, `committed` and `voting` run in the executor's thread. No
    method blocks.

    send       send(message): sends `StreamLost` to the coordinator if a stream breaks or cannot be opened, or if this
               worker does not hold a unit that it was asked for
    suspicion  seconds after which a stream breaks if the follower's machine does not answer; None: never
    """

    def __init__(
        self,
        optimizer: StageOptimizer,
        gradients: Gradients,
        token: str,
        inject: Inject,
        send: Callable[[Message], None],
        suspicion: float | None = None,
    ) -> None:
        self._optimizer, self._gradients, self._inject, self._send = optimizer, gradients, inject, send
        self._open = partial(connect, token=token, idle=PATIENCE, keepalive=suspicion)
        self._lock = threading.Lock()
        self._newest: _Step | None = None  # the latest commit, without its gradient
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
        """Queues the step for all followers. Call it when the exponents are those after the step. The optimizer may
        apply the step later, except if `commit.outer` changes the state."""
        gradient = None if commit.scale is None else reduced
        gradients = self._gradients
        step = _Step(commit.step, commit.scale, gradient, gradients.exponents_of_layers(), gradients.layout)
        with self._lock:
            self._newest = step._replace(reduced=None)
            self._donors = [donor for donor in self._donors if donor.is_alive()]
            for donor in self._donors:
                if commit.outer is not None and commit.outer.changes_state:
                    donor.restart(step)  # the outer step has changed the state too, so gradients are not enough
                else:
                    donor.committed(step, commit.generation)
            asked, self._asked = self._asked, []
            for message in asked:
                self._begin(message, self._newest)

    def voting(self, step: int, generation: int, attempt: int, reduced: Reduced) -> None:
        """Queues a step's gradient for understudies. Call it before the vote in this generation."""
        with self._lock:
            for donor in self._donors:
                donor.voting(_Early(step, generation, attempt, reduced, self._gradients.layout))

    def relayout(self) -> None:
        """Adopts the new layout after layers have moved. Call it before the next commit. Transfers of units that this
        worker still holds continue."""
        with self._lock:
            if self._newest is not None:
                of = self._gradients
                self._newest = self._newest._replace(exponents=of.exponents_of_layers(), layout=of.layout)

    def close(self) -> None:
        """Ends all transfers, because this worker now runs another stage."""
        with self._lock:
            for donor in self._donors:
                donor.close()

    def _begin(self, message: Donate, newest: _Step) -> None:
        self._donors.append(_Donor(self._optimizer, message, newest, self._open, self._send))
        self._inject("donate", newest.step + 1)  # the step in progress


class _Donor(threading.Thread):
    """Sends to one follower until the stream breaks, or until this worker no longer holds one of the units (their layer
    may have moved to another stage)."""

    def __init__(
        self,
        optimizer: StageOptimizer,
        message: Donate,
        begin: _Step,
        open_stream: Callable[[Address], Stream],
        report: Callable[[Message], None],
    ) -> None:
        super().__init__(name="donate", daemon=True)
        self._optimizer, self._message, self._open, self._report = optimizer, message, open_stream, report
        self._units = unpacked(message.units)
        self._changed = threading.Condition()
        self._waiting: deque[_Step | _Early] = deque()  # commits and gradients that have not been sent
        self._early = -1, -1  # (step, generation) of the latest gradient that was queued before the vote
        self._newest = begin  # the last commit sent
        self._sent = 0  # number of units sent
        self._closed = False
        self.start()

    def voting(self, early: _Early) -> None:
        with self._changed:
            # The gradient of a repeated step is sent early only if that of the previous attempt was, because the
            # follower computes the exponents from the previous attempt.
            follows = early.attempt == 0 or self._early[0] == early.step
            if self._message.early and self._sent == len(self._units) and follows:
                self._early = early.step, early.generation
                self._waiting.append(early)
                self._changed.notify()

    def committed(self, step: _Step, generation: int) -> None:
        with self._changed:
            if self._early != (step.step, generation):
                self._waiting.append(step)
            if len(self._waiting) > WAITING:  # the follower is too slow
                self._restart(step)
            self._changed.notify()

    def restart(self, step: _Step) -> None:
        """Sends the whole state after this step again."""
        with self._changed:
            self._restart(step)
            self._changed.notify()

    def _restart(self, step: _Step) -> None:
        self._waiting.clear()
        self._newest, self._sent = step, 0

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def run(self) -> None:
        address = self._message.address
        assert address is not None  # set by the coordinator
        try:
            with self._open(address) as stream:
                while not self._closed:
                    self._send_next(stream)
        except TransferError as error:
            _log.info("stopped sending state to %s: %s", address, error)
            self._report(StreamLost(self._message.session))
        except KeyError as error:  # the unit has moved to another stage, or has not arrived yet
            _log.info("stopped sending state: this worker does not hold unit %s", error)
            self._report(StreamLost(self._message.session))

    def _send_next(self, stream: Stream) -> None:
        """Sends the next queued commit or gradient, else the next part of the state. If nothing is left, waits."""
        with self._changed:
            sent = self._sent
            step = self._waiting.popleft() if self._waiting else None
            newest = self._newest = step if isinstance(step, _Step) else self._newest
            if step is None and sent == len(self._units):
                self._changed.wait()
                return
        session, of = self._message.session, self._message.of
        if isinstance(step, _Early):
            about = EarlyGradient(session, step.step, step.generation, step.attempt, step.reduced.finite)
            stream.send(about, {"gradient": _gradient(step.reduced, step.layout, self._units)})
            return
        if step is not None:
            if sent:  # otherwise the follower has no units to update yet
                units = self._units[:sent]
                gradient = {} if step.reduced is None else {"gradient": _gradient(step.reduced, step.layout, units)}
                stream.send(StepGradient(session, step.step, packed(units), of, step.scale), gradient | _sent(step))
            return
        units = self._part(sent, newest.layout)
        part = self._optimizer.copy(units, newest=newest.step)
        if part is None:  # not the state after the last commit sent: speculative, older or newer
            with self._changed:
                self._changed.wait_for(lambda: self._waiting, timeout=0.001)
            return
        stream.send(StatePart(session, newest.step, packed(units), of), part | _sent(newest))
        with self._changed:
            if self._sent == sent and self._newest is newest:  # otherwise `committed` has restarted the transfer
                self._sent = sent + len(units)

    def _part(self, first: int, layout: Layout) -> list[UnitId]:
        """The next units from index `first` on: up to PART parameters in total, but at least one unit."""
        sizes, size = layout.unit_sizes, 0
        units: list[UnitId] = []
        for unit in self._units[first:]:
            size += sizes[layout.number(unit)]
            if units and size > PART:
                break
            units.append(unit)
        return units


def _gradient(reduced: Reduced, layout: Layout, names: Sequence[UnitId]) -> Tensor:
    units = [layout.number(name) for name in names]
    if reduced.units is None and units == list(range(len(units))):
        return reduced.flat[: layout.span(range(len(units))).stop]
    grads = layout.by_unit(reduced.flat, reduced.units)
    return torch.cat([grads[unit] for unit in units])


def _sent(step: _Step) -> dict[str, Tensor]:
    """The exponents of the donor's layers: name in a message -> tensor. Every message includes the exponents of all
    layers, because they are much smaller than the units."""
    return {f"{EXPONENTS}{layer}": of for layer, of in step.exponents.items() if len(of)}
