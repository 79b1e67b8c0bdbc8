"""Which layers a stage holds.

layers_of(settings.model, stages=4)[1]      # range(2, 4)
canonical_names(settings.model)             # ["embedding.weight", "layers.0.attention_norm.weight", ...]
"""

from __future__ import annotations

from recycle_pp.config.settings import Model


def layers_of(model: Model, stages: int) -> list[range]:
    """The layers of every stage: `model.split`, or as even as possible with the rest on the first stages.

    Raises:
        ValueError: a split that does not name `stages` stages of at least one layer, `model.layers` in all.
    """
    split = model.split
    if split is None:
        each, rest = divmod(model.layers, stages)
        split = [each + (stage < rest) for stage in range(stages)]
    if len(split) != stages or sum(split) != model.layers or min(split) < 1:
        raise ValueError(
            f"model.split must give each of the {stages} stages at least one layer, {model.layers} in all; "
            f"it is {list(split)}"
        )
    starts = [sum(split[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, split, strict=True)]
