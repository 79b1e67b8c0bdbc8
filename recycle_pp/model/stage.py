"""One pipeline stage's compute on one worker: F, I, W and B of a micro-batch. It sends nothing and decides nothing.

    stage = Stage(settings, 1, torch.device("cpu"))
    y = stage.forward(step, g, x)               # F; at the last stage forward(step, g, x, targets) gives the loss
    dx = stage.backward_input(g, dy)            # I, then later
    stage.backward_weight(g)                    # W; or both in one: dx = stage.backward(g, dy)
    stage.gradients.payload()                   # what the stage's peers sum

The gradient is that of the mean loss over all G micro-batches: the 1/G is applied where the backward begins.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.numerics.gradients import Gradients
from recycle_pp.numerics.layout import Layout
from recycle_pp.numerics.weight_grad_store import Queue, WeightGradStore

from .split import layers_of
from .transformer import Build, Transformer


@dataclass
class _Flight:
    """A micro-batch between its F and its W; source and output go at I."""

    source: Tensor | None
    output: Tensor | None  # with its autograd graph
    loss: Tensor | None
    queue: Queue | None = None


class Stage:
    """The layers of stage `stage`, their parameters and gradient accumulators.

    Holds no state across steps but these two. Every result is a pure function of (parameters, step, g, operands):
    any peer computes the same bits.

    Attributes:
        parameters: full-model name -> parameter, in canonical order; views of the one vector `flat`.
        names: the keys of `parameters`.
        boundary: shape (b, T, H) and dtype of the tensors between stages.
        gradients: the sum over the micro-batches that ran here.
        ops: what computes, see `numerics.operations`.
    """

    def __init__(self, settings: Settings, stage: int, device: torch.device):
        model, parallel = settings.model, settings.parallel
        self.settings, self.stage, self.device = settings, stage, device
        self.first, self.last = stage == 0, stage == parallel.stages - 1
        self.microbatches = parallel.pipelines * parallel.microbatches  # G
        self.boundary = ((parallel.microbatch_size, model.sequence, model.width), torch.float32)

        self._sink = WeightGradStore()
        layers = layers_of(model, parallel.stages)[stage]
        build = Build(model, settings.run.seed, device, self._sink)
        self._part, self.ops = Transformer(build, layers), build.ops
        self.layout = Layout({name: parameter.shape for name, parameter in self._part.named_parameters()})
        self.flat = flatten(self._part, self.layout)
        self.parameters = dict(self._part.named_parameters())
        self.names = self.layout.names
        reproducible = settings.numerics.reproducible
        self.gradients = Gradients(self.layout, self.microbatches, device, reproducible=reproducible, ops=self.ops)
        self._sink.gradients = self.gradients
        self._flights: dict[int, _Flight] = {}

    def forward(self, step: int, g: int, source: Tensor, targets: Tensor | None = None) -> Tensor:
        """F. Tokens (b, T) int64 at stage 0, else the boundary tensor -> the boundary tensor, or the scalar loss.

        Tokens and targets may be on the CPU: data are made there.
        """
        source, targets = self._here(source, targets)
        leaf = source if self.first else _aligned(source.detach()).requires_grad_()
        with self._autocast():
            output = self._part(leaf, targets, key=(self.settings.run.seed, step, g))
        result = output.detach()
        self._flights[g] = _Flight(leaf, output, result if self.last else None)
        return result

    def backward_input(self, g: int, grad: Tensor | None = None) -> Tensor | None:
        """I: the gradient of the stage's input (None at stage 0); the weights' gradients wait for W.

        grad: gradient of the boundary tensor that F returned; None at the last stage.
        """
        queue: Queue = []
        self._flights[g].queue = queue
        return self._backward(g, grad, queue)

    def backward_weight(self, g: int) -> None:
        """W: the weights' gradients that I left, into the accumulators; the micro-batch is done here."""
        flight = self._flights.pop(g)
        assert flight.queue is not None, "W before I"
        self._sink.flush(flight.queue)
        self.gradients.close(g, flight.loss)

    def backward(self, g: int, grad: Tensor | None = None) -> Tensor | None:
        """B: I and W in one, with nothing queued; the same bits."""
        dx = self._backward(g, grad, None)
        self.gradients.close(g, self._flights.pop(g).loss)
        return dx

    @torch.no_grad()
    def evaluate(self, source: Tensor, targets: Tensor | None = None) -> Tensor:
        """F of a validation micro-batch: no dropout, nothing kept."""
        with self._autocast():
            return self._part(*self._here(source, targets))

    def warm(self) -> None:
        """Everything that a step launches, once, on zeros of the real shapes; leaves no trace.

        The first launch of a kernel compiles it, which in the middle of a step looks like a hang to the peers. So a
        worker does this at its start, under the lease for it: what is compiled is what will be launched.
        """
        shape, dtype = self.boundary
        tokens = torch.zeros(shape[:2], dtype=torch.int64, device=self.device)
        source = tokens if self.first else torch.zeros(shape, dtype=dtype, device=self.device)
        targets = tokens if self.last else None
        grad = None if self.last else torch.zeros(shape, dtype=dtype, device=self.device)
        self.forward(0, 0, source, targets)
        self.backward_input(0, grad)
        self.backward_weight(0)  # writes the sums
        self.forward(0, 1, source, targets)
        self.backward(1, grad)  # adds to them
        self.evaluate(source, targets)
        self.gradients.reduced(self.gradients.payload())
        self.gradients.clear()

    def drop_flights(self) -> None:
        """Forgets the micro-batches between F and W; the gradients of those that are done stay."""
        self._flights.clear()

    def digests(self) -> dict[str, str]:
        """The SHA-256 of every parameter's bytes, by name, in canonical order."""
        return {
            name: hashlib.sha256(parameter.detach().cpu().contiguous().numpy().tobytes()).hexdigest()
            for name, parameter in self.parameters.items()
        }

    def _backward(self, g: int, grad: Tensor | None, queue: Queue | None) -> Tensor | None:
        flight = self._flights[g]
        source, output = flight.source, flight.output
        flight.source = flight.output = None  # I frees the graph and the input
        assert source is not None and output is not None, "a micro-batch has one backward"
        if self.last:
            grad = torch.ones_like(output) / self.microbatches
        assert grad is not None, "the gradient of the boundary tensor is missing"
        self._sink.queue = queue
        torch.autograd.backward(output, _aligned(grad))
        return None if self.first else source.grad

    def _here(self, source: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return source.to(self.device), None if targets is None else targets.to(self.device)

    def _autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.numerics.precision == "bf16")


def flatten(module: torch.nn.Module, layout: Layout) -> Tensor:
    """Moves all parameters of `module` into one float32 vector, which it returns; they become views of it."""
    parameters = dict(module.named_parameters())
    flat = layout.zeros(next(iter(parameters.values())).device)
    for (name, parameter), view in zip(parameters.items(), layout.views(flat), strict=True):
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, torch.nn.Parameter(view.copy_(parameter.detach())))
    return flat


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor where the bits of matrix products do not depend on its address; a copy in the rare case only."""
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()
