"""The decoder layers of the job's model, and layouts of them: as numbers for the planner, as lists for the protocol.

    layers = ModelLayers(settings)
    layers.start                                         # (2, 2): the decoder layers of each stage at the start
    layers.describe({3: [("layers.3.norm", 512)]})       # the units of layers that a worker has built
    layers.counts({0: [-1, 0, 1], 1: [2, 3, 4]})         # (2, 2): the same for a layout of the protocol
    layers.relaid({0: [-1, 0, 1], 1: [2, 3, 4]}, (1, 3))      # {0: [-1, 0], 1: [1, 2, 3, 4]}
    layers.settings((1, 3))                              # settings with `model.split` of this layout

All other layers stay at their stages: the embedding, the final norm and the head, and tensors that several layers
share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recycle_schedules.layers import Layout as Counts

from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import parameters
from recycle_pp.model.split import layers_of
from recycle_pp.wire.messages.units import Layout

STATE = 12  # bytes of an element's state: the master and two moments, in float32


class ModelLayers:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._elements: dict[int, int] = {}  # decoder layer -> number of its parameters
        if settings.model.own and isinstance(depth := settings.model.layers, int):
            self._elements = dict.fromkeys(range(depth), parameters(settings.model, range(1, 2)))  # all are alike

    @property
    def depth(self) -> int:
        """Number of decoder layers that are known."""
        return len(self._elements)

    @property
    def start(self) -> Counts:
        """The layout with which the job starts. All layers must be known."""
        return tuple(map(len, layers_of(self.depth, self._settings.parallel.stages, self._settings.model.split)))

    def describe(self, units: Mapping[int, Sequence[tuple[str, int]]]) -> None:
        """Records the layers that a worker has built. units: layer -> (name, number of elements) of each of its units.

        For models that are not the project's own: a layer with its number in the name of a tensor is a decoder layer.
        """
        if not self._settings.model.own:
            self._elements |= {
                layer: sum(size for _, size in of)
                for layer, of in units.items()
                if any(str(layer) in name.split("[")[0].split(".") for name, _ in of)
            }

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
            others = [layer for layer in layers if layer not in self._elements]
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
        return [layer for layer in layers if layer in self._elements]


def what_moves(settings: Settings) -> str | None:
    """A sentence about the layers that may move while the job trains; None if none may by the settings."""
    model, schedule, stages = settings.model, settings.schedule, settings.parallel.stages
    if schedule.rebalance == "never":
        return None
    said = f"schedule.rebalance={schedule.rebalance}"
    if stages == 1 or model.layers == stages:
        return (
            f"{said}: no layer can move, because {'there is one stage' if stages == 1 else 'each stage has one layer'}"
        )
    if not model.own:
        return f"{said}: no layer moves, because so far only model.kind=transformer and llama support it"
    stay = "the embedding, the final norm and the head"
    return f"{said}: decoder layers may move between stages while the job trains; {stay} never move"
