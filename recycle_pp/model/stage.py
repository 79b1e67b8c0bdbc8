"""The compute of one pipeline stage on one worker. No communication, no decisions.

    stage = Stage(settings, 1, torch.device("cpu"))
    (y,) = stage.forward(step, g, batch, [x])   # op F; at the last stage y is the loss
    (dx,) = stage.backward_input(g, [dy])       # op I, the backward for the input
    stage.backward_weight(g)                    # op W, the backward for the weights; may run later
    (dx,) = stage.backward(g, [dy])             # op B, instead of I and W: both at once
    stage.gradients.payload()                   # the tensors that peers sum

    arriving = stage.arriving([7])              # memory for a layer that may move to this stage
    stage.relayout([4, 5, 6, 7], [arriving])    # between two steps; the stage then has these layers
    arriving = stage.arriving([0, 1, 2])        # memory for all layers of another stage
    stage.take_over(0, arriving)                # this stage becomes that stage

g is the number of a micro-batch in the step, from 0 to G - 1. The gradient is that of the mean loss over all G
micro-batches. The factor 1/G is applied at the start of the backward. A `StageModule` defines the computation: the
project's own Transformer, or any model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from recycle_pp.comm.tensor_bytes import aligned
from recycle_pp.config.settings import Optimizer, Settings
from recycle_pp.data.batches import blank
from recycle_pp.numerics.layer_tensors import LayerTensors
from recycle_pp.numerics.weight_grad_store import Queue, WeightGradStore

from . import transformer
from .custom_rules import custom_rules
from .stage_module import Batch, StageModule


@dataclass
class _Flight:
    """A micro-batch between its forward and the end of its backward. The op `I` frees inputs and outputs."""

    inputs: list[Tensor]
    outputs: list[Tensor]  # with their autograd graph
    loss: Tensor | None
    queue: Queue | None = None


class Stage(LayerTensors):
    """The layers of stage `stage`, their parameters and gradient accumulators.

    A stage has no other state across steps. Every result is a pure function of (parameters, step, g, operands), so any
    peer computes the same bits.

    Attributes, besides those of LayerTensors:
        parameters: full-model name -> parameter, in canonical order; views of `working`.
        module: the computation; `module.takes` and `module.gives` are the tensors between stages.
    """

    def __init__(
        self,
        settings: Settings,
        stage: int,
        device: torch.device,
        run_dir: str | Path | None = None,
        filled: bool = True,
    ):
        """run_dir: folder for the initial values of a model without a weights file
        filled: whether the parameters must have their initial values. If False, the project's own Transformer leaves
            them zero, because drawing billions of random numbers takes longer than receiving them from a peer

        Raises ValueError, with one sentence for the user, if the model cannot be trained with these settings.
        """
        self.stage = stage
        self.first, self.last = stage == 0, stage == settings.parallel.stages - 1
        self.module = module = module_of(settings, stage, device, run_dir, filled)
        _refuse_unmatched_groups(settings.optimizer, module.all_names)
        super().__init__(
            settings, *_described(module), module.ops, device,
            depth=module.depth, parts=_parts(module), shared=module.shared, choose=custom_rules(settings.optimizer),
        )  # fmt: skip
        self._sink = WeightGradStore()
        self._sink.gradients = self.gradients
        masters, views = (
            dict(zip(self.names, self.layout.views(flat), strict=True)) for flat in (self.flat, self.working)
        )
        with torch.no_grad():
            self.parameters = dict(module.bind(masters, views, self._sink))
        self._flights: dict[int, _Flight] = {}

    def forward(self, step: int, g: int, batch: Batch | None = None, boundary: Sequence[Tensor] = ()) -> list[Tensor]:
        """The op `F`, the forward. Returns the inputs of the next stage, or at the last stage [the scalar loss].

        batch: may be on the CPU, where the data are loaded; may be None if the module does not read it
        boundary: the outputs of the previous stage, empty at stage 0
        """
        leaves = [
            aligned(tensor.detach()).requires_grad_(of.differentiable)
            for tensor, of in zip(boundary, self.module.takes, strict=True)
        ]
        with self._autocast():
            outputs = list(self.module(self._here(batch), leaves, (self.settings.run.seed, step, g)))
        results = [output.detach().contiguous() for output in outputs]
        self._flights[g] = _Flight(leaves, outputs, results[0] if self.last else None)
        return results

    def backward_input(self, g: int, grads: Sequence[Tensor] = ()) -> list[Tensor]:
        """The op `I`. Returns the gradients of the forward's differentiable inputs. The gradients of the weights wait
        for the op `W`.

        grads: gradients of the forward's differentiable outputs; none at the last stage.
        """
        queue: Queue = []
        self._flights[g].queue = queue
        return self._backward(g, grads, queue)

    def backward_weight(self, g: int) -> None:
        """The op `W`. Computes the weight gradients that `backward_input` has queued, and adds them to the
        accumulators. Ends the micro-batch at this stage."""
        flight = self._flights.pop(g)
        assert flight.queue is not None, "W before I"
        self._sink.flush(flight.queue)
        self._close(g, flight)

    def backward(self, g: int, grads: Sequence[Tensor] = ()) -> list[Tensor]:
        """The op `B`: `I` and `W` at once, without a queue. The results have the same bits."""
        result = self._backward(g, grads, None)
        self._close(g, self._flights.pop(g))
        return result

    @torch.no_grad()
    def evaluate(self, batch: Batch | None = None, boundary: Sequence[Tensor] = ()) -> list[Tensor]:
        """The forward of a validation micro-batch. Has no dropout, and keeps nothing for a backward."""
        with self._autocast():
            outputs = self.module(self._here(batch), list(boundary), None)
        return [output.contiguous() for output in outputs]

    def warm(self) -> None:
        """Runs every kernel of a step once, on zeros of the real shapes. Leaves gradients and parameters as they were.

        The first launch of a kernel compiles it. In the middle of a step, a compilation would look like a hang, so a
        worker compiles at its start, when it has a longer time limit (a lease).
        """
        module = self.module
        batch = blank(self.settings) if module.reads else None
        taken = [of.empty(self.device).zero_() for of in module.takes]
        grads = [of.empty(self.device).zero_() for of in module.gives if of.differentiable]
        ways = [False, True] if self.settings.model.recompute == "auto" else [module.recompute]
        for module.recompute in reversed(ways):
            self.forward(0, 0, batch, taken)
            self.backward_input(0, grads)
            self.backward_weight(0)  # writes the sums
            self.forward(0, 1, batch, taken)
            self.backward(1, grads)  # adds to them
        self.evaluate(batch, taken)
        self.gradients.reduced(self.gradients.payload())
        self.gradients.clear()

    def drop_flights(self) -> None:
        """Drops the micro-batches whose backward is not complete. Gradients of finished micro-batches stay."""
        self._flights.clear()

    def arriving(self, layers: Sequence[int]) -> LayerTensors:
        """Allocates memory for layers of other stages (see `relayout` and `take_over`). The memory is zero."""
        shapes = [(name, shape, layer) for layer in layers for name, shape in self.module.shapes_of(layer).items()]
        return LayerTensors(
            self.settings,
            {name: shape for name, shape, _ in shapes},
            [layer for *_, layer in shapes],
            self.ops,
            self.device,
            depth=self.depth,
            cut=self.layout.cut,
            choose=self.choose,
        )

    def relayout(self, layers: Sequence[int], arriving: Sequence[LayerTensors] = (), stage: int | None = None) -> None:
        """Changes the layers of the stage in place. Call it between two steps, when no micro-batch is in flight and the
        sums are empty. Layers that stay or arrive keep their memory, and the memory of leaving layers is freed. Later
        results are bit-identical to those of a stage that has had these layers from the start.

        layers: all layers of the stage, in order (`StageModule.layers`); only those that can move may change
        arriving: results of `arriving`, with every layer that the stage lacks; the stage keeps their memory
        stage: see `take_over`
        """
        assert not self._flights, "a micro-batch is in flight"
        self.module.relayout(layers, stage)
        self.merge(*_described(self.module), arriving, _parts(self.module), self.module.shared)
        with torch.no_grad():
            views = dict(zip(self.names, self.layout.views(self.working), strict=True))
            self.parameters = dict(self.module.bind(None, views, self._sink))

    def take_over(self, stage: int, arrived: LayerTensors) -> None:
        """Becomes another stage, including its embedding or head. Drops all micro-batches and sums of the old stage.

        arrived: result of `arriving` for all layers of that stage; the stage keeps its memory"""
        self.stage, self.first, self.last = stage, stage == 0, stage == self.settings.parallel.stages - 1
        self.drop_flights()
        self.relayout([*arrived.layout.layers], [arrived], stage)

    def borrows(self, name: str) -> bool:
        """Whether an earlier stage also holds the parameter. If so, that stage votes on the parameter and saves it."""
        return min(self.module.shared.get(name, [self.stage])) != self.stage

    def digests(self) -> dict[str, str]:
        """SHA-256 of the bytes of every parameter (with bf16, of its master), by name, in canonical order."""
        return digests({name: master.cpu() for name, master in self.masters()})

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, parameter) for each parameter, in canonical order. With bf16, yields masters instead of parameters."""
        return zip(self.names, self.layout.views(self.flat), strict=True)

    def changed(self) -> None:
        """Invalidates autocast's bf16 copies after an in-place change of the weights."""
        torch.autograd.graph.increment_version(list(self.parameters.values()))

    def _backward(self, g: int, grads: Sequence[Tensor], queue: Queue | None) -> list[Tensor]:
        flight = self._flights[g]
        inputs, outputs = flight.inputs, flight.outputs
        flight.inputs, flight.outputs = [], []  # frees the graph and the input
        assert outputs, "a micro-batch has only one backward"
        if self.last:
            grads = [torch.ones_like(outputs[0]) / self.microbatches]
        else:
            outputs = [output for output, of in zip(outputs, self.module.gives, strict=True) if of.differentiable]
        assert len(grads) == len(outputs), "the gradient of a boundary tensor is missing"
        self._sink.queue = queue
        torch.autograd.backward(outputs, [aligned(grad) for grad in grads])
        return [_gradient(leaf) for leaf, of in zip(inputs, self.module.takes, strict=True) if of.differentiable]

    def _close(self, g: int, flight: _Flight) -> None:
        """Ends the micro-batch. Raises RuntimeError if a parameter got no gradient. Otherwise this parameter would
        silently never change."""
        if without := self.gradients.without:
            raise RuntimeError(f"micro-batch {g} gave {without[0]} no gradient ({len(without)} such parameters)")
        self.gradients.close(g, flight.loss)

    def _here(self, batch: Batch | None) -> Batch | None:
        return None if batch is None else batch.to(self.device)

    def _autocast(self) -> AbstractContextManager:
        enabled = self.settings.numerics.precision == "bf16-autocast"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)


def module_of(
    settings: Settings, stage: int, device: torch.device, run_dir: str | Path | None, filled: bool
) -> StageModule:
    """The computation of stage `stage`, for the model that `model.kind` names."""
    if not settings.model.own:
        from .general.part import part  # imported here, because the import is slow

        return part(settings, stage, device, run_dir)
    return transformer.part(settings, stage, device, filled)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """SHA-256 of the bytes of each CPU tensor. Releases the GIL while hashing."""
    return {name: hashlib.sha256(tensor.reshape(-1).numpy().data).hexdigest() for name, tensor in tensors.items()}


def _refuse_unmatched_groups(optimizer: Optimizer, names: Collection[str], shown: int = 5) -> None:
    """Raises ValueError if a pattern of `optimizer.groups` matches no parameter. The message suggests up to `shown`
    similar names.

    names: all parameters of the whole model
    """
    for group in optimizer.groups or ():
        pattern = group.partition(":")[0]
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, shown, cutoff=0.3) or list(names)[:shown]
            raise ValueError(f"optimizer.groups: {pattern} matches no parameter; similar names: {', '.join(near)}")


def _described(module: StageModule) -> tuple[Mapping[str, Sequence[int]], list[int]]:
    """(name -> shape, layers), for all parameters in the order of `module.shapes`."""
    return module.shapes, [module.layers[name] for name in module.shapes]


def _parts(module: StageModule) -> list[int]:
    return [module.parts.get(name, 1) for name in module.shapes]


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
