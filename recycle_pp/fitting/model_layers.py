"""The decoder layers of the job's model, and layouts of them: as numbers for the planner, as lists for the protocol.

    layers = ModelLayers(settings)
    layers.start                                         # (2, 2): the decoder layers of each stage at the start
    layers.describe(4, None, {3: [("layers.3.norm", 512)]})   # what a worker says about another model
    layers.counts({0: [-1, 0, 1], 1: [2, 3, 4]})         # (2, 2): the same for a layout of the protocol
    layers.relaid({0: [-1, 0, 1], 1: [2, 3, 4]}, (1, 3))      # {0: [-1, 0], 1: [1, 2, 3, 4]}
    layers.settings((1, 3))                              # settings with `model.split` of this layout

All other layers stay at their stages: the embedding, the final norm and the head, and tensors that several layers
share. The decoder layers of the project's own Transformer are known from the settings, those of another model when
the first worker has built its stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recycle_schedules.layers import Layout as Counts

from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import parameters
from recycle_pp.model.split import layers_of
from recycle_pp.wire.messages.units import Layout

STATE = 12  # bytes of an element's state: the master and two moments, in float32
UNKNOWN_BYTES = (
    "no layer moves with parallel.memory, because the memory of this model's layers is known only while they run"
)


class ModelLayers:
    """
    depth  number of decoder layers; 0 while it is unknown
    stays  why no layer can move, one sentence for the user; None if they can
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.depth, self.stays = 0, None if settings.parallel.memory is None else UNKNOWN_BYTES
        self._elements: dict[int, int] = {}  # layer -> number of its parameters
        if settings.model.own and isinstance(depth := settings.model.layers, int):
            self.depth, self.stays = depth, None
            self._elements = dict.fromkeys(range(depth), parameters(settings.model, range(1, 2)))  # all are alike

    @property
    def start(self) -> Counts:
        """The layout with which the job starts. The depth must be known."""
        return tuple(map(len, layers_of(self.depth, self._settings.parallel.stages, self._settings.model.layout)))

    def describe(self, depth: int, stays: str | None, units: Mapping[int, Sequence[tuple[str, int]]]) -> None:
        """Records what a worker says about the model (`Ready`). No effect for the project's own Transformer."""
        if not self._settings.model.own:
            self.depth, self.stays = depth, self.stays or stays
            self._elements |= {layer: sum(size for _, size in of) for layer, of in units.items()}

    @property
    def what_moves(self) -> str | None:
        """A sentence about the layers that may move while the job trains; None if the settings allow no move. The depth
        must be known."""
        mode, stages = self._settings.schedule.rebalance, self._settings.parallel.stages
        if mode == "never":
            return None
        said = f"schedule.rebalance={mode}: "
        if stages in (1, self.depth):
            only = "there is one stage" if stages == 1 else "each stage has one layer"
            return f"{said}no layer can move, because {only}"
        if self.stays is not None:
            return said + self.stays
        own = "the embedding, the final norm and the head"
        rest = own if self._settings.model.own else "modules outside of them, and parameters that several layers share,"
        return f"{said}{self.depth} decoder layers may move between stages while the job trains; {rest} never move"

    def counts(self, layout: Layout) -> Counts:
        """The number of decoder layers of each stage; empty while the layers of a stage are unknown."""
        found = tuple(len(self._decoder(layers)) for _, layers in sorted(layout.items()))
        return found if len(found) == self._settings.parallel.stages and all(found) else ()

    def relaid(self, layout: Layout, counts: Counts) -> Layout:
        """The layout with other numbers of decoder layers."""
        each = [layer for stage in sorted(layout) for layer in self._decoder(layout[stage])]
        found: Layout = {}
        for (stage, layers), count in zip(sorted(layout.items()), counts, strict=True):
            first = layers.index(self._decoder(layers)[0])
            others = [layer for layer in layers if not 0 <= layer < self.depth]
            found[stage] = [*others[:first], *each[:count], *others[first:]]
            del each[:count]
        return found

    def gained(self, before: Counts, after: Counts) -> list[list[int]]:
        """The decoder layers that each stage has in the new layout and not in the old one."""
        old, new = ([set(layers) for layers in layers_of(sum(of), len(of), of)] for of in (before, after))
        return [sorted(has - had) for had, has in zip(old, new, strict=True)]

    def state_bytes(self, layers: Sequence[int], peers: int) -> int:
        """Bytes of the state of these layers that one worker of a stage holds. peers: live workers of the stage."""
        copies = self._settings.parallel.copies
        share = min(1.0, copies / peers) if copies else 1.0
        return round(share * STATE * sum(self._elements[layer] for layer in layers))

    def settings(self, counts: Counts) -> Settings:
        """The settings with which a new worker builds its stage of this layout. counts: empty if it is unknown."""
        if not counts or counts == self.start:
            return self._settings
        return self._settings.with_values({"model.split": list(counts), "parallel.stages": len(counts)})

    def _decoder(self, layers: Sequence[int]) -> list[int]:
        return [layer for layer in layers if 0 <= layer < self.depth]
