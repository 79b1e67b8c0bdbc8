"""Decides which layers a round synchronises: with islands.fragments = F, every F-th layer. So F rounds synchronise the
whole model, and each has about an F-th of the traffic (Streaming DiLoCo, arXiv 2501.18512).

    takes_part(layer=3, number=7, fragments=4)               # True
    changes(layer=3, before=7, after=9, fragments=4)         # True: rounds 7 and 8 include round 7

Pure. Round numbers and layers are those of `objects` and `wire.messages.units`.
"""

from __future__ import annotations


def takes_part(layer: int, number: int, fragments: int) -> bool:
    """Whether round `number` synchronises the layer."""
    return (layer - number) % fragments == 0


def changes(layer: int, before: int, after: int, fragments: int) -> bool:
    """Whether theta after `after` rounds differs from that after `before` rounds in this layer.

    All holders of a unit need the same answer, whether they have read the rounds or a snapshot."""
    return any(takes_part(layer, number, fragments) for number in range(before, after))
