"""What the coordinator knows of one launched process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from recycle_schedules import Worker

from recycle_pp.telemetry.event_log import Expected
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.supervisors import Death, Kill, Spawn
from recycle_pp.wire.messages.table import Message
from recycle_pp.wire.messages.workers import Address

NODE_LOSS = Death("node_loss", "its supervisor is gone")


@dataclass
class Rank:
    """One launched process: its supervisor, and the worker it runs at present."""

    number: int
    role: Worker
    supervisor: Peer | None = None  # None: its node is gone
    place: Place | None = None  # where its supervisor listens
    unheard: int = 0  # heartbeats that its supervisor has missed
    worker: Peer | None = None
    address: Address = ("", 0)  # at which its worker receives state
    incarnation: int = -1
    died: int = -1  # newest incarnation that has died (rather than been replaced)
    death: Expected | None = None  # the event of its death; None if a coordinator that was lost has written it
    ended: int = -1  # newest incarnation that was ended because its connection broke
    explained: int = -1  # newest incarnation whose death has its event
    alive: bool = False  # spawned and not dead
    stopping: bool = False  # its supervisor was told to end
    respawns: int = 0
    heard: float = 0.0  # when its worker gave the last sign of life
    causes: dict[int, Death] = field(default_factory=dict)  # incarnation -> why it died
    call_off: Callable[[], None] = lambda: None  # the wait for the cause of its death

    @property
    def hello(self) -> SupervisorHello | None:
        """Its supervisor's; None if that is not connected."""
        hello = self.supervisor and self.supervisor.hello
        return hello if isinstance(hello, SupervisorHello) else None

    @property
    def host(self) -> str | None:
        """The name of its node."""
        return None if self.hello is None else self.hello.host

    @property
    def agent(self) -> int | None:
        """Of the launch's agents the one that has started its supervisor; None for a newcomer, or if it is not here."""
        return None if self.hello is None else self.hello.agent

    def tell(self, message: Message) -> None:
        if self.supervisor is not None:
            self.supervisor.send(message)

    def spawn(self) -> None:
        """Orders a new worker process; the supervisor ends one that still lives first."""
        self.incarnation += 1
        self.alive = True
        self.worker = None
        self.heard = time.monotonic()
        self.tell(Spawn(self.incarnation, self.role, self.respawns))

    def kill(self, stacks: bool = False) -> None:
        """Orders a SIGKILL for the worker. stacks: its supervisor reports where its threads stand first."""
        self.tell(Kill(self.incarnation, stacks))
