"""The optimizer state of the blocks that one worker holds, where no worker of a stage has all of it.

    optimizer = ShardedOptimizer(settings, stage)
    optimizer.begin(block)                           # its state is that with which the stage began
    optimizer.put(block, parcel)                     # its state as another holder gave it (`given`)
    optimizer.start_step(blocks, first)              # room for these blocks' gradients: optimizer.shards[block].grad
    checksums, changed = optimizer.inspected()       # of the same, before it
    optimizer.step(reduced, step, scale)             # at the commit: of these blocks; the others are dropped
    optimizer.speculate(reduced, step); optimizer.confirm()     # the same bits as step(..., scale=1)
    optimizer.speculate(reduced, step); optimizer.undo()        # of these blocks, as if nothing had happened

A block is a block of the stage's layout (`numerics.layout`), a flat piece of each vector of the state. Its update has
the bits that `StageOptimizer` gives it: AdamW is elementwise, and blocks begin and end at multiples of 16 elements,
which is what a CPU's vector loop takes at a time. In float32 the master is the weight itself, a view of the stage's
vector; in bf16 it is a tensor of its own, and the stage's float32 vector goes when every block has found its holders.

An update changes the weights of the blocks that are held here; those of the others come from their holders
(`state.shards`), and `stage.changed()` has to follow.

Nothing but `step` may change the state. With control.mismatch=third each block has a seal, the checksum of what `step`
has left, which goes with its copies: so a worker whose memory has changed a bit can say so itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from recycle_pp.comm.tensor_bytes import aligned_bytes
from recycle_pp.config.settings import Optimizer, Settings

from .gradients import Reduced
from .layout import Layout, depth_of
from .operations import State
from .optimizer import Updated, factors, learning_rate

Load = Callable[[list[str]], Mapping[str, Tensor]]  # tensors of a checkpoint, by their names there


class Stage(Updated, Protocol):
    """What it needs of a stage: `working` is what is computed with, bf16 or `flat` itself."""

    working: Tensor
    device: torch.device

    def borrows(self, name: str) -> bool: ...


@dataclass
class Shard:
    """State and gradient of one block: flat float32 vectors of its size; grad is None but from a reduction to the
    commit. before: the state that a speculation overwrites; allocated at the first one, then reused. seal: (1,) int64,
    the checksum of the state as its update has left it, None without; changed: (1,) bool, whether it was found to be
    another one since."""

    master: Tensor
    mean: Tensor
    square: Tensor
    grad: Tensor | None = None
    before: State | None = None
    seal: Tensor | None = None
    changed: Tensor | None = None

    @property
    def state(self) -> State:
        return self.master, self.mean, self.square

    def checksum(self, before: bool = False) -> Tensor:
        """(1,) int64: of all bits of the state, 64 at a time, modulo 2**64. One that flips changes it. Reads all.
        before: of what a speculation has overwritten."""
        state = self.before if before else self.state
        assert state is not None
        master, mean, square = (vector.view(torch.int64).sum(0, keepdim=True) for vector in state)
        return master + 3 * mean + 5 * square  # odd factors: no bit gets lost

    def compare(self) -> None:
        """Finds out whether anything has changed the state since it was sealed."""
        if self.seal is not None:
            now = self.checksum() != self.seal
            self.changed = now if self.changed is None else self.changed | now


class ShardedOptimizer:
    """Attributes: shards, by the block's number, only those that are held here."""

    def __init__(self, settings: Settings, stage: Stage) -> None:
        self._settings, self._stage = settings.optimizer, stage
        self._steps = settings.run.steps
        self._seals = settings.control.mismatch == "third"
        self._rounds = stage.working is not stage.flat
        self._spans = stage.layout.spans
        self._ways = [_Way.of(settings.optimizer, stage, block) for block in range(len(self._spans))]
        self._load: Load | None = None
        self._last: dict[str, Tensor] = {}  # the tensors of the checkpoint that were read last
        self._first: set[int] = set()
        self._before: Tensor | None = None  # the exponents that a speculation has replaced, while one is open
        self.shards: dict[int, Shard] = {}

    def lr(self, step: int) -> float:
        return learning_rate(self._settings, step, self._steps)

    def resume(self, load: Load) -> None:
        """The state with which the stage begins is that of a checkpoint. Reads the weights at once, the moments of a
        tensor when a block of it is held."""
        names, stage = self._stage.names, self._stage
        for name, view in zip(names, stage.layout.views(stage.flat), strict=True):
            key = f"model.{name}"
            view.copy_(load([key])[key])
        gradients = stage.gradients
        if gradients.reproducible:
            exponents = load([f"exponent.{name}" for name in names])
            rows = [exponents[f"exponent.{name}"] for name in names]
            sizes = stage.layout.rows
            gradients.take_exponents(torch.cat([e.expand(n) for e, n in zip(rows, sizes, strict=True)]).int())
        stage.publish()
        self._load = load

    @torch.no_grad()
    def warm(self) -> None:
        """Launches what a step does (see `Stage.warm`), on nothing of the stage's."""
        for way, span in zip(self._ways, self._spans, strict=True):
            mean, square, grad, master = (_empty(span.stop - span.start, self._stage.device).zero_() for _ in range(4))
            state = master, mean, square
            undos: list[State | None] = [None, state] if self._settings.stagger else [None]
            for undo in undos:
                self._stage.ops.adamw(state, grad, way.places, way.settings, lr=0.0, step=0, scale=1.0, undo=undo)
            self._stage.ops.squared_norms(grad, way.places)

    # -- who holds what

    @torch.no_grad()
    def begin(self, block: int) -> None:
        """Holds the block in the state with which the stage began."""
        flat = self._stage.flat[self._spans[block]]
        mean, square = (self._moment(prefix, block) for prefix in ("exp_avg", "exp_avg_sq"))
        shard = self.shards[block] = Shard(_copy(flat) if self._rounds else flat, mean, square)
        self._seal(shard)

    @torch.no_grad()
    def put(self, block: int, parcel: Sequence[Tensor]) -> None:
        """Holds the block as `given` has it: takes the vectors over. Its weights follow."""
        master, mean, square, *seal = parcel
        if not self._rounds:
            mine = self._stage.flat[self._spans[block]]
            mine.data.copy_(master)  # what it is already, if weights are here: micro-batches in flight go on with them
            master = mine
        self.shards[block] = Shard(master, mean, square, seal=seal[0] if seal else None)
        self._round(block)

    def given(self, block: int) -> list[Tensor]:
        """What another worker needs to hold the block: three float32 vectors, and their seal if they have one."""
        shard = self.shards[block]
        return [*shard.state, *([] if shard.seal is None else [shard.seal])]

    def room(self, block: int) -> list[Tensor]:
        """Uninitialised memory for what `put` takes."""
        return [
            *self._vectors(block),
            *([torch.empty(1, dtype=torch.int64, device=self._stage.device)] if self._seals else []),
        ]

    def settled(self) -> None:
        """What the stage began with is not needed any more but here: in bf16 its float32 vector goes."""
        self._load, self._last = None, {}
        if self._rounds:
            self._stage.flat = self._stage.working

    # -- a step

    def start_step(self, blocks: Iterable[int], first: Iterable[int]) -> None:
        """Room for the gradients of these blocks, and of no other. New memory: in the old a message of a reduction that
        was broken off may still arrive. first: those that this worker saves."""
        for shard in self.shards.values():
            shard.grad = None
        self.start_gradients(blocks)
        self._first = set(first)

    def start_gradients(self, blocks: Iterable[int]) -> None:
        """New memory for the gradients of these blocks."""
        for block in blocks:
            span = self._spans[block]
            self.shards[block].grad = _empty(span.stop - span.start, self._stage.device)

    def gradient(self, block: int) -> Tensor:
        """Flat, float32; of a block that has one."""
        grad = self.shards[block].grad
        assert grad is not None
        return grad

    def restore(self, block: int, sums: Tensor) -> Tensor:
        """Its flat gradient, out of its flat sums; the gap behind a tensor is zero."""
        grad = self.gradient(block)
        view = self.view(block, grad)
        self._stage.gradients.restore_block(block, self.view(block, sums), view)
        grad[view.numel() :].zero_()
        return grad

    def largest(self, block: int, grad: Tensor) -> Tensor:
        """See `Gradients.largest_of`."""
        return self._stage.gradients.largest_of(self.view(block, grad))

    @torch.no_grad()
    def step(self, reduced: Reduced, step: int, scale: float | None) -> None:
        """One AdamW step (number `step`, from 0) of the blocks that have a gradient, times `scale`; None: it is
        skipped. The state of others is out of date from here on, and goes."""
        if scale is not None:
            self._update(step, scale, ahead=False)
        self._stage.gradients.follow(reduced)
        self._drop()

    @torch.no_grad()
    def speculate(self, reduced: Reduced, step: int) -> None:
        """The step before it is sure, with scale 1: keeps what it overwrites, and the gradients. Not with seals."""
        assert not self.is_ahead, "confirm() or undo() the last speculation first"
        self._before = self._stage.gradients.exponents
        self._update(step, 1.0, ahead=True)
        self._stage.gradients.follow(reduced)

    @property
    def is_ahead(self) -> bool:
        """A speculation is open."""
        return self._before is not None

    def confirm(self) -> None:
        """The speculated step stands."""
        assert self._before is not None, "nothing was speculated"
        self._before = None
        self._drop()

    @torch.no_grad()
    def undo(self) -> None:
        """State, exponents and weights of the blocks with a gradient are again what they were before speculate(), in
        every bit; the weights of others are what they have become."""
        assert self._before is not None, "nothing was speculated"
        for block, shard in self._updated():
            assert shard.before is not None
            for kept, tensor in zip(shard.before, shard.state, strict=True):
                tensor.copy_(kept)
            self._round(block)
        self._stage.gradients.exponents, self._before = self._before, None

    @torch.no_grad()
    def inspected(self) -> tuple[dict[int, int], list[int]]:
        """(the checksum of each block that has a gradient, in order, as it was before that; the blocks of these that
        something other than an update has changed, as far as there are seals). Reads the state."""
        held = dict(sorted(self._updated()))
        checksums = torch.cat([shard.checksum(self.is_ahead) for shard in held.values()]).tolist() if held else []
        changed = []
        for (block, shard), checksum in zip(held.items(), checksums, strict=True):
            found = shard.seal is not None and checksum != shard.seal.item()
            if found or (shard.changed is not None and shard.changed.item()):
                changed.append(block)
        return dict(zip(held, checksums, strict=True)), changed

    def _updated(self) -> list[tuple[int, Shard]]:
        """Those that have a gradient."""
        return [(block, shard) for block, shard in self.shards.items() if shard.grad is not None]

    def _update(self, step: int, scale: float, ahead: bool) -> None:
        lr = self.lr(step)
        for block, shard in self._updated():
            assert shard.grad is not None
            if ahead and shard.before is None:
                shard.before = self._vectors(block)
            shard.compare()  # what has changed by now would be sealed as if it were right
            way, undo = self._ways[block], shard.before if ahead else None
            self._stage.ops.adamw(
                shard.state, shard.grad, way.places, way.settings, lr=lr * way.lr, step=step, scale=scale, undo=undo
            )
            self._round(block)
            self._seal(shard)

    def _drop(self) -> None:
        """The step is agreed: the gradients go, and the state of blocks that had none."""
        self.shards = dict(self._updated())
        for shard in self.shards.values():
            shard.grad = None

    @property
    def names(self) -> list[str]:
        """What is in each block of the stage: `NAME[first row:last row]`."""
        layout = self._stage.layout
        return [f"{layout.names[b.tensor]}[{b.rows.start}:{b.rows.stop}]" for b in layout.blocks]

    def view(self, block: int, flat: Tensor) -> Tensor:
        """A block's flat vector as (rows, columns)."""
        rows, columns = self._ways[block].shape
        return flat[: rows * columns].view(rows, columns)

    def squares(self, block: int, grad: Tensor) -> Tensor:
        """The squared norm of a block's flat gradient, (1,) float64, as of a block of the whole."""
        return self._stage.ops.squared_norms(grad, self._ways[block].places)

    # -- for checkpoints

    def pieces(self, everything: bool = False) -> dict[str, Tensor]:
        """State by `NAME@OFFSETS/SHAPE` (see `state.checkpoint.Piece`): of the blocks that this worker is the first
        holder of, or of all; each a view of at most as many dimensions as the tensor has. Exponents go with block 0."""
        found: dict[str, Tensor] = {}
        layout = self._stage.layout
        for block, shard in sorted(self.shards.items()):
            if everything or block in self._first:
                about = layout.blocks[block]
                name, shape = layout.names[about.tensor], layout.shapes[about.tensor]
                if self._stage.borrows(name):
                    continue
                for prefix, flat in zip(("model", "exp_avg", "exp_avg_sq"), shard.state, strict=True):
                    for offsets, piece in _boxes(shape, about.rows, self.view(block, flat), depth_of(shape)):
                        found[f"{prefix}.{name}@{_list(offsets)}/{_list(shape)}"] = piece
        gradients = self._stage.gradients
        if gradients.reproducible and (everything or 0 in self._first):
            for index, name in enumerate(layout.names):
                if not self._stage.borrows(name):
                    found[f"exponent.{name}"] = gradients.exponents_of(index)
        return found

    @property
    def tensors(self) -> list[str]:
        """What the pieces of all holders are pieces of."""
        names = [name for name in self._stage.layout.names if not self._stage.borrows(name)]
        prefixes = ["model", "exp_avg", "exp_avg_sq", *["exponent"] * self._stage.gradients.reproducible]
        return [f"{prefix}.{name}" for name in names for prefix in prefixes]

    def copied(self) -> dict[str, Tensor]:
        """Copies of the masters that are held here, on the CPU, by `NAME[first row:last row]`, for their digests."""
        names = self.names
        return {names[block]: shard.master.to("cpu", copy=True) for block, shard in sorted(self.shards.items())}

    @torch.no_grad()
    def checksums(self) -> dict[str, str]:
        """Of the state of each block that is held here, by `state of NAME[first row:last row]`, likewise. Raises
        RuntimeError where a block has changed since its update, and must not be saved."""
        names = self.names
        for block, shard in sorted(self.shards.items()):
            shard.compare()
            if shard.changed is not None and shard.changed.item():
                raise RuntimeError(f"its copy of {names[block]} has changed since its update")
        return {f"state of {names[block]}": str(of.checksum().item()) for block, of in sorted(self.shards.items())}

    def _vectors(self, block: int) -> State:
        size, device = self._spans[block].stop - self._spans[block].start, self._stage.device
        return _empty(size, device), _empty(size, device), _empty(size, device)

    def _seal(self, shard: Shard) -> None:
        if self._seals:
            shard.seal = shard.checksum()

    def _round(self, block: int) -> None:
        """The weights that are computed with, of a block that is held here."""
        if self._rounds:
            self._stage.working[self._spans[block]].data.copy_(self.shards[block].master)

    def _moment(self, prefix: str, block: int) -> Tensor:
        layout, span = self._stage.layout, self._spans[block]
        flat = _empty(span.stop - span.start, self._stage.device).zero_()
        if self._load is not None:
            about = layout.blocks[block]
            key = f"{prefix}.{layout.names[about.tensor]}"
            if key not in self._last:
                self._last = {k: v for k, v in self._last.items() if not k.startswith(f"{prefix}.")}
                self._last[key] = self._load([key])[key]
            whole = self._last[key].view(layout.rows[about.tensor], -1)
            self.view(block, flat).copy_(whole[about.rows])
        return flat


@dataclass(frozen=True)
class _Way:
    """How a block is updated: as a tensor of its own that is a matrix or a vector as the whole is; lr times `lr`."""

    shape: tuple[int, int]
    places: Any
    settings: Optimizer
    lr: float

    @classmethod
    def of(cls, settings: Optimizer, stage: Stage, block: int) -> _Way:
        layout = stage.layout
        shape, name = layout.shape_of_block(block), layout.names[layout.blocks[block].tensor]
        lr, decay = factors(settings, name)
        own = replace(settings, weight_decay=settings.weight_decay * decay)
        alone = Layout({name: shape}, block=1 << 62)
        rows = layout.blocks[block].rows
        matrix = rows.stop - rows.start, prod(shape) // (rows.stop - rows.start)
        return cls(matrix, stage.ops.places(alone, stage.device), own, lr)


def _boxes(shape: Sequence[int], rows: slice, matrix: Tensor, depth: int) -> Iterator[tuple[list[int], Tensor]]:
    """Rows of a tensor seen as a matrix, as boxes of the tensor itself: (offsets, piece), each a view of `matrix`.
    depth: how many of the first dimensions the rows number."""
    if depth == 0:
        yield [0] * len(shape), matrix.reshape(tuple(shape))
        return
    if depth == 1:
        yield [rows.start, *[0] * (len(shape) - 1)], matrix.reshape(-1, *shape[1:])
        return
    inner, row = prod(shape[1:depth]), rows.start
    while row < rows.stop:
        outer = row // inner
        stop = min(rows.stop, (outer + 1) * inner)
        part = matrix[row - rows.start : stop - rows.start]
        for offsets, piece in _boxes(shape[1:], slice(row - outer * inner, stop - outer * inner), part, depth - 1):
            yield [outer, *offsets], piece.unsqueeze(0)
        row = stop


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _empty(size: int, device: torch.device) -> Tensor:
    return aligned_bytes(4 * size, device).view(torch.float32)


def _copy(flat: Tensor) -> Tensor:
    return _empty(flat.numel(), flat.device).copy_(flat)
