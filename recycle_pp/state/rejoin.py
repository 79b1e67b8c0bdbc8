"""A worker comes back: a peer gives it the committed state, then every later step's reduced gradients.

    donations = Donations(optimizer, token, strike)        # on every worker
    session.handlers["donate"] = donations.asked
    executor.on_commit.append(donations.committed)         # copies the state, feeds what follows

    joining = Joining(optimizer, participant, stage, token, interface, strike)     # on the returning worker
    joining.start(synced=lambda step, session: ...)        # at joining.address

The donor copies its state between two steps and streams it from a thread of its own while it trains on; what it commits
meanwhile follows as gradients. The joiner applies the very same updates, so it ends with the same bits. If either side
dies the stream breaks and nothing else happens: the coordinator finds another donor. A new donor takes the place of the
one before at once, which may hang rather than be dead. A joiner that is too slow gets the state anew instead of a
backlog of gradients that grows without end.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from recycle_pp.comm.transfer import Receiver, Stream, TransferError, connect
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.participant import Commit, Participant

Json = dict[str, Any]
Strike = Callable[[str, int], None]  # an injected fault may strike here: (moment, step)
Parcel = tuple[Json, dict[str, Tensor]]  # what is said about the tensors, and the tensors
_log = logging.getLogger(__name__)
BACKLOG = 16  # parcels that wait for a joiner: a state is worth three gradients, so with more the line is too slow
PATIENCE = 3600.0  # seconds that a stream may be silent: a step may take long, and heartbeats see to the dead


class Donations:
    """`asked` comes from the listening thread, `committed` from the executor."""

    def __init__(self, optimizer: StageOptimizer, token: str, strike: Strike) -> None:
        self._optimizer, self._token, self._strike = optimizer, token, strike
        self._asked: queue.SimpleQueue[Json] = queue.SimpleQueue()
        self._lines: list[_Line] = []

    def asked(self, message: Json) -> None:
        """The coordinator's `donate`: from the next commit on, feed the worker at that address."""
        self._asked.put(message)

    def committed(self, commit: Commit, reduced: Reduced) -> None:
        self._lines = [line for line in self._lines if line.alive]
        gradients = {str(i): tensor.cpu() for i, tensor in enumerate(reduced.to_tensors())} if self._lines else {}
        for line in self._lines:
            if line.waiting() < BACKLOG:
                line.put(({"kind": "step", "step": commit.step, "scale": commit.scale}, gradients))
            else:
                line.begin(commit.step, self._state())
        while not self._asked.empty():
            message = self._asked.get()
            line = _Line(tuple(message["address"]), self._token, message["session"])
            line.begin(commit.step, self._state())
            self._lines.append(line)
            self._strike("donate", commit.step)

    def _state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._optimizer.state().items()}


class _Line(threading.Thread):
    """A thread that sends parcels to one joiner until the stream breaks."""

    def __init__(self, address: tuple[str, int], token: str, session: int) -> None:
        super().__init__(name="donate", daemon=True)
        self._address, self._token, self._session = address, token, session
        self._parcels: queue.SimpleQueue[Parcel] = queue.SimpleQueue()
        self.alive = True
        self.start()

    def waiting(self) -> int:
        return self._parcels.qsize()

    def begin(self, step: int, state: dict[str, Tensor]) -> None:
        """With this state, whatever still waits."""
        with suppress(queue.Empty):
            while True:
                self._parcels.get_nowait()
        self.put(({"kind": "state", "step": step, "session": self._session}, state))

    def put(self, parcel: Parcel) -> None:
        self._parcels.put(parcel)

    def run(self) -> None:
        try:
            with connect(self._address, self._token, idle=PATIENCE) as stream:
                while True:
                    stream.send(*self._parcels.get())
        except TransferError as error:
            _log.info("the joiner at %s takes no more: %s", self._address, error)
        finally:
            self.alive = False


class Joining:
    """Listens from the start; `address` is where donors connect."""

    def __init__(
        self,
        optimizer: StageOptimizer,
        participant: Participant,
        stage: Stage,
        token: str,
        interface: str,
        strike: Strike,
    ) -> None:
        self._optimizer, self._participant, self._stage, self._strike = optimizer, participant, stage, strike
        self._receiver = Receiver(interface, token)
        self._taking = threading.Lock()
        self._stream: Stream | None = None  # from the newest donor
        self._closed = False
        self.address = self._receiver.address

    def start(self, synced: Callable[[int, int], None]) -> None:
        """Takes states and steps in threads, until this worker is a member; `synced(step, session)` after each."""
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
        session = -1
        try:
            with stream:
                while True:
                    about, tensors = stream.receive()
                    with self._taking:
                        if self._stream is not stream or self._participant.generation >= 0:
                            return  # of a donor that has been replaced; or a member, which has these gradients itself
                        self._take(about, tensors)
                    session = about.get("session", session)
                    synced(about["step"], session)
        except TransferError as error:
            _log.info("the donor is gone: %s", error)  # the coordinator finds another one

    def _take(self, about: Json, tensors: dict[str, Tensor]) -> None:
        if about["kind"] == "state":
            self._optimizer.load(tensors)
            self._strike("join", about["step"])
        else:
            reduced = Reduced.from_tensors([tensor.to(self._stage.device) for tensor in tensors.values()])
            if about["scale"] is None:
                self._stage.gradients.follow(reduced)
            else:
                self._optimizer.step(reduced, about["step"], about["scale"])
        self._participant.applied = self._participant.committed = about["step"]
