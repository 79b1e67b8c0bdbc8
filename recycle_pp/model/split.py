"""The layers of each stage.

layers_of(8, stages=4)[1]                       # range(2, 4)
layers_of(8, stages=2, split=[5, 3])[1]         # range(5, 8)
"""

from __future__ import annotations

from collections.abc import Sequence


def layers_of(layers: int, stages: int, split: Sequence[int] | None = None) -> list[range]:
    """The layers of every stage. Without `split` the layers are divided as evenly as possible, and the first stages may
    have one more.

    split: number of layers of each stage

    Raises ValueError if there are fewer layers than stages, or if `split` does not consist of `stages` numbers of at
    least 1 with the sum `layers`.
    """
    if layers < stages:
        raise ValueError(f"the model has {layers} layers, too few for parallel.stages = {stages} (at least one each)")
    if split is None:
        each, rest = divmod(layers, stages)
        split = [each + (stage < rest) for stage in range(stages)]
    if len(split) != stages or sum(split) != layers or min(split) < 1:
        raise ValueError(
            f"model.split must give each of the {stages} stages at least one layer, {layers} in total; "
            f"it is {list(split)}"
        )
    starts = [sum(split[:stage]) for stage in range(stages)]
    return [range(start, start + count) for start, count in zip(starts, split, strict=True)]
