"""The connections between the members of the simulated world."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Network:
    """The network between the processes of one start of the job. A restart uses new addresses."""

    wires: dict[tuple[int, int, int, Any], Any] = field(default_factory=dict)  # (generation, from, to, key)
    published: set[tuple[int, int]] = field(default_factory=set)  # members that listen, by mesh
    cuts: set[tuple[int, int, int]] = field(default_factory=set)  # connections of a mesh that broke
    graves: set[tuple[int, int]] = field(default_factory=set)  # members of a mesh that are dead

    def broken(self, mesh: int, me: int, other: int) -> bool:
        """Whether the connection between these two members is broken."""
        return (mesh, me, other) in self.cuts or (mesh, other) in self.graves
