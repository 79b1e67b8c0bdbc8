"""AdamW on one stage: at the commit, or before it as speculation that can be taken back.

    optimizer = StageOptimizer(settings, stage)
    norm, scale = clip_scale(squares_of_all_stages, settings.optimizer.clip)
    optimizer.step(reduced, step, scale)                        # at the commit
    optimizer.speculate(reduced, step); optimizer.confirm()     # the same bits as step(..., scale=1)
    optimizer.speculate(reduced, step); optimizer.undo()        # as if nothing had happened, in every bit

Matrices decay, norm weights do not (Loshchilov and Hutter 2019, arXiv:1711.05101). On a CPU the bits are those of
`torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from recycle_pp.config.settings import Optimizer, Settings

from .gradients import Gradients, Reduced
from .layout import Layout
from .operations import Operations, State


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Of step `step` (from 0) of `steps`: linear warm-up to lr, then as `optimizer.schedule` says.

    cosine, linear: down to min_lr; constant: lr; wsd (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395): lr,
    and in the last `optimizer.decay` of all steps linearly down to min_lr.
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


def clip_scale(squares: Sequence[float], clip: float | None) -> tuple[float, float]:
    """(gradient norm, factor for the gradient) from the squared norms of all tensors of all stages.

    `math.fsum` rounds once, so the result does not depend on the split into stages. The factor is that of
    `torch.nn.utils.clip_grad_norm_`: min(1, clip / (norm + 1e-6)).
    """
    norm = math.sqrt(math.fsum(squares))
    return norm, 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def factors(optimizer: Optimizer, name: str) -> tuple[float, float]:
    """(of lr, of weight_decay) for the parameter `name`, a full-model name: the first of `optimizer.groups` that
    matches it, as `fnmatch` does; 1 and 1 if none does."""
    for group in optimizer.groups or ():
        pattern, lr, *decay = group.split(":")
        if fnmatchcase(name, pattern):
            return float(lr), float(decay[0]) if decay else 1.0
    return 1.0, 1.0


class Updated(Protocol):
    """What the optimizer needs of a stage (`model.stage.Stage`): its parameters as one float32 vector `flat`, laid out
    by `layout`, their gradients, the operations that compute, and `publish`, to be called after `flat` has changed."""

    flat: Tensor
    layout: Layout
    names: list[str]
    gradients: Gradients
    ops: Operations

    def publish(self) -> None: ...


class StageOptimizer:
    """The optimizer state of one stage; `stage.flat` is updated in place.

    One thread updates. Another one may read `part`s of the state meanwhile (a donor's): the two wait for each other,
    the updating thread no longer than a part takes to be copied.
    """

    def __init__(self, settings: Settings, stage: Updated):
        self._settings, self._stage = settings.optimizer, stage
        self._steps = settings.run.steps
        self._live = (stage.flat, torch.zeros_like(stage.flat), torch.zeros_like(stage.flat))
        self._runs = _runs(self._settings, stage)
        self._undo: State | None = None  # allocated at the first speculation, then reused
        self._lock = threading.Lock()  # held while the state changes, or a part of it is copied
        self._committed = self._speculated = -1  # newest step in the state, and the newest that was tried
        self._undo_exponents: Tensor | None = None  # not None while a speculation is open

    def lr(self, step: int) -> float:
        return learning_rate(self._settings, step, self._steps)

    @torch.no_grad()
    def step(self, reduced: Reduced, step: int, scale: float = 1.0, undo: State | None = None) -> None:
        """One AdamW step (number `step`, from 0) with the gradient times `scale`; `reduced` is not changed.

        undo: receives parameters and state as they were.
        """
        with self._lock:
            self._step(reduced, step, scale, undo)
            self._committed = step

    @torch.no_grad()
    def speculate(self, reduced: Reduced, step: int) -> None:
        """The step before it is sure: keeps what it overwrites."""
        assert self._undo_exponents is None, "confirm() or undo() the last speculation first"
        with self._lock:
            self._undo_exponents, self._speculated = self._stage.gradients.exponents, step
            self._step(reduced, step, 1.0, self._undo_copy())

    def confirm(self) -> None:
        """The speculated step stands."""
        assert self._undo_exponents is not None, "nothing was speculated"
        with self._lock:
            self._undo_exponents, self._committed = None, self._speculated

    @torch.no_grad()
    def undo(self) -> None:
        """Parameters, state and exponents are again what they were before speculate(), in every bit."""
        assert self._undo is not None and self._undo_exponents is not None, "nothing was speculated"
        with self._lock:
            for kept, tensor in zip(self._undo, self._live, strict=True):
                tensor.copy_(kept)
            self._stage.gradients.exponents, self._undo_exponents = self._undo_exponents, None
            self._stage.publish()

    # -- by parts: elements [start, stop) of each vector of the state, both multiples of `layout.ALIGNMENT`

    @property
    def size(self) -> int:
        """Elements of each of the three vectors of the state: parameters, mean gradients, mean squared gradients."""
        return self._stage.layout.size

    def part(self, start: int, stop: int, newest: int) -> list[Tensor] | None:
        """Copies of a part on the CPU, float32 (stop - start,) each; from any thread.

        None while the state is speculative, or holds a step after `newest`.
        """
        with self._lock:
            if self._undo_exponents is not None or self._committed > newest:
                return None
            return [flat[start:stop].to("cpu", copy=True) for flat in self._live]

    @torch.no_grad()
    def put_part(self, start: int, part: Sequence[Tensor]) -> None:
        """Takes over what `part` gave on a peer."""
        for flat, piece in zip(self._live, part, strict=True):
            flat[start : start + len(piece)].copy_(piece)
        self._stage.publish()

    @torch.no_grad()
    def step_first(self, grad: Tensor, step: int, scale: float) -> None:
        """`step` for the first len(grad) elements of the state alone; in these the same bits.

        grad: their reduced gradient, float32, on any device. An update is elementwise, and the CPU's vector loop takes
        16 elements at a time: a cut elsewhere than at their multiples would change bits.
        """
        layout = self._stage.layout.first(len(grad))
        live = (self._live[0][: len(grad)], self._live[1][: len(grad)], self._live[2][: len(grad)])
        self._stage.ops.adamw(
            live,
            grad.to(live[0].device),
            self._stage.ops.places(layout, live[0].device),
            self._settings,
            lr=self.lr(step),
            step=step,
            scale=scale,
            undo=None,
        )
        self._stage.publish()

    def state(self) -> dict[str, Tensor]:
        """Everything of the stage that outlives a step, by full-model names; live views, not copies.

        `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` (float32, the parameter's shape) and, when reproducible,
        `exponent.NAME` (int32, one for every row, see `layout`).
        """
        state: dict[str, Tensor] = {}
        for prefix, flat in zip(("model", "exp_avg", "exp_avg_sq"), self._live, strict=True):
            for name, view in zip(self._stage.names, self._stage.layout.views(flat), strict=True):
                state[f"{prefix}.{name}"] = view
        gradients = self._stage.gradients
        if gradients.reproducible:
            for index, name in enumerate(self._stage.names):
                state[f"exponent.{name}"] = gradients.exponents_of(index)
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes over a `state()` of a peer or of a checkpoint; it may hold more names than this stage has."""
        exponents = []
        for key, tensor in self.state().items():
            if key.startswith("exponent."):
                exponents.append(state[key].to(tensor).expand_as(tensor))  # there was one for a tensor once
            else:
                tensor.copy_(state[key])
        if exponents:
            self._stage.gradients.take_exponents(torch.cat(exponents))
        self._stage.publish()

    @torch.no_grad()
    def warm(self) -> None:
        """Launches what a step does (see `Stage.warm`); to be called on fresh state, which it leaves as it is."""
        nothing = torch.zeros_like(self._live[0])
        self._update(nothing, 0.0, 0, 1.0, None)
        if self._settings.stagger:
            self._update(nothing, 0.0, 0, 1.0, self._undo_copy())

    def _step(self, reduced: Reduced, step: int, scale: float, undo: State | None) -> None:
        self._update(reduced.flat, self.lr(step), step, scale, undo)
        self._stage.gradients.follow(reduced)

    def _update(self, grad: Tensor, lr: float, step: int, scale: float, undo: State | None) -> None:
        stage = self._stage
        for run in self._runs:
            state, kept = _parts(self._live, run.part), _parts(undo, run.part) if undo else None
            stage.ops.adamw(
                state, grad[run.part], run.places, run.settings, lr=lr * run.lr, step=step, scale=scale, undo=kept
            )
        self._stage.publish()

    def _undo_copy(self) -> State:
        if self._undo is None:
            param, mean, square = (torch.empty_like(tensor) for tensor in self._live)
            self._undo = (param, mean, square)
        return self._undo


@dataclass(frozen=True)
class _Run:
    """Neighbouring tensors of one group: elements `part` of the vector, lr times `lr`."""

    part: slice
    places: Any
    settings: Optimizer
    lr: float


def _runs(settings: Optimizer, stage: Updated) -> list[_Run]:
    """The stage's tensors as few runs as their groups allow; one in all without groups."""
    if not settings.groups:
        return [_Run(slice(None), stage.gradients.places, settings, 1.0)]
    layout, runs, start = stage.layout, [], 0
    tensors = zip(layout.names, layout.shapes, layout.sizes, strict=True)
    for (lr, decay), run in groupby(tensors, lambda tensor: factors(settings, tensor[0])):
        members = list(run)
        stop = start + sum(size for _, _, size in members)
        part = Layout({name: shape for name, shape, _ in members})
        own = replace(settings, weight_decay=settings.weight_decay * decay)
        runs.append(_Run(slice(start, stop), stage.ops.places(part, stage.flat.device), own, lr))
        start = stop
    return runs


def _parts(state: State, part: slice) -> State:
    parameter, mean, square = state
    return parameter[part], mean[part], square[part]
