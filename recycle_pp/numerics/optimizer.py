"""Updates the units that one worker holds: at the commit, or before it as a speculation that can be rolled back.

    optimizer = StageOptimizer(settings, stage)                 # holds all units, in a few large allocations
    optimizer = StageOptimizer(settings, stage, whole=False)    # holds no units until begin() or put()
    optimizer.begin(unit)                                       # from here on holds the unit, in its initial state
    optimizer.put(unit, parcel)                                 # the same, in the state that another holder has `given`

    optimizer.step(reduced, step, scale)                        # at the commit
    optimizer.speculate(reduced, step); optimizer.confirm()     # the same bits as step(..., scale=1)
    optimizer.speculate(reduced, step); optimizer.undo()        # all bits as before

    arriving = optimizer.beside(stage.arriving([7]))            # for a layer that may move to the stage
    arriving.take(units, state); arriving.follow(reduced, step, scale)
    stage.relayout([4, 5, 6, 7], [arriving.tensors])            # between two steps
    optimizer.relayout([arriving])

    optimizer.outer(unit); optimizer.replace({unit: {"theta": theta}})      # for islands, see `outer_state`

A unit (`numerics.layout`) has float32 masters and the vectors of its update rule (`update_rules`). A step updates the
units that have a gradient in `reduced`, and drops the other units because their state is then out of date. A unit gets
the same bits whether it is updated alone or with its neighbours. Without bf16 the masters are the weights themselves,
as views of the stage's vector.

With control.mismatch=third each unit has a seal, the checksum of its state after the latest update. A copy of the unit
includes its seal. A worker can therefore detect, without asking its peers, that its memory has changed without an
update.

Only one thread updates the state. Another thread may `copy` it. They share a lock, so an update waits for at most one
copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.wire.messages.units import UnitId

from .gradients import Reduced
from .held import Held, State, empty, parts, renumbered
from .hyperparameters import learning_rate
from .initial_moments import InitialMoments, Load
from .launches import Run, runs_of
from .layer_tensors import LayerTensors
from .outer_state import THETA, WIDTH, outer_vectors


class StageOptimizer:
    """The units that one worker holds.

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
        self._initial = InitialMoments(tensors)
        self._lock = threading.Lock()  # held while the state changes or a part of it is copied
        self._committed = -1  # last committed step that the state includes
        self._ahead: tuple[Reduced, int, Tensor] | None = None  # open speculation: gradient, step, exponents before it
        self.held: dict[int, Held] = {}
        for units in self._whole_pieces():
            master, *vectors = self._vectors(units, tensors.flat[tensors.layout.span(units)])
            state = (master, *(vector.zero_() for vector in vectors))
            for name, vector in zip(self._names(units[0]), state, strict=True):
                if name == THETA:
                    vector.copy_(master)
            self.held |= dict.fromkeys(units, Held(units, self._names(units[0]), state))

    def lr(self, step: int) -> float:
        return learning_rate(self._settings, step, self._steps)

    # -- held units

    def resume(self, load: Load) -> None:
        """Starts from a checkpoint.

        Reads the weights and exponents immediately. Also reads the moments immediately with `whole`; otherwise those of
        a tensor are read when `begin` is called for one of its units.
        """
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
        self._initial = InitialMoments(stage, load)

    @torch.no_grad()
    def begin(self, unit: int) -> None:
        """Starts to hold a unit, in its initial state."""
        master = self.tensors.flat[self._layout.spans[unit]]
        own = empty(len(master), master.device).copy_(master) if self._rounds else master
        held = self.held[unit] = Held(range(unit, unit + 1), self._names(unit), (own, *self._initial.of(unit)))
        self._seal(held)

    @torch.no_grad()
    def put(self, unit: int, parcel: Sequence[Tensor]) -> None:
        """Starts to hold a unit, in the state that another holder's `given` returned. Updates the unit's weights.

        parcel: the state, then the seal if there are seals. The optimizer keeps these tensors, or copies them
            if it has memory for the unit already."""
        span, (master, *vectors) = self._layout.spans[unit], parcel
        if self._whole:
            for mine, vector in zip(self.vectors(unit), parcel, strict=True):
                mine.copy_(vector)
            self._round(span, master)
            return
        seal = vectors.pop() if self._seals else None
        if not self._rounds:
            mine = self.tensors.flat[span]
            mine.data.copy_(master)  # keeps the autograd version, because micro-batches in flight may use these weights
            master = mine
        self.held[unit] = Held(range(unit, unit + 1), self._names(unit), (master, *vectors), seal=seal)
        self._round(span, master)

    def given(self, unit: int) -> list[Tensor]:
        """The parcel of a unit for another worker: its state, then its seal if it has one."""
        seal = self.held[unit].seal
        return [*self.vectors(unit), *([] if seal is None else [seal])]

    def room(self, unit: int) -> list[Tensor]:
        """Uninitialised memory into which a parcel for `put` can be received."""
        seal = [torch.empty(1, dtype=torch.int64, device=self.tensors.device)] if self._seals else []
        return [*self._vectors(range(unit, unit + 1)), *seal]

    def settled(self) -> None:
        """Ends the setup, once the worker holds all its units, and frees memory.

        Frees the initial state, and with bf16 and sharded state also the stage's float32 vector.
        """
        self._initial = InitialMoments(self.tensors)
        if self._rounds and not self._whole:
            self.tensors.flat = self.tensors.working

    def vectors(self, unit: int) -> State:
        """Views of a unit's state."""
        held, span = self.held[unit], self._layout.spans[unit]
        start = span.start - self._layout.spans[held.units[0]].start
        return parts(held.state, slice(start, start + span.stop - span.start))

    # -- the outer step of an island

    def outer(self, unit: int) -> dict[str, Tensor]:
        """Copies on the CPU of a unit's masters ("model") and outer vectors. May be called from any thread. Raises
        KeyError if the unit is not held."""
        wanted = {"model", *outer_vectors(self._all_settings)}
        with self._lock:
            pairs = zip(self._names(unit), self.vectors(unit), strict=True)
            return {name: vector.to("cpu", copy=True) for name, vector in pairs if name in wanted}

    @torch.no_grad()
    def replace(self, values: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Replaces vectors of units. values: unit -> name of a vector -> new elements, flat"""
        with self._lock:
            for unit, vectors in values.items():
                own = dict(zip(self._names(unit), self.vectors(unit), strict=True))
                self.held[unit].inspect()  # before the replacement, because the new seal would hide earlier damage
                for name, vector in vectors.items():
                    own[name].copy_(vector)
                if "model" in vectors:
                    self._round(self._layout.spans[unit], own["model"])
                self._seal(self.held[unit])
            self.tensors.changed()

    # -- copies for followers (`state.follow`)

    def copy(self, names: Sequence[UnitId], newest: int) -> dict[str, Tensor] | None:
        """A copy of the state of these units on the CPU. May be called from any thread.

        The keys are those of `Held.names`. Each value concatenates the tensors of the units that have this key, in the
        order of `names`. If there are seals, the key "seal" contains the seals of all units.

        Returns None unless the state is the committed one after step `newest`. Raises KeyError if a unit is not
        held."""
        with self._lock:
            if self._ahead is not None or self._committed != newest:
                return None
            units = [self._layout.number(name) for name in names]
            cut: dict[str, list[Tensor]] = {}
            for held, _, place, _ in self._pieces(units):
                for name, vector in zip(held.names, parts(held.state, place), strict=True):
                    cut.setdefault(name, []).append(vector)
            found = {
                name: vectors[0].to("cpu", copy=True) if len(vectors) == 1 else torch.cat([v.cpu() for v in vectors])
                for name, vectors in cut.items()
            }
            seals = [self.held[unit].seal for unit in units]
            return found | ({"seal": torch.cat([of.cpu() for of in seals if of is not None])} if self._seals else {})

    def start_following(self) -> None:
        """Drops all held units, before a new session of following begins. Does nothing with `whole`."""
        if not self._whole:
            self.held = {}

    @torch.no_grad()
    def take(self, units: Sequence[int], state: Mapping[str, Tensor]) -> None:
        """Starts to hold these units, in the state that `copy` returned on another worker."""
        rest = dict(state)
        for unit in units:
            span, parcel = self._layout.spans[unit], []
            for name in [*self._names(unit), *["seal"] * self._seals]:
                count = 1 if name == "seal" else span.stop - span.start
                parcel.append(rest[name][:count])
                rest[name] = rest[name][count:]
            own = parcel if self._whole else [to.copy_(of) for to, of in zip(self.room(unit), parcel, strict=True)]
            self.put(unit, own)
        # `put` does not call this, because it may run while micro-batches in flight still use copies of the weights.
        self.tensors.changed()

    @torch.no_grad()
    def follow(self, reduced: Reduced, step: int, scale: float) -> None:
        """Updates the units in `reduced`, and leaves other units unchanged. Does not change the exponents, because a
        follower receives them with the gradient."""
        grads = replace(reduced, flat=reduced.flat.to(self.tensors.device))
        with self._lock:
            self._update(grads, step, scale, ahead=False)

    # -- layers that move

    def beside(self, tensors: LayerTensors) -> StageOptimizer:
        """An optimizer for layers that may move to this stage (`Stage.arriving`).

        It follows their units until `relayout`, and may be used in another thread.
        """
        return StageOptimizer(self._all_settings, tensors, self._whole)

    def relayout(self, arriving: Sequence[StageOptimizer]) -> None:
        """Adopts the new layers of the stage. Call it after `Stage.relayout`, between two steps.

        Layers in `arriving` bring their state, and the other layers keep theirs. Copies nothing.
        """
        assert self._ahead is None, "a speculation is open"
        with self._lock:
            layout = self.tensors.layout
            held: dict[int, Held] = {}
            for of in [self, *arriving]:
                held |= renumbered(of.held, of._layout, layout)
            self.held, self._layout = held, layout
            self._runs.clear()
            self._initial = InitialMoments(self.tensors)

    def take_over(self, arrived: StageOptimizer) -> None:
        """Adopts all layers of the stage that this worker takes over. Call it after `Stage.take_over`.

        Drops an open speculation, because it was an update of the old layers.
        """
        self._ahead = None
        self.relayout([arrived])

    # -- a step

    @torch.no_grad()
    def step(
        self, reduced: Reduced, step: int, scale: float | None = 1.0, learnt: Callable[[], None] = lambda: None
    ) -> None:
        """Applies step number `step` (from 0) to the units that have a gradient. Does not change `reduced`.

        scale: factor of the gradient; None: skips the update
        learnt: called before the update, when the exponents are those of the next step
        """
        with self._lock:
            self._learn(reduced)
        learnt()
        with self._lock:
            if scale is not None:
                self._update(reduced, step, scale, ahead=False)
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
        """Whether an update was applied before its commit, and is neither confirmed nor rolled back."""
        return self._ahead is not None

    @property
    def exponents_of_sums(self) -> Tensor:
        """The exponents used by the sums of the uncommitted step. After `speculate` these are the old exponents."""
        return self.tensors.gradients.exponents if self._ahead is None else self._ahead[2]

    def confirm(self) -> None:
        """Commits the open speculation."""
        assert self._ahead is not None, "nothing was speculated"
        with self._lock:
            (reduced, step, _), self._ahead = self._ahead, None
            self._agreed(reduced, step)

    @torch.no_grad()
    def undo(self) -> None:
        """Restores, bit for bit, the state, exponents and weights that the updated units had before speculate().

        Does not restore the weights of units that other workers hold.
        """
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
        """Checks the units that have a gradient in `reduced`. Reads their whole state.

        Returns (unit -> checksum of its state before the step, units whose memory has changed without an update).
        Without seals, no changed unit is found.
        """
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
        """Unit -> checksum of its state; empty with `whole`.

        Raises RuntimeError with the unit's name if its state has changed without an update, because such state must not
        be saved.
        """
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
        for units in (
            self._whole_pieces() if self._whole else [range(unit, unit + 1) for unit in range(len(self._layout.units))]
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

        `model.NAME` (float32, the parameter's shape), `VECTOR.NAME` for each vector of its update rule (the same
        shape) and, when reproducible, `exponent.NAME` (int32, one for every row, see `layout`).
        """
        state: dict[str, Tensor] = {}
        for held, units, _, _ in self._pieces(None):
            part = self._layout.part(units)
            for prefix, vector in zip(held.names, held.state, strict=True):
                state |= {f"{prefix}.{name}": view for name, view in zip(part.names, part.views(vector), strict=True)}
        return state | self.exponents()

    def exponents(self) -> dict[str, Tensor]:
        """The entries `exponent.NAME` of `state`. All workers of the stage have them. Empty unless reproducible."""
        gradients = self.tensors.gradients
        names = self.tensors.names if gradients.reproducible else []
        return {f"exponent.{name}": gradients.exponents_of(index) for index, name in enumerate(names)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Loads the `state()` of a peer or of a checkpoint. Ignores names of tensors that are not in this stage."""
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
            held.inspect()  # before the update, because the new seal would hide earlier damage
            state, kept = parts(held.state, place), parts(held.before, place) if ahead and held.before else None
            self._launch(units, state, reduced.flat[start : start + size], self.lr(step), step, scale, kept)
            self._round(self._layout.span(units), state[0])
            self._seal(held)
            start += size
        self.tensors.changed()

    def _launch(
        self, units: range, state: State, grad: Tensor, lr: float, step: int, scale: float, undo: State | None
    ) -> None:
        state = state[: 1 + len(self.tensors.rule_of(units[0]).vectors)]  # without the outer vectors
        for run in self._runs_of(units):
            run.launch(
                parts(state, run.part), grad[run.part], lr=lr * run.lr, step=step, scale=scale,
                undo=parts(undo, run.part) if undo else None,
            )  # fmt: skip

    def _pieces(self, units: Sequence[int] | None) -> Iterator[tuple[Held, range, slice, int]]:
        """Yields (held, consecutive units in it, slice of these units in its vectors, number of elements), ascending.

        units: None: all
        """
        layout, held = self._layout, self.held
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
            runs = runs_of(self.tensors, units)
            if len(units) > 1 and units != self.held[units[0]].units:
                return runs  # not cached, because a follower has more units at the next step
            self._runs[units] = runs
        return self._runs[units]

    def _whole_pieces(self) -> list[range]:
        """With `whole`, runs of neighbouring units of a layer that have the same update rule; otherwise none.

        The units of a run lie in one piece of memory.
        """
        rule_of = self.tensors.rule_of
        runs = [[*run] for units in self._layout.layers.values() for _, run in groupby(units, key=rule_of)]
        return [range(run[0], run[-1] + 1) for run in runs] if self._whole else []

    def _vectors(self, units: range, master: Tensor | None = None) -> State:
        """Uninitialised memory for the state of units with one update rule. master: memory to use for the masters"""
        span, rule, device = self._layout.span(units), self.tensors.rule_of(units[0]), self.tensors.device
        size = span.stop - span.start
        own = empty(size, device) if master is None else master
        outer = outer_vectors(self._all_settings)
        return (
            own,
            *(empty(size, device, rule.width) for _ in rule.vectors),
            *(empty(size, device, WIDTH) for _ in outer),
        )

    def _names(self, unit: int) -> tuple[str, ...]:
        return self.tensors.names_of(self._layout.units[unit].tensor)

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
        # Older checkpoints have only one exponent for each tensor, which is expanded to all rows.
        found = [state[key].to(own).expand_as(own) for key, own in self.exponents().items()]
        if found:
            self.tensors.gradients.take_exponents(torch.cat(found))
