"""A worker's session with the coordinator: a listening thread, and the calls of the executor.

    session = Session(client, participant, links, store)
    session.start()
    orders = session.orders()         # blocks until plan and links of this generation are ready, or until a commit
                                      # must be applied; may return None
    session.plays(worker)             # after this process has taken over another worker
    session.check(orders)             # raises Superseded if the orders are no longer valid
    commit = session.wait_commit(orders)

The listening thread handles messages that must not wait for compute. It answers an announcement with a report, breaks
the links to wake a blocked executor, and builds the next generation's links in a separate thread. If the coordinator is
lost, the executor continues with its orders until the next coordinator announces a generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from recycle_schedules import Action, Worker

from recycle_pp.comm.links import Links
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.waiting import LinkBroken
from recycle_pp.protocol.participant import Orders, Participant
from recycle_pp.wire.messages.generations import Adopt, Announce, Broken, Resumed, SteadyPlan
from recycle_pp.wire.messages.islands import RoundGoal
from recycle_pp.wire.messages.lifecycle import Donate, Exit, Expect, Leave, Profile, StoreValues
from recycle_pp.wire.messages.members import Assignment
from recycle_pp.wire.messages.saving import Assemble, Save, SaveFailed, Seal, Upload
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import State

from .activity import Doing
from .coordinator_client import CoordinatorClient
from .worker_log import WorkerLog

OF_STAGE = Donate, Expect, Save, Assemble  # messages about the stage that the process runs


class Superseded(Exception):
    """The orders are invalid, because the workers wait for a new generation or the job has ended."""


class Session:
    """A worker's session with the coordinator.

    lock     guards `participant`
    changed  notified of every change for which the executor may wait
    """

    def __init__(
        self,
        client: CoordinatorClient,
        participant: Participant,
        links: Links,
        store: ControlStore,
        doing: Doing | None = None,
    ) -> None:
        self.participant = participant
        self.links = links
        self.doing = doing or Doing()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.times: dict[str, float] = {}  # phase of the current generation ("announced", ...) -> its end, monotonic
        self.busy: Callable[[], float] = lambda: 0.0  # seconds until the executor can start its next op
        self.moment: Callable[[str], None] = lambda name: None  # called during a recovery, see faults.MOMENTS
        # The worker sets these seven handlers before the first request.
        self.donate: Callable[[Donate], None] = _not_yet
        self.expect: Callable[[Expect], None] = _not_yet
        self.save: Callable[[Save], None] = _not_yet
        self.assemble: Callable[[Assemble], None] = _not_yet
        self.upload: Callable[[Upload | Seal], None] = _not_yet
        self.profile: Callable[[Profile], None] = _not_yet
        self.aim: Callable[[RoundGoal], None] = _not_yet
        self._handlers: dict[type[Message], Callable[[Any], None]] = {
            Announce: self._announced,
            Adopt: self._adopt,
            SteadyPlan: self._plan,
            Commit: self._commit,
            StoreValues: self._deliver,
            Donate: lambda message: self.donate(message),
            Expect: lambda message: self.expect(message),
            Save: lambda message: self.save(message),
            Assemble: lambda message: self.assemble(message),
            Upload: lambda message: self.upload(message),
            Seal: lambda message: self.upload(message),
            Profile: lambda message: self.profile(message),
            RoundGoal: lambda message: self.aim(message),
            Exit: lambda message: self._end("done"),
            Leave: lambda message: self._end("left"),
        }
        self._client = client
        client.state = self._state
        self._store = store
        self.log = WorkerLog(participant.worker)
        self._plays = participant.worker  # the role for which the handlers are set
        self._deferred: list[Message] = []  # `OF_STAGE` messages that wait for the handlers of the new role
        self._built = -1
        self._resumed = -1
        self._over: str | None = None

    def plays(self, worker: Worker) -> None:
        """Handles the messages that were deferred until the handlers for `worker` are set. Call it as soon as this
        process has taken over the worker and set its handlers."""
        with self.lock:
            self._plays, self.log = worker, WorkerLog(worker)
            self._handle_deferred()

    def _handle_deferred(self) -> None:
        if self.participant.role == self._plays:
            deferred, self._deferred = self._deferred, []
            for message in deferred:
                self._handlers[type(message)](message)

    def start(self) -> None:
        threading.Thread(target=self._listen, name="control", daemon=True).start()

    def send(self, message: Message) -> None:
        """Sends a message to the coordinator. Without a coordinator the message is lost, unless its type is lasting
        (then it is repeated to the next coordinator)."""
        self._client.send(message)

    # -- for the executor --------------------------------------------------------------------------------------

    def orders(self) -> Orders | None:
        def given() -> bool:
            return self._over is not None or bool(self.participant.commits) or self._ready()

        self.doing.waits("orders", arrived=given)
        with self.changed:
            self.changed.wait_for(given)
            return None if self._over is not None else self.participant.orders

    def pending(self) -> bool:
        """Whether a commit must be applied, an early update must be rolled back, or a step must be restarted.

        Takes the lock. Without it, a committed step could seem applied while its commit is still being stored."""
        with self.lock:
            return self._is_pending()

    def _is_pending(self) -> bool:
        return bool(self.participant.commits) or self.participant.undo or self.participant.again

    def check(self, orders: Orders) -> None:
        if self._void(orders):
            raise Superseded

    def _void(self, orders: Orders) -> bool:
        return self.participant.orders is not orders or self._over is not None

    def actions(self, orders: Orders, step: int) -> list[Action]:
        """This worker's actions in a step. Blocks until the plan has arrived."""
        return orders.steps[step] if step in orders.steps else self._planned(orders)[0]

    def recomputes(self, orders: Orders, step: int) -> bool:
        """Whether the micro-batches of this step recompute their layers in the backward pass. Call `actions` first."""
        return orders.recompute[step not in orders.steps]

    def validation(self, orders: Orders) -> list[Action]:
        return self._planned(orders)[1]

    def _planned(self, orders: Orders) -> tuple[list[Action], list[Action]]:
        with self.changed:
            while orders.steady is None or orders.forward is None:
                self.check(orders)
                self.doing.waits("plan", arrived=lambda: orders.forward is not None or self._void(orders))
                self.changed.wait()
            return orders.steady, orders.forward

    def wait_commit(self, orders: Orders) -> Commit | None:
        """Blocks until the next step is committed. Raises Superseded if this generation cannot commit it."""
        with self.changed:
            while not self.participant.commits:
                self.check(orders)
                step = self.participant.committed + 1
                self.doing.waits("commit", step, arrived=lambda: self._is_pending() or self._void(orders))
                self.changed.wait()
            return self.participant.commits[0]

    def reached(self, phase: str) -> None:
        """Records the time at which the executor reaches a point of the recovery (`telemetry.recovery`).

        phase: "followed" (the executor starts to follow its orders) or "relaid" (after that, its layers have changed)
        """
        self.times[phase] = time.monotonic()

    def broken(self, orders: Orders, error: LinkBroken) -> None:
        """Reports a broken link. Drops the orders, so `orders` blocks until the next announcement."""
        with self.lock:
            if self.participant.orders is not orders:
                return
            self.participant.orders = None
        self.send(Broken(orders.generation, str(error)))

    def resumed(self, orders: Orders) -> None:
        """Reports that the executor has resumed, with the end times of the recovery's phases. Only the first call in a
        generation has an effect."""
        if self._resumed != orders.generation:
            self._resumed = orders.generation
            now = time.monotonic()
            times = {"followed": now, **self.times, "resumed": now}
            self.send(Resumed(orders.generation, times))

    @property
    def over(self) -> str | None:
        return self._over

    def wait_for_the_end(self) -> None:
        """Blocks until the coordinator ends the job or this worker's part in it."""
        self.doing.waits("orders")
        with self.changed:
            self.changed.wait_for(lambda: self._over is not None)

    # -- the listening thread ----------------------------------------------------------------------------------

    def _listen(self) -> None:
        while self._over is None:
            message = self._client.recv()
            self.log.received(message)
            if isinstance(message, OF_STAGE):
                with self.lock:
                    if self.participant.role != self._plays:
                        self._deferred.append(message)
                        continue
            self._handlers[type(message)](message)

    def _state(self) -> State:
        with self.lock:
            return self.participant.state(linked=self._built == self.participant.generation)

    def _adopt(self, message: Adopt) -> None:
        with self.changed:
            self.times["adopted"] = time.monotonic()
            unsaved = self.participant.adopt(message)
            self.moment("adopt")
            self.changed.notify_all()
        for step in unsaved:
            self.send(SaveFailed(step, f"worker {self._plays} has taken over worker {self.participant.worker}"))

    def _plan(self, message: SteadyPlan) -> None:
        with self.changed:
            self.participant.plan(message)
            self.changed.notify_all()

    def _commit(self, message: Commit) -> None:
        with self.changed:
            self.participant.commit(message)
            self.changed.notify_all()
        # With `hold`, workers stop after this commit. Without the abort, a worker could wait forever for a stopped
        # peer.
        if message.hold:
            self.links.abort()

    def _deliver(self, message: StoreValues) -> None:
        for key, value in message.values:
            self._store.deliver(key, value)

    def _announced(self, message: Announce) -> None:
        with self.changed:
            self.times = {"announced": time.monotonic()}
            report = self.participant.announce(message, self.busy())
            self._handle_deferred()
            self.changed.notify_all()
        self.send(report)
        self.links.abort()
        self.times["unblocked"] = time.monotonic()
        arguments = (message.generation, message.members, message.base)
        threading.Thread(target=self._build, args=arguments, name="build", daemon=True).start()

    def _build(self, generation: int, members: Assignment, base: int) -> None:
        """Builds the links of a generation. Blocks while a member is missing, at most until the next announcement."""
        self.moment("regroup")
        try:
            self.links.rebuild(generation, members, self.participant.member, base)
        except LinkBroken as error:
            if self.participant.generation == generation:
                self.send(Broken(generation, str(error)))
            return
        with self.changed:
            if self.participant.generation == generation:
                self._built = generation
                self.times["grouped"] = time.monotonic()
                self.changed.notify_all()

    def _ready(self) -> bool:
        return self.participant.orders is not None and self._built == self.participant.generation

    def _end(self, reason: str) -> None:
        with self.changed:
            self._over = self._over or reason
            self.changed.notify_all()
        self.links.abort()


def _not_yet(message: Message) -> None:
    """The initial handler, which the worker replaces. Raises RuntimeError."""
    raise RuntimeError(f"received {type(message).__name__} before the worker was ready")
