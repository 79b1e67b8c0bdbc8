"""Backward in two parts: the input gradient at once (I), the weight gradient when the schedule says so (W).

    queue = []
    y = rms_norm(x, weight, defer=lambda w, add: queue.append((w, add)))
    y.backward(dy)                      # I: computes x.grad only
    for w, add in queue:                # W: whenever it suits
        add(w.main_grad)                # adds the gradient into a float32 buffer of the weight's shape

Every function of this package that owns a weight takes `defer`. Without it backward is the ordinary one (B) and fills
`weight.grad`. The bits of both ways are equal. `add` keeps the tensors it needs alive until it is dropped; run it
under `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

AddGradient = Callable[[Tensor], None]
Defer = Callable[[Tensor, AddGradient], None]
