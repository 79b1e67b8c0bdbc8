"""The reactions of training systems to lost machines: one class for each system.

for policy in policies("rebalanced", world, there, broken): ...     # if there are several variants, the best one counts
"""

from __future__ import annotations

from ..availability import Availability
from ..broken_step import BrokenSteps
from .adaptive import Rebalanced, Rerouted, Respawned, RespawnedRebalanced
from .bamboo import Bamboo
from .base import Base, World
from .bound import Bound
from .oobleck import Oobleck
from .recycle import Recycle
from .restart import Restart
from .spares import Spares, worth_trying
from .torchft import Torchft

NAMES = ("restart", "spares", "torchft", "oobleck", "bamboo", "recycle", "rerouted", "rebalanced", "bound")
"""The policies of a comparison. `respawned` and `respawned-rebalanced` are only for replays."""

DEFAULT = "rerouted"
"""The policy of recycle_pp's trainer."""

MOVING = "rebalanced"
"""The policy of the trainer with schedule.rebalance=auto."""


def policies(name: str, world: World, there: Availability, broken: BrokenSteps) -> list[Base]:
    """The variants of the policy with this name. The outcome of the policy is that of its best variant."""
    job = world.times.job
    match name:
        case "spares":
            return [Spares(world, name, d) for d in worth_trying(job.pipelines, job.stages, list(there.counts()))]
        case "rerouted" | "rebalanced" | "respawned" | "respawned-rebalanced":
            ours = {
                "rerouted": Rerouted, "rebalanced": Rebalanced, "respawned": Respawned,
                "respawned-rebalanced": RespawnedRebalanced,
            }  # fmt: skip
            return [ours[name](world, name, broken)]
        case _:
            others = {
                "restart": Restart, "torchft": Torchft, "oobleck": Oobleck, "bamboo": Bamboo, "recycle": Recycle,
                "bound": Bound,
            }  # fmt: skip
            return [others[name](world, name)]


__all__ = ["DEFAULT", "MOVING", "NAMES", "Base", "World", "policies"]
