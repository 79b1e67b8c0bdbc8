"""The outer step: the mean of the islands' deltas, then SGD with Nesterov momentum on theta.

    delta = difference(theta, weights, residual)          # what an island sends, before its encoding
    mean = mean_of({"oregon": delta, "frankfurt": delta}, {"oregon": 6400, "frankfurt": 6400})
    theta, momentum = stepped(theta, momentum, mean, lr=0.7, decay=0.9)
    weights = merged(weights, theta, mix=0.0)             # the weights with which the island continues

All islands must compute the same bits, so everything runs in numpy, on the host, one float32 operation at a time and
in the order of names. All arrays are float32 (n,), and no function changes its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .codec import Floats


def difference(theta: Floats, weights: Floats, residual: Floats) -> Floats:
    """The delta of an island: theta - weights, plus the error of its earlier encodings."""
    delta = theta - weights
    return delta + residual


def mean_of(deltas: Mapping[str, Floats], samples: Mapping[str, int]) -> Floats | None:
    """The mean of the deltas, weighted by numbers of samples; None if there are no deltas.

    deltas   island -> its delta
    samples  island -> number of samples that its delta was trained on, positive
    """
    total, mean = sum(samples[name] for name in deltas), None
    for name in sorted(deltas):
        share = np.float32(samples[name] / total)
        part = deltas[name] * share
        mean = part if mean is None else mean + part
    return mean


def stepped(theta: Floats, momentum: Floats, mean: Floats, lr: float, decay: float) -> tuple[Floats, Floats]:
    """(theta, momentum) after an outer step: torch's SGD with nesterov=True.

    mean  from `mean_of`
    decay momentum of the outer step
    """
    decayed = momentum * np.float32(decay)
    after = decayed + mean
    ahead = after * np.float32(decay)
    update = mean + ahead
    step = update * np.float32(lr)
    return theta - step, after


def merged(weights: Floats, theta: Floats, mix: float) -> Floats:
    """mix * weights + (1 - mix) * theta. Exact for mix=0 and mix=1."""
    if mix in (0.0, 1.0):
        return (weights if mix else theta).copy()
    kept = weights * np.float32(mix)
    taken = theta * np.float32(1 - mix)
    return kept + taken
