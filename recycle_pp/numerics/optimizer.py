"""AdamW on the units that one worker holds: at the commit, or before it as speculation that can be undone.

    optimizer = StageOptimizer(settings, stage)                 # holds all units, each layer in one piece of memory
    optimizer = StageOptimizer(settings, stage, whole=False)    # holds no units until begin() or put()
    optimizer.begin(unit)                                       # holds the initial state of a unit
    optimizer.put(unit, parcel)                                 # holds the state that another holder has `given`

    optimizer.step(reduced, step, scale)                        # at the commit
    optimizer.speculate(reduced, step); optimizer.confirm()     # the same bits as step(..., scale=1)
    optimizer.speculate(reduced, step); optimizer.undo()        # all bits as before

    arriving = optimizer.beside(stage.arriving([7]))            # for a layer that may move to the stage
    arriving.take(units, state); arriving.follow(reduced, step, scale)
    stage.relayout([4, 5, 6, 7], [arriving.tensors])            # between two steps
    optimizer.relayout([arriving])

A unit (`numerics.layout`) has three float32 vectors: masters, mean gradients, mean squared gradients. A step updates
the units that have a gradient in `reduced`, and drops the others because their state is out of date. AdamW is
elementwise, and units begin and end at multiples of 16 elements, the width of a CPU's vector loop. So a unit gets the
same bits whether it is updated alone or with its neighbours. One launch updates neighbouring units in one piece of
memory.

Weight decay applies to matrices, not to norm weights (Loshchilov and Hutter 2019, arXiv:1711.05101). On a CPU the bits
are those of `torch.optim.AdamW(fused=True)`. Without bf16 the masters are the weights: views of the stage's vector.

With control.mismatch=third each unit has a seal: the checksum of its state after the newest update. A copy of the unit
includes its seal. So a worker can detect by itself that its memory has changed without an update.

Only one thread updates. Another thread may `copy` the state. A lock keeps the two apart, so an update waits for one
copy at most.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.wire.messages.units import UnitId

from .gradients import Reduced
from .held import VECTORS, Held, empty, parts, renumbered
from .hyperparameters import learning_rate
from .initial_moments import InitialMoments, Load
from .launches import Run, runs_of
from .layer_tensors import LayerTensors
from .layout import LayerMemory
from .operations import State


class StageOptimizer:
    """The units that one worker holds, and AdamW on them.

    held: unit -> its state. Units in one piece of memory share one `Held`.
    tensors: the weights and the gradient sums of the stage"""

    def __init__(self, settings: Settings, tensors: LayerTensors, whole: bool = True) -> None:
        self.tensors = tensors
        self._all_settings, self._settings, self._whole = settings, settings.optimizer, whole
        self._steps = settings.run.steps
        self._seals = settings.control.mismatch == "third"
        self._rounds = tensors.working is not tensors.flat
        self._layout = tensors.layout  # numbers the units in `held`
        self._runs: dict[range, list[Run]] = {}
        self._initial = InitialMoments(tensors.layout, tensors.device)
        self._lock = threading.Lock()  # held while the state changes or a part of it is copied
        self._committed = -1  # newest step in the state
        self._ahead: tuple[Reduced, int, Tensor] | None = None  # open speculation: gradient, step, exponents before it
        self.held: dict[int, Held] = {}
        if whole:
            moments = [tensors.layout.zeros(tensors.device) for _ in range(2)]
            parts_of_layers = zip(tensors.flat.parts, *(moment.parts for moment in moments), strict=True)
            for units, state in zip(tensors.layout.layers.values(), parts_of_layers, strict=True):
                self.held |= dict.fromkeys(units, Held(units, state))

    def lr(self, step: int) -> float:
        return learning_rate(self._settings, step, self._steps)

    # -- held units

    def resume(self, load: Load) -> None:
        """Starts from a checkpoint. Reads weights and exponents now, and the moments of a tensor when `begin` is called
        for one of its units. With `whole`, reads everything now."""
        if self._whole:
            self.load(load(list(self.state())))
            return
        stage = self.tensors
        for name, view in zip(stage.names, stage.layout.views(stage.flat), strict=True):
            key = f"model.{name}"
            view.copy_(load([key])[key])
        self._take_exponents(load([f"exponent.{name}" for name in stage.names] if stage.gradients.reproducible else []))
        self._round_all()
        stage.changed()
        self._initial = InitialMoments(stage.layout, stage.device, load)

    @torch.no_grad()
    def begin(self, unit: int) -> None:
        """Starts to hold a unit, in its initial state."""
        master = self.tensors.flat[self._layout.spans[unit]]
        own = empty(len(master), master.device).copy_(master) if self._rounds else master
        held = Held(range(unit, unit + 1), (own, *self._initial.of(unit)))
        self.held[unit] = held
        self._seal(held)

    @torch.no_grad()
    def put(self, unit: int, parcel: Sequence[Tensor]) -> None:
        """Starts to hold a unit, in the state that another holder's `given` returned. Updates the unit's weights.

        parcel: the three vectors, then the seal if there are seals. The optimizer keeps these tensors, or copies them
            if it has memory for the unit already."""
        span, (master, mean, square, *seal) = self._layout.spans[unit], parcel
        if self._whole:
            for mine, vector in zip(self.vectors(unit), parcel, strict=True):
                mine.copy_(vector)
            self._round(span, master)
            return
        if not self._rounds:
            mine = self.tensors.flat[span]
            mine.data.copy_(master)  # in place: micro-batches in flight may have used these weights
            master = mine
        self.held[unit] = Held(range(unit, unit + 1), (master, mean, square), seal=seal[0] if seal else None)
        self._round(span, master)

    def given(self, unit: int) -> list[Tensor]:
        """The parcel of a unit for another worker: its vectors, then its seal if it has one."""
        seal = self.held[unit].seal
        return [*self.vectors(unit), *([] if seal is None else [seal])]

    def room(self, unit: int) -> list[Tensor]:
        """Uninitialised memory for a parcel, for `put`."""
        seal = [torch.empty(1, dtype=torch.int64, device=self.tensors.device)] if self._seals else []
        return [*self._vectors(range(unit, unit + 1)), *seal]

    def settled(self) -> None:
        """Ends the setup, once the worker holds all its units. Frees the initial state. With bf16 and sharded state,
        also frees the stage's float32 vector."""
        self._initial = InitialMoments(self._layout, self.tensors.device)
        if self._rounds and not self._whole:
            self.tensors.flat = self.tensors.working

    def vectors(self, unit: int) -> State:
        """Views of a unit's state."""
        held, span = self.held[unit], self._layout.spans[unit]
        start = span.start - self._layout.spans[held.units[0]].start
        return parts(held.state, slice(start, start + span.stop - span.start))

    # -- copies for followers (`state.follow`)

    def copy(self, names: Sequence[UnitId], newest: int) -> dict[str, Tensor] | None:
        """A copy of the state of these units on the CPU, concatenated in order. May be called from any thread.

        Keys: VECTORS, and "seal" if there are seals. None while the state is speculative or includes a step after
        `newest`. KeyError if a unit is not held."""
        with self._lock:
            if self._ahead is not None or self._committed > newest:
                return None
            units = [self._layout.number(name) for name in names]
            cut = [parts(held.state, place) for held, _, place, _ in self._pieces(units)]
            found = {
                name: vectors[0].to("cpu", copy=True) if len(vectors) == 1 else torch.cat([v.cpu() for v in vectors])
                for name, vectors in zip(VECTORS, zip(*cut, strict=True), strict=True)
            }
            seals = [self.held[unit].seal for unit in units]
            return found | ({"seal": torch.cat([of.cpu() for of in seals if of is not None])} if self._seals else {})

    def start_following(self) -> None:
        """Drops all units, before a new session of following begins."""
        if not self._whole:
            self.held = {}

    @torch.no_grad()
    def take(self, units: Sequence[int], state: Mapping[str, Tensor]) -> None:
        """Starts to hold these units, in the state that `copy` returned on another worker."""
        sizes = [self._layout.spans[unit].stop - self._layout.spans[unit].start for unit in units]
        vectors = [state[name].split(sizes) for name in VECTORS]
        seals = [state["seal"].split(1)] if self._seals else []
        for unit, *parcel in zip(units, *vectors, *seals, strict=True):
            own = parcel if self._whole else [to.copy_(of) for to, of in zip(self.room(unit), parcel, strict=True)]
            self.put(unit, own)

    @torch.no_grad()
    def follow(self, reduced: Reduced, step: int, scale: float) -> None:
        """Updates followed units. Keeps other units and the exponents as they are. New exponents arrive with the
        gradient."""
        grads = replace(reduced, flat=reduced.flat.to(self.tensors.device))
        with self._lock:
            self._update(grads, step, scale, ahead=False)

    # -- layers that move

    def beside(self, tensors: LayerTensors) -> StageOptimizer:
        """An optimizer for layers that may move to the stage (`Stage.arriving`). It follows their units, in any thread,
        until `relayout`."""
        return StageOptimizer(self._all_settings, tensors, self._whole)

    def relayout(self, arriving: Sequence[StageOptimizer]) -> None:
        """Takes the layers that the stage now has (`Stage.relayout`): those that it had keep their state, the others
        come from `arriving`, with their state. Copies nothing. To be called between two steps."""
        assert self._ahead is None, "a speculation is open"
        with self._lock:
            layout = self.tensors.layout
            held: dict[int, Held] = {}
            for of in [*arriving, self]:
                held |= renumbered(of.held, of._layout, layout)
            self.held, self._layout = held, layout
            self._runs.clear()
            self._initial = InitialMoments(self._layout, self.tensors.device)

    # -- a step

    @torch.no_grad()
    def step(self, reduced: Reduced, step: int, scale: float | None = 1.0) -> None:
        """Applies AdamW step number `step` (starting at 0) to the units that have a gradient. The gradient is
        multiplied by `scale`. If `scale` is None, skips the update. Does not change `reduced`."""
        with self._lock:
            if scale is not None:
                self._update(reduced, step, scale, ahead=False)
            self._learn(reduced)
            self._agreed(reduced, step)

    @torch.no_grad()
    def speculate(self, reduced: Reduced, step: int) -> None:
        """Applies the step with scale 1 before its commit. Keeps a copy of the previous state for `undo`. Not available
        with seals."""
        assert self._ahead is None, "confirm() or undo() the last speculation first"
        with self._lock:
            self._ahead = reduced, step, self.tensors.gradients.exponents
            self._update(reduced, step, 1.0, ahead=True)
            self._learn(reduced)

    @property
    def is_ahead(self) -> bool:
        """Whether a speculation is open."""
        return self._ahead is not None

    def confirm(self) -> None:
        """Commits the open speculation."""
        assert self._ahead is not None, "nothing was speculated"
        with self._lock:
            (reduced, step, _), self._ahead = self._ahead, None
            self._agreed(reduced, step)

    @torch.no_grad()
    def undo(self) -> None:
        """Restores, bit for bit, the state, exponents and weights that the updated units had before speculate(). Does
        not restore the weights of units that other workers hold."""
        assert self._ahead is not None, "nothing was speculated"
        with self._lock:
            reduced, _, exponents = self._ahead
            for held, units, place, _ in self._pieces(reduced.units):
                assert held.before is not None
                for kept, vector in zip(parts(held.before, place), parts(held.state, place), strict=True):
                    vector.copy_(kept)
                self._round(self._layout.span(units), held.state[0][place])
            self.tensors.gradients.exponents, self._ahead = exponents, None
            self.tensors.changed()

    @torch.no_grad()
    def inspected(self, reduced: Reduced) -> tuple[dict[int, int], list[int]]:
        """(unit -> checksum of its state before the step, units whose memory has changed without an update), for the
        units that have a gradient in `reduced`. Without seals, no changed unit is found. Reads the whole state."""
        held = {unit: self.held[unit] for unit in reduced.units or ()}
        checksums = torch.cat([of.checksum(self.is_ahead) for of in held.values()]).tolist() if held else []
        changed = []
        for (unit, of), checksum in zip(held.items(), checksums, strict=True):
            found = of.seal is not None and checksum != of.seal.item()
            if found or (of.changed is not None and of.changed.item()):
                changed.append(unit)
        return dict(zip(held, checksums, strict=True)), changed

    @torch.no_grad()
    def checksums(self) -> dict[int, int]:
        """Unit -> checksum of its state; empty with `whole`. Raises RuntimeError with the unit's name if its state has
        changed without an update and must not be saved."""
        found = {}
        for unit, held in () if self._whole else sorted(self.held.items()):
            held.inspect()
            if held.changed is not None and held.changed.item():
                raise RuntimeError(f"its copy of {self._layout.unit_names[unit]} has changed since its update")
            found[unit] = int(held.checksum().item())
        return found

    @torch.no_grad()
    def warm(self) -> None:
        """Launches the kernels of a step (see `Stage.warm`). Requires fresh state, and does not change it."""
        layout = self._layout
        for units in (
            layout.layers.values() if self._whole else [range(unit, unit + 1) for unit in range(len(layout.units))]
        ):
            state = self.held[units[0]].state if self._whole else self._vectors(units)
            grad = torch.zeros_like(state[0])
            for vector in () if self._whole else state:
                vector.zero_()
            self._launch(units, state, grad, 0.0, 0, 1.0, None)
            if self._settings.stagger:
                undo = self._vectors(units)
                self._launch(units, state, grad, 0.0, 0, 1.0, undo)
                if self._whole:
                    self.held[units[0]].before = undo
            if not self._whole:
                self.tensors.gradients.square(units[0], grad)

    # -- the state by name, if each layer is in one piece of memory

    def state(self) -> dict[str, Tensor]:
        """The state of the stage that outlives a step, by full-model names. Live views, not copies.

        `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` (float32, the parameter's shape) and, when reproducible,
        `exponent.NAME` (int32, one for every row, see `layout`).
        """
        layout, state = self._layout, {}
        layers = [self.held[units[0]].state for units in layout.layers.values()]
        for prefix, memory in zip(VECTORS, zip(*layers, strict=True), strict=True):
            for name, view in zip(layout.names, layout.views(LayerMemory(memory)), strict=True):
                state[f"{prefix}.{name}"] = view
        return state | self.exponents()

    def exponents(self) -> dict[str, Tensor]:
        """The part of `state` that all workers of the stage have; empty if sums have no exponents."""
        gradients = self.tensors.gradients
        names = self.tensors.names if gradients.reproducible else []
        return {f"exponent.{name}": gradients.exponents_of(index) for index, name in enumerate(names)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Loads a `state()` of a peer or of a checkpoint, which may contain more names than this stage has."""
        for key, tensor in self.state().items():
            if not key.startswith("exponent."):
                tensor.copy_(state[key])
        self._take_exponents(state)
        self._round_all()
        self.tensors.changed()

    # -- private

    def _update(self, reduced: Reduced, step: int, scale: float, ahead: bool) -> None:
        start = 0
        for held, units, place, size in self._pieces(reduced.units):
            if ahead and held.before is None:
                held.before = self._vectors(held.units)
            held.inspect()  # before the update, because the new seal would hide a change
            state, kept = parts(held.state, place), parts(held.before, place) if ahead and held.before else None
            self._launch(units, state, reduced.flat[start : start + size], self.lr(step), step, scale, kept)
            self._round(self._layout.span(units), state[0])
            self._seal(held)
            start += size
        self.tensors.changed()

    def _launch(
        self, units: range, state: State, grad: Tensor, lr: float, step: int, scale: float, undo: State | None
    ) -> None:
        for run in self._runs_of(units):
            self.tensors.ops.adamw(
                parts(state, run.part), grad[run.part], run.places, run.settings, lr=lr * run.lr, step=step,
                scale=scale, undo=parts(undo, run.part) if undo else None,
            )  # fmt: skip

    def _pieces(self, units: Sequence[int] | None) -> Iterator[tuple[Held, range, slice, int]]:
        """Yields (held, consecutive units in it, slice of these units in its vectors, number of elements), ascending.

        units: None: all
        """
        layout, held = self._layout, self.held
        if units is None and self._whole:
            for layer in layout.layers.values():
                size = len(held[layer[0]].state[0])
                yield held[layer[0]], layer, slice(0, size), size
            return
        numbered = enumerate(range(len(layout.units)) if units is None else units)
        for _, found in groupby(numbered, key=lambda item: (item[1] - item[0], id(held[item[1]]))):
            run = [unit for _, unit in found]
            place, first = layout.span(range(run[0], run[-1] + 1)), held[run[0]].units[0]
            start, size = place.start - layout.spans[first].start, place.stop - place.start
            yield held[run[0]], range(run[0], run[-1] + 1), slice(start, start + size), size

    def _learn(self, reduced: Reduced) -> None:
        """Sets the exponents of the next step."""
        self.tensors.gradients.follow(reduced)

    def _agreed(self, reduced: Reduced, step: int) -> None:
        """Records the step as committed. Drops units that the step has not updated, because they are out of date."""
        self._committed = step
        if reduced.units is not None:
            self.held = {unit: self.held[unit] for unit in reduced.units}

    def _runs_of(self, units: range) -> list[Run]:
        if units not in self._runs:
            runs = runs_of(self._settings, self.tensors.gradients, self.tensors.ops, units)
            if len(units) > 1 and units not in self._layout.layers.values():
                return runs  # not cached, because a follower has more units at the next step
            self._runs[units] = runs
        return self._runs[units]

    def _vectors(self, units: range) -> State:
        span = self._layout.span(units)
        size, device = span.stop - span.start, self.tensors.device
        return empty(size, device), empty(size, device), empty(size, device)

    def _seal(self, held: Held) -> None:
        if self._seals:
            held.seal = held.checksum()

    def _round(self, span: slice, master: Tensor) -> None:
        """Rounds the masters of held units into the weights."""
        if self._rounds:
            self.tensors.working[span].data.copy_(master)

    def _round_all(self) -> None:
        for span in map(self._layout.span, self._layout.layers.values()):
            self._round(span, self.tensors.flat[span])

    def _take_exponents(self, state: Mapping[str, Tensor]) -> None:
        found = [state[key].to(own).expand_as(own) for key, own in self.exponents().items()]
        if found:  # older checkpoints have one exponent for each tensor
            self.tensors.gradients.take_exponents(torch.cat(found))
