"""The decoder layers of the job's model, and their distribution over the stages (layout).

    layers = ModelLayers(settings)
    layers.start                                         # (2, 2): number of decoder layers of each stage at the start
    layers.describe(4, None, {3: [("layers.3.norm", 512)]})   # a worker's report about a different kind of model
    layers.counts({0: [-1, 0, 1], 1: [2, 3, 4]})         # (2, 2): the planner's form of a layout of the protocol
    layers.relaid({0: [-1, 0, 1], 1: [2, 3, 4]}, (1, 3))      # {0: [-1, 0], 1: [1, 2, 3, 4]}
    layers.settings((1, 3))                              # settings with `model.split` of this layout

The planner's layout is the number of decoder layers of each stage. The protocol's layout lists all layers of each
stage. The embedding, the final norm, the head and tensors that several layers share never leave their stages.

The decoder layers of the project's own Transformer are known from the settings. Those of other models are known once
the first worker has built its stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recycle_schedules.layers import Layout as Counts

from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import parameters
from recycle_pp.model.split import layers_of
from recycle_pp.numerics.update_rules.choice import planned
from recycle_pp.wire.messages.units import Layout

UNKNOWN_BYTES = (
    "no layer moves with parallel.memory, because the memory of this model's layers is known only while they run"
)


class ModelLayers:
    """
    depth  number of decoder layers; 0 while it is unknown
    stays  a sentence for the user about why no layer can move; None if layers can move
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.depth, self.stays = 0, None if settings.parallel.memory is None else UNKNOWN_BYTES
        # bytes of state per parameter, estimated as for matrices, which have most parameters
        self._state = 4 + planned(settings.optimizer)[0].bytes
        self._elements: dict[int, int] = {}  # layer -> number of its parameters
        if settings.model.own and isinstance(depth := settings.model.layers, int):
            self.depth, self.stays = depth, None
            self._elements = dict.fromkeys(range(depth), parameters(settings.model, range(1, 2)))  # all are alike

    @property
    def start(self) -> Counts:
        """The job's first layout. `depth` must be known."""
        return tuple(map(len, layers_of(self.depth, self._settings.parallel.stages, self._settings.model.layout)))

    def describe(self, depth: int, stays: str | None, units: Mapping[int, Sequence[tuple[str, int]]]) -> None:
        """Records a worker's report about its model (`Ready`). No effect for the project's own Transformer.

        depth  number of decoder layers
        stays  why no layer can move; None if layers can
        units  layer -> (name, number of parameters) of each tensor
        """
        if not self._settings.model.own:
            self.depth, self.stays = depth, self.stays or stays
            self._elements |= {layer: sum(size for _, size in of) for layer, of in units.items()}

    @property
    def what_moves(self) -> str | None:
        """A sentence about which layers may move while the job trains; None if the settings allow no move.

        `depth` must be known.
        """
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
        rest = own if self._settings.model.own else "modules outside them and parameters that several layers share"
        return f"{said}{self.depth} decoder layers may move between stages while the job trains; {rest} never move"

    def counts(self, layout: Layout) -> Counts:
        """The number of decoder layers of each stage; () while they are unknown for a stage."""
        found = tuple(len(self._decoder(layers)) for _, layers in sorted(layout.items()))
        return found if len(found) == self._settings.parallel.stages and all(found) else ()

    def relaid(self, layout: Layout, counts: Counts) -> Layout:
        """The layout after redistributing its decoder layers in order.

        counts: new number of decoder layers of each stage"""
        each = [layer for stage in sorted(layout) for layer in self._decoder(layout[stage])]
        found: Layout = {}
        for (stage, layers), count in zip(sorted(layout.items()), counts, strict=True):
            first = layers.index(self._decoder(layers)[0])
            others = [layer for layer in layers if not 0 <= layer < self.depth]
            found[stage] = [*others[:first], *each[:count], *others[first:]]
            del each[:count]
        return found

    def gained(self, before: Counts, after: Counts) -> list[list[int]]:
        """For each stage, the decoder layers that it gains in the move."""
        old, new = ([set(layers) for layers in layers_of(sum(of), len(of), of)] for of in (before, after))
        return [sorted(has - had) for had, has in zip(old, new, strict=True)]

    def state_bytes(self, layers: Sequence[int], peers: int) -> int:
        """Bytes of these layers' state that each worker of their stage holds. peers: live workers of the stage."""
        copies = self._settings.parallel.copies
        share = min(1.0, copies / peers) if copies else 1.0
        return round(share * self._state * sum(self._elements[layer] for layer in layers))

    def settings(self, counts: Counts) -> Settings:
        """The settings that a new worker needs to build its stage in this layout. counts: () if the layout is
        unknown."""
        if not counts or counts == self.start:
            return self._settings
        return self._settings.with_values({"model.split": list(counts), "parallel.stages": len(counts)})

    def _decoder(self, layers: Sequence[int]) -> list[int]:
        return [layer for layer in layers if 0 <= layer < self.depth]
