"""The gradient of one stage: a sum over this worker's micro-batches, then over the stage's workers.

    gradients = Gradients(layout, microbatches=G, device=device, reproducible=False, ops=ops)
    gradients.add(name, grad); gradients.close(g, loss)     # the gradient of micro-batch g is complete
    payload = gradients.payload()                           # fresh tensors: SUM-all-reduce them in place
    reduced = gradients.reduced(payload)                    # the gradient of the mean loss over all G micro-batches
    gradients.clear()                                       # for the next step

By default the sums are float32. With `reproducible` they are fixed point (see `fixed_point`): int64 with one exponent
per unit, or int32 with one per row. `follow(reduced)` derives the next exponents from the reduced gradient, which all
peers hold, so all peers have the same exponents. After a gradient that did not fit, `begin_again(attempt, reduced)`
clears the sums and changes the exponents. Each layer has its own rows of exponents (`exponents_of_layers`), which
travel with the layer into checkpoints, to followers and to other stages.

A second tensor, the book, is reduced together with the gradient: (4, G) float64. Its rows contain, for each
micro-batch, how often it was counted, its loss, whether its gradient did not fit the fixed point (above 0), and whether
its gradient was not finite (above 0).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import fixed_point as fixed
from .layout import LayerMemory, Layout
from .operations import Operations


@dataclass(frozen=True)
class Reduced:
    """A stage's gradient of the mean loss over all G micro-batches. All peers have the same bits.

    flat     float32, read only: the gradients of `units`, concatenated
    counts   (G,) int64, how often each micro-batch was counted; all 1 in a correct step
    losses   (G,) float64, zeros except in the last stage
    squares  squared norm of each unit of the stage, in canonical order
    finite   False if an addend had a NaN or an infinity
    fits     False if the finite gradient did not fit the sums; the step must be repeated
    shared   this stage's sums of those tied units that this worker reduces, in one vector (`numerics.ties`); None in a
             stage without tied units
    largest  `Gradients.largest_of` of all units, for `follow`; None if it can be computed because `flat` contains all
             units
    units    numbers of the units in `flat`, ascending; None: all units of the stage
    """

    flat: Tensor
    counts: Tensor
    losses: Tensor
    squares: list[float]
    finite: bool
    fits: bool = True
    shared: Tensor | None = None
    largest: Tensor | None = None
    units: tuple[int, ...] | None = None

    def to_tensors(self) -> list[Tensor]:
        """This gradient as tensors that a peer can receive: [`flat`, (2, G) float64, (2 + units,) float64, `shared`].

        `shared` is left out if it is None. A peer calls `from_tensors`.
        """
        book = torch.stack([self.counts.double(), self.losses])
        rest = torch.tensor([float(self.finite), float(self.fits), *self.squares], dtype=torch.float64)
        shared = [] if self.shared is None else [self.shared]
        return [self.flat, book.to(self.flat.device), rest.to(self.flat.device), *shared]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> Reduced:
        flat, book, rest, *shared = tensors
        counts, losses = book.cpu()
        finite, fits, *squares = rest.tolist()
        return cls(flat, counts.long(), losses, squares, bool(finite), bool(fits), shared[0] if shared else None)


class Gradients:
    """Accumulators of one stage on one worker.

    Attributes:
        exponents: int32 (rows,) on the device, the fixed-point exponents of a step's first attempt; empty unless
            reproducible. They are part of the stage's state and are saved in checkpoints. The tensor is replaced, never
            changed.
        places: `ops.places` of the layout
        tied: the units that other stages hold too, in the same order in every stage
    """

    def __init__(
        self,
        layout: Layout,
        microbatches: int,
        device: torch.device,
        *,
        reproducible: bool,
        ops: Operations,
        parts: Sequence[int] | None = None,
        shared: Collection[str] = (),
        form: fixed.Format = fixed.INT64,
    ):
        """parts: for each tensor, how many times a micro-batch adds to its gradient; None: once each
        shared: names of the tensors that other stages hold too
        form: format of the sums, if `reproducible`"""
        self.microbatches, self.reproducible = microbatches, reproducible
        self._ops = ops
        self._shared = set(shared)
        self.device, self.dtype = device, form.dtype if reproducible else torch.float32  # dtype of the sums
        # _attempt: number of the current attempt; _learnt: number of the attempt that set the exponents, or 0
        self._form, self._attempt, self._learnt = form, 0, 0
        self._book = torch.zeros(4, microbatches, dtype=torch.float64, device=device)
        self._bad = torch.zeros(2, dtype=torch.float64, device=device)
        self._place(layout, layout.memory(device, self.dtype), parts)  # not zeroed: the first gradient overwrites it
        self.exponents = self._first

    def relayout(
        self,
        layout: Layout,
        others: Sequence[Gradients],
        parts: Sequence[int] | None = None,
        shared: Collection[str] = (),
    ) -> None:
        """Changes the layers in place, and drops all sums.

        Layers in `others` bring their memory and their exponents; the stage's previous layers keep theirs. If `others`
        is not empty, the number of the current attempt is taken from its first object.
        """
        sources = [*others, self]
        found: dict[int, Tensor] = {}
        for of in reversed(sources):
            found |= of.exponents_of_layers()
        attempts = sources[0]._attempt, sources[0]._learnt
        self._shared = set(shared)
        self._place(layout, layout.gathered([(of.layout, of._memory) for of in sources]), parts)
        self.exponents = torch.cat([found[layer] for layer in layout.layers])
        self._attempt, self._learnt = attempts

    def _place(self, layout: Layout, memory: LayerMemory, parts: Sequence[int] | None) -> None:
        self.layout, self.names = layout, layout.names
        self.places = self._ops.places(layout, self.device)
        self._index = {name: index for index, name in enumerate(layout.names)}
        self._parts = list(parts or [1] * len(layout.names))
        self._alone: dict[int, Any] = {}  # `ops.places` of single units
        tied = [unit for unit, of in enumerate(layout.units) if layout.names[of.tensor] in self._shared]
        self.tied = sorted(tied, key=layout.unit_names.__getitem__)
        self._memory, self._sums = memory, layout.views(memory)
        rows = sum(layout.rows) if self.reproducible else 0
        unknown = torch.full((rows,), fixed.FIRST, device=self.device)
        self._first = fixed.exponents(unknown, self.microbatches, self._form)
        self.clear()

    # --- the gradient of a micro-batch

    def add(self, index: int | str, grad: Tensor) -> None:
        """Adds the gradient of tensor `index` (or name). Does not change `grad`."""
        index = self._index[index] if isinstance(index, str) else index
        total, first = self._sums[index], self._fresh(index)
        if self.reproducible:
            self._ops.accumulate(total, grad, *self._format(index), first)
        elif first:
            total.copy_(grad)
        else:
            total.add_(grad)

    def add_product(self, index: int, dy: Tensor, x: Tensor, parts: int = 1) -> None:
        """Adds dy^T x to the gradient of a matrix. dy (N, O), x (N, K), float32 or bfloat16.

        parts: number of calls into which the caller divides this gradient"""
        total, first = self._sums[index], self._fresh(index)
        if self.reproducible:
            self._ops.accumulate_product(total, dy, x, *self._format(index, parts), first)
        else:
            self._ops.add_product(total, dy, x, first)

    def add_sum(self, index: int, dy: Tensor) -> None:
        """Adds the gradient of a bias: dy (N, O), summed over N."""
        self.add(index, dy.sum(0, dtype=torch.float32))

    def add_rows(self, index: int, rows: Tensor, dy: Tensor) -> None:
        """Adds the gradient of an embedding: dy (N, H), float32 or bfloat16, to the rows `rows` (N,) int64."""
        total, dy = self._sums[index], dy.float()
        if self._fresh(index):
            total.zero_()
        if not self.reproducible:
            total.index_add_(0, rows, dy)
            return
        # First sums the gradients of the same row in float32, as autograd does. Changes only the rows that occur.
        rows, position = torch.unique(rows, return_inverse=True)
        grad = torch.ops.aten.embedding_dense_backward(dy, position, len(rows), -1, False)
        sums = total[rows]
        e, limit, bad = self._format(index)
        self._ops.accumulate(sums, grad, e[rows] if len(e) > 1 else e, limit, bad, False)
        total[rows] = sums

    @property
    def without(self) -> list[str]:
        """The names of the tensors to which no gradient was added since `clear`."""
        return [name for name, empty in zip(self.names, self._empty, strict=True) if empty]

    def close(self, g: int, loss: Tensor | float | None) -> None:
        """Marks the gradient of micro-batch g as complete. loss: its loss at the last stage, else None."""
        self._book[0, g] += 1
        if loss is not None:
            self._book[1, g] += loss
        if self.reproducible:
            self._book[2:, g] += self._bad
            self._bad.zero_()

    def clear(self) -> None:
        """Drops all micro-batches. The next attempt is the first of a step."""
        self._attempt = self._learnt = 0
        self._empty = [True] * len(self._sums)  # the first gradient of a tensor is written, not added to zeros
        self._book.zero_()
        self._bad.zero_()

    # --- the sum over the peers

    def payload(self) -> list[Tensor]:
        """Fresh copies of [the flat sum (float32, int64 or int32), the book (4, G) float64], to all-reduce in place.

        They are copies because an aborted all-reduce leaves its buffers partly summed.
        """
        return [self.sums().joined(), self.book()]

    def sums(self) -> LayerMemory:
        """The accumulators themselves. The caller must not change them."""
        for index, total in enumerate(self._sums):
            if self._fresh(index):
                total.zero_()
        return self._memory

    def book(self) -> Tensor:
        """A copy of the book (4, G) float64."""
        return self._book.clone()

    def reduced(self, payload: Sequence[Tensor]) -> Reduced:
        """The result of an all-reduced payload. The flat gradient may share the payload's memory."""
        flat = payload[0]
        shared = self.shared_of({unit: flat[self.layout.spans[unit]] for unit in self.tied})
        if self.reproducible:
            totals = self.layout.views(flat)
            flat = self.layout.vector(flat.device)
            for index, (total, out) in enumerate(zip(totals, self.layout.views(flat), strict=True)):
                self._ops.restore(total, self._exponents_now(index), out)
        squares = self._ops.squared_norms(flat, self.places).tolist()
        return self.concluded(flat, payload[1], squares, shared)

    def concluded(
        self,
        flat: Tensor,
        book: Tensor,
        squares: list[float],
        shared: Tensor | None = None,
        largest: Tensor | None = None,
        units: tuple[int, ...] | None = None,
    ) -> Reduced:
        """The result of a reduction. book: summed over the peers; other arguments: see `Reduced`."""
        counts, losses, misfits, broken = book.cpu()
        fits = not self.reproducible or (self.known and not misfits.any())
        finite = math.isfinite(losses.sum().item()) and not broken.any() and (not fits or math.isfinite(sum(squares)))
        return Reduced(flat, counts.long(), losses, squares, bool(finite), bool(fits), shared, largest, units)

    def follow(self, reduced: Reduced) -> None:
        """Sets the next step's exponents from this step's gradient, if it is finite."""
        if self.reproducible and reduced.finite:
            largest = self._expected(reduced)
            e = fixed.exponents(largest, self.microbatches, self._form)
            self.exponents = torch.where(largest > 0, e, self.exponents)

    def begin_again(self, attempt: int, reduced: Reduced | None) -> None:
        """Drops all micro-batches of the current step and begins attempt number `attempt` (from 1).

        A new attempt gets new exponents. If `attempt` is the current attempt, the exponents do not change.

        reduced: result of the previous attempt; None if this worker does not hold it. Every worker holds the result of
            a job's first attempt.
        """
        learnt = self._learnt
        if attempt > self._attempt and not self.known and reduced is not None:
            largest = self._expected(reduced)
            least = fixed.powers(-self.exponents)  # smaller magnitudes have been rounded to zero
            self.exponents = fixed.exponents(largest.maximum(least), self.microbatches, self._form)
            learnt = attempt
        self.clear()
        self._attempt, self._learnt = attempt, learnt

    def take_exponents(self, exponents: Tensor) -> None:
        """Replaces the exponents with those of a peer or of a checkpoint."""
        self.exponents = exponents.to(self.device)

    def exponents_of_layers(self) -> dict[int, Tensor]:
        """Layer -> its exponents, in the order of its rows; empty tensors if the sums are not fixed-point."""
        rows = self.layout.layer_rows
        sizes = [count * self.reproducible for count in rows.values()]
        return dict(zip(rows, self.exponents.split(sizes), strict=True))

    def take_exponents_of_layers(self, exponents: Mapping[int, Tensor]) -> None:
        """Replaces the exponents of this stage's layers with those of a peer. Ignores other layers in `exponents`."""
        found = {layer: exponents.get(layer, own) for layer, own in self.exponents_of_layers().items()}
        self.take_exponents(torch.cat([of.to(self.device) for of in found.values()]))

    @property
    def known(self) -> bool:
        """Whether the exponents are usable. Always True except with int32 sums.

        With int32 sums the exponents must be derived from a gradient. Until then an attempt only measures magnitudes.
        In the first attempt of a step, the answer depends on the exponents alone, so all peers agree, including workers
        that have just joined.
        """
        learnt = self._learnt > 0  # derived in this step
        return learnt or not self._form.by_row or not torch.equal(self.exponents, self._first)

    def exponents_of(self, index: int) -> Tensor:
        """The exponents of a tensor, (rows of the tensor,)."""
        return self.exponents.split(self.layout.rows)[index]

    # --- single units; the vector of a unit includes the gap after it

    def grads(self, reduced: Reduced) -> dict[int, Tensor]:
        """Views of the units' gradients in `reduced`."""
        return self.layout.by_unit(reduced.flat, reduced.units)

    def shared_of(self, sums: Mapping[int, Tensor]) -> Tensor | None:
        """`Reduced.shared` from this worker's sums of tied units. None in a stage without tied units."""
        if not self._shared:
            return None
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return torch.cat([empty, *(sums[unit] for unit in self.tied if unit in sums)])

    def restore(self, unit: int, total: Tensor, out: Tensor, exponents: Tensor | None = None) -> None:
        """out (float32) = the gradient of a unit, from its sum `total`, which may have a wider dtype.

        exponents: those of the sum, if they are no longer the current ones
        """
        view = self.layout.matrix(unit, out)
        if self.reproducible:
            of = self.layout.units[unit]
            self._ops.restore(self.layout.matrix(unit, total), self._exponents_now(of.tensor, exponents)[of.rows], view)
        else:
            view.copy_(self.layout.matrix(unit, total))
        out[view.numel() :].zero_()

    def square(self, unit: int, grad: Tensor) -> Tensor:
        """The squared norm of a unit's gradient, (1,) float64, with the same bits as from `squared_norms`."""
        if unit not in self._alone:
            self._alone[unit] = self._ops.places(self.layout.part(range(unit, unit + 1)), self.device)
        return self._ops.squared_norms(grad, self._alone[unit])

    def largest_of(self, unit: int, grad: Tensor) -> Tensor:
        """The largest magnitude in a unit's gradient, (1,). With int32 sums: the largest in each row, (rows,)."""
        return self._largest(self.layout.matrix(unit, grad))

    @property
    def largest_counts(self) -> list[int]:
        """Number of elements that `largest_of` returns for each unit; 0 if the sums are not fixed-point."""
        if not self.reproducible:
            return [0] * len(self.layout.units)
        return [unit.length if self._form.by_row else 1 for unit in self.layout.units]

    def _largest(self, grad: Tensor) -> Tensor:
        if self._form.by_row:
            return torch.linalg.vector_norm(grad, math.inf, dim=1)
        return grad.abs().max().view(1)

    def _expected(self, reduced: Reduced) -> Tensor:
        """The largest magnitude to expect in each row of the next gradient, (rows,) float32.

        With int64 sums, all rows of a unit have the largest magnitude of the unit.
        """
        largest = reduced.largest
        if largest is None:
            largest = torch.cat([self._largest(grad) for grad in self.layout.units_of(reduced.flat)])
        if self._form.by_row:
            return torch.cat([rows.maximum(rows.max() * fixed.FLOOR) for rows in largest.split(self.layout.rows)])
        count = torch.tensor([unit.length for unit in self.layout.units], device=self.device)
        return largest.repeat_interleave(count, output_size=len(self.exponents))

    def _exponents_now(self, index: int, exponents: Tensor | None = None) -> Tensor:
        e = (self.exponents if exponents is None else exponents).split(self.layout.rows)[index]
        coarser = self._form.step * (self._attempt - self._learnt)
        return (e - coarser).clamp_(min=-126) if coarser else e

    def _fresh(self, index: int) -> bool:
        """Whether the tensor is still empty. Marks it as written."""
        fresh, self._empty[index] = self._empty[index], False
        return fresh

    def _format(self, index: int, parts: int = 1) -> tuple[Tensor, float, Tensor]:
        """The arguments (e, limit, bad) of `Operations.accumulate` for tensor `index`. parts: see `add_product`."""
        terms = self.microbatches * parts * self._parts[index]
        return self._exponents_now(index), fixed.limit(terms, self._form), self._bad
