"""The coordinator's record of one launched process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from recycle_schedules import Worker

from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.lifecycle import Address
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.supervisors import Death, Kill, Spawn
from recycle_pp.wire.messages.table import Message

NODE_LOSS = Death("node_loss", "its supervisor disconnected")


@dataclass
class Rank:
    """One launched process: its supervisor and its current worker.

    number      the number of the member, which is also its rank
    assignment  returns the job's assignment
    """

    number: Member
    assignment: Callable[[], Assignment]
    supervisor: Peer | None = None  # None: its node is lost
    place: Place | None = None  # address of its supervisor
    missed_heartbeats: int = 0  # consecutive heartbeats missed by its supervisor
    worker: Peer | None = None
    address: Address = ("", 0)  # where its worker receives state
    machine: str = ""  # name of its worker's machine, see `Ready`
    cores: int = 1  # number of cores of that machine
    incarnation: int = -1
    died: int = -1  # newest incarnation that died; an incarnation that was replaced while alive does not count
    died_as: Worker | None = None  # the worker that `died` played; `role` may have changed since
    ended: int = -1  # newest incarnation that was killed because its connection broke
    explained: int = -1  # newest incarnation whose death has a complete event
    alive: bool = False  # whether its worker was spawned and is not dead
    stopping: bool = False  # whether its supervisor got a signal to end
    respawns: int = 0
    last_message: float = 0.0  # time.monotonic() when its worker's last message arrived
    causes: dict[int, Death] = field(default_factory=dict)  # incarnation -> cause
    cancel_wait: Callable[[], None] = lambda: None  # cancels the wait for the cause of its death

    @property
    def role(self) -> Worker:
        """The worker that the process plays."""
        return self.assignment()[self.number]

    @property
    def hello(self) -> SupervisorHello | None:
        """The hello of the rank's supervisor; None if the supervisor is not connected."""
        hello = self.supervisor and self.supervisor.hello
        return hello if isinstance(hello, SupervisorHello) else None

    @property
    def host(self) -> str | None:
        """The name of its node."""
        return None if self.hello is None else self.hello.host

    @property
    def node(self) -> tuple[str, int | None] | None:
        """The identity of its node; None if the supervisor is not connected."""
        return None if self.hello is None else (self.hello.host, self.hello.agent)

    @property
    def agent(self) -> int | None:
        """The number of the agent that started its supervisor; None if its node joined later or is not connected."""
        return None if self.hello is None else self.hello.agent

    def send(self, message: Message) -> None:
        """Sends a message to the supervisor, if it is connected."""
        if self.supervisor is not None:
            self.supervisor.send(message)

    def spawn(self) -> None:
        """Orders a new worker process. The supervisor first ends the old one, if it is alive."""
        self.incarnation += 1
        self.alive = True
        self.worker = None
        self.last_message = time.monotonic()
        self.send(Spawn(self.incarnation, self.role, self.respawns))

    def kill(self, stacks: bool = False) -> None:
        """Orders a SIGKILL for the worker. stacks: whether the supervisor first reports the worker's stacks."""
        self.send(Kill(self.incarnation, stacks))
