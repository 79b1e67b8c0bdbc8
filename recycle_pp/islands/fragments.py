"""Says which layers a round synchronises. With islands.fragments = F, it is every F-th layer. So F rounds synchronise
the whole model, and each has about an F-th of the traffic (Streaming DiLoCo, arXiv 2501.18512).

    takes_part(layer=3, number=7, fragments=4)       # True

Pure. Round numbers and layers are those of `objects` and `wire.messages.units`.
"""

from __future__ import annotations


def takes_part(layer: int, number: int, fragments: int) -> bool:
    """Whether round `number` synchronises the layer."""
    return (layer - number) % fragments == 0
