"""The connections between the workers of the simulated world."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recycle_schedules import Worker


@dataclass
class Network:
    """The network between the processes of one start of the job. A restart uses new addresses."""

    wires: dict[tuple[int, Worker, Worker, Any], Any] = field(default_factory=dict)  # (generation, from, to, key)
    published: set[tuple[int, Worker]] = field(default_factory=set)  # workers that listen, by mesh
    cuts: set[tuple[int, Worker, Worker]] = field(default_factory=set)  # connections of a mesh that broke
    graves: set[tuple[int, Worker]] = field(default_factory=set)  # members of a mesh that are dead

    def broken(self, mesh: int, me: Worker, other: Worker) -> bool:
        """Whether this connection is broken."""
        return (mesh, me, other) in self.cuts or (mesh, other) in self.graves
