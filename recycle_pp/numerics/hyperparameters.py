"""The learning rate of a step, and the factors of parameter groups.

learning_rate(settings.optimizer, step, steps)
lr, decay = factors(settings.optimizer, "layers.3.ffn_norm.weight")
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from recycle_pp.config.settings import Optimizer


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) of `steps`: linear warm-up to lr, then `optimizer.schedule`.

    constant        lr
    cosine, linear  decays to min_lr
    wsd             lr, then decays linearly to min_lr over the last part of the steps, whose share is `optimizer.decay`
                    (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395)
    """
    if step < optimizer.warmup:
        return optimizer.lr * (step + 1) / optimizer.warmup
    if optimizer.schedule == "constant":
        return optimizer.lr
    begin = optimizer.warmup
    if optimizer.schedule == "wsd":
        begin = max(begin, steps - max(1, round(optimizer.decay * steps)))
    least = optimizer.lr / 10 if optimizer.min_lr is None else optimizer.min_lr
    share = min(1.0, max(0, step - begin) / max(1, steps - begin))
    if optimizer.schedule == "cosine":
        return least + 0.5 * (optimizer.lr - least) * (1 + math.cos(math.pi * share))
    return optimizer.lr + (least - optimizer.lr) * share


def factors(optimizer: Optimizer, name: str) -> tuple[float, float]:
    """(factor of lr, factor of weight_decay) for a parameter.

    They are those of the first group in `optimizer.groups` that matches the name, or (1, 1) if no group matches.

    name: full-model name, matched as by `fnmatch`"""
    for group in optimizer.groups or ():
        pattern, lr, *decay = group.split(":")
        if fnmatchcase(name, pattern):
            return float(lr), float(decay[0]) if decay else 1.0
    return 1.0, 1.0
