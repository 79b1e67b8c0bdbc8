"""What the coordinator knows of one launched process."""

from __future__ import annotations

from dataclasses import dataclass, field

from recycle_schedules import Worker

from .messages import Message, Peer


@dataclass
class Rank:
    """One launched process: its supervisor, and the worker it runs at present."""

    role: Worker
    supervisor: Peer
    worker: Peer | None = None
    incarnation: int = -1
    died: int = -1  # newest incarnation that has died (rather than been replaced)
    explained: int = -1  # newest incarnation whose death has its event
    alive: bool = False  # spawned and not dead
    respawns: int = 0
    heard: float = 0.0  # when its worker gave the last sign of life
    patience: float = 0.0  # seconds of silence after which it counts as hung
    causes: dict[int, Message] = field(default_factory=dict)  # incarnation -> why it died
