"""Does a job fit into so many bytes a worker: with nobody dead, with one worker of a stage dead, with two?

    found = outlook(settings, capacity=80e9, device="cuda")    # three Outcomes, a row for each stage
    remedies(settings, 80e9, "cuda", dead=1)                   # ["model.recompute=true", ...]: what would fit

Every stage is looked at as the one that is hit. Where splitting the backward, or keeping activations, leaves no room
for 1F1B's P - s micro-batches, the stage runs whole backwards (B), and if that is not enough it recomputes its layers
(one F more for each micro-batch). Stages may differ in this: it is what a run with model.recompute=auto does.

Durations are in proportion to what is multiplied, so periods compare memory and deaths, not machines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from recycle_schedules import Worker, plan
from recycle_schedules.memory import Mode, fastest, modes

from recycle_pp.config.checks import validate
from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import layers_of_stages, linear_sizes, parameters, room_for_tensors, stage_memory

from .problem import initial_problem

DEATHS = ("nobody dead", "one dead", "two dead")


@dataclass(frozen=True)
class Row:
    """A stage with so many live workers, and how it gets on with its memory.

    layers, parameters   of the stage
    peers                its live workers; 0: the stage is lost, and the job goes back to its checkpoint
    in_flight            micro-batches that a worker may have in flight, by its memory and by `schedule`; 0: none fits
    wanted               the same by `schedule` alone
    whole, recompute     every backward is a B; layers are recomputed in it
    parts                bytes of a worker at its fullest moment, by part"""

    stage: int
    layers: int
    parameters: int
    peers: int
    in_flight: float
    wanted: float
    whole: bool
    recompute: bool
    parts: dict[str, float]

    @property
    def fits(self) -> bool:
        return self.in_flight >= 1

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Outcome:
    """dead: of one stage's workers. period: of the plan where the stage is hit that costs most, in forwards of an
    average stage; None where some stage does not fit or is lost."""

    dead: int
    rows: list[Row]
    period: float | None
    hit: int | None

    @property
    def fits(self) -> bool:
        return all(row.fits for row in self.rows)

    @property
    def name(self) -> str:
        return DEATHS[self.dead]


def outlook(settings: Settings, capacity: float, device: str) -> list[Outcome]:
    """With 0, 1 and 2 dead. ValueError for models that are not the project's own Transformer."""
    job = _Job(settings, capacity, device)
    return [job.outcome(dead) for dead in range(len(DEATHS))]


def refusal(settings: Settings, outcome: Outcome, capacity: float, device: str, size: Callable[[float], str]) -> str:
    """One sentence: what does not fit, by how much, and what would. size: bytes in words."""
    row = max((row for row in outcome.rows if not row.fits), key=lambda row: row.bytes)
    parts = ", ".join(f"{name} {size(of)}" for name, of in row.parts.items() if of)
    after = "" if not outcome.dead else f" once {'one' if outcome.dead == 1 else 'two'} of its workers are dead"
    after = after.replace("one of its workers are", "one of its workers is")
    sentence = (
        f"a worker of stage {row.stage} needs {size(row.bytes)}{after}, with one micro-batch in flight, and has "
        f"{size(capacity)} ({parts})"
    )
    found = remedies(settings, capacity, device, outcome.dead)
    return (
        f"{sentence}; it would fit with {', or with '.join(found)}" if found else f"{sentence}; no setting alone helps"
    )


def remedies(settings: Settings, capacity: float, device: str, dead: int) -> list[str]:
    """Up to three changes of the settings with which the job fits with so many dead, the fewest keys first."""
    changes = list(_changes(settings))
    found: list[set[str]] = []
    for count in (1, 2, 3):
        for several in itertools.combinations(changes, count):
            words = [word for words in several for word in words]
            keys = {word.partition("=")[0] for word in words}
            if len(keys) < len(words) or any(keys == {word.partition("=")[0] for word in known} for known in found):
                continue  # a larger factor of the same
            changed = deepcopy(settings)
            for word in words:
                _set(changed, word)
            try:
                validate(changed)
                if all(_Job(changed, capacity, device).rows_fit(n) for n in range(dead + 1)):
                    found.append(set(words))
            except ValueError:
                continue
            if len(found) == 3:
                break
        if found:
            break
    return [" ".join(sorted(words)) for words in found]


def _changes(settings: Settings) -> Iterator[tuple[str, ...]]:
    """What may be changed: words of a command line, one or several together."""
    p, numerics = settings.parallel, settings.numerics
    if not p.copies:
        yield ("parallel.sharded=true", "parallel.optimizer_copies=2")
    if settings.model.recompute is False:
        yield ("model.recompute=true",)
    if numerics.reproducible and numerics.sums == "int64":
        yield ("numerics.sums=int32",)
    if numerics.precision == "fp32":
        yield ("numerics.precision=bf16",)
    assert isinstance(settings.model.layers, int)
    for factor in (2, 4, 8):
        if p.stages * factor <= settings.model.layers:
            yield (f"parallel.stages={p.stages * factor}",)
    for size in (2, 4):
        if p.microbatch_size % size == 0:
            yield (
                f"parallel.microbatch_size={p.microbatch_size // size}",
                f"parallel.microbatches={p.microbatches * size}",
            )


def _set(settings: Settings, word: str) -> None:
    path, _, text = word.partition("=")
    group, _, key = path.partition(".")
    value: Any = {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
    setattr(getattr(settings, group), key, value)
    settings.model.split = None


class _Job:
    def __init__(self, settings: Settings, capacity: float, device: str) -> None:
        if not settings.model.own:
            raise ValueError(
                f"model.kind={settings.model.kind}: what its layers take is known only when they run; model=llama "
                "knows those of the Llama family"
            )
        self._settings, self._device = settings, device
        self._capacity = room_for_tensors(capacity, device)
        self._problem = initial_problem(settings).replace(durations=None, memory=None)
        self._layers = layers_of_stages(settings)

    def rows_fit(self, dead: int) -> bool:
        return all(row.fits for row in self.rows(dead) if row.peers)

    def outcome(self, dead: int) -> Outcome:
        rows = self.rows(dead)
        if not all(row.fits for row in rows):
            return Outcome(dead, rows, None, None)
        if not dead:
            return Outcome(dead, rows, self._period(rows, []), None)
        pipelines = self._settings.parallel.pipelines
        before = self.rows(0)
        periods = [
            self._period(
                [*before[: row.stage], row, *before[row.stage + 1 :]],
                [Worker(pipelines - 1 - k, row.stage) for k in range(dead)],
            )
            for row in rows
        ]
        worst = max(range(len(rows)), key=lambda s: periods[s])
        return Outcome(dead, rows, periods[worst], worst)

    def rows(self, dead: int) -> list[Row]:
        return [self._row(stage, self._settings.parallel.pipelines - dead) for stage in range(len(self._layers))]

    def _row(self, stage: int, peers: int) -> Row:
        model, p, layers = self._settings.model, self._settings.parallel, self._layers[stage]
        about = stage, len(layers), parameters(model, layers), max(0, peers)
        if peers < 1:
            return Row(*about, in_flight=0, wanted=0, whole=False, recompute=bool(model.recompute), parts={})
        ran = -(-p.pipelines * p.microbatches // peers)
        wanted = min(self._problem.limit(Worker(0, stage)), ran)
        enough = min(p.stages - stage, wanted)  # as much as 1F1B has
        mode = fastest(self._modes[stage], self._capacity, peers, ran, enough)
        most = min(mode.memory.in_flight(self._capacity, peers, ran, mode.whole), wanted)
        parts = mode.memory.peak(peers, ran, max(1, most), mode.whole)
        return Row(*about, in_flight=most, wanted=wanted, whole=mode.whole, recompute=mode.recompute, parts=parts)

    @cached_property
    def _modes(self) -> list[list[Mode]]:
        """The modes of each stage, fastest first."""
        backward = "coupled" if self._settings.schedule.backward == "coupled" else "mixed"
        found = []
        for stage in range(len(self._layers)):
            kept, again = (
                stage_memory(self._settings, stage, device=self._device, recompute=recompute)
                for recompute in (False, True)
            )
            if self._settings.model.recompute is True:
                found.append([replace(mode, recompute=True) for mode in modes(again, again, backward)])
            else:
                found.append(modes(kept, again, backward))
        return found

    def _period(self, rows: list[Row], failed: list[Worker]) -> float:
        forward = self._times["F"]
        again = [i + f * row.recompute for i, f, row in zip(self._times["I"], forward, rows, strict=True)]
        limits = [None if row.in_flight == math.inf else int(row.in_flight) for row in rows]
        whole = [row.stage for row in rows if row.whole]
        times = {"F": forward, "I": again, "W": self._times["W"]}
        problem = self._problem.replace(durations=times, memory_limit=limits, failed=failed, backward="mixed")
        return plan(problem.replace(whole=whole)).value

    @cached_property
    def _times(self) -> dict[str, list[float]]:
        """F, I and W of each stage in proportion to their multiplications: matrices, and attention beside them."""
        model = self._settings.model
        matrices = [float(sum(linear_sizes(model, layers))) for layers in self._layers]
        attention = [float(len(layers) * model.sequence * model.heads * model.head_size) for layers in self._layers]
        unit = sum(matrices + attention) / len(self._layers)
        return {
            "F": [(m + a) / unit for m, a in zip(matrices, attention, strict=True)],
            "I": [(m + 2 * a) / unit for m, a in zip(matrices, attention, strict=True)],
            "W": [m / unit for m in matrices],
        }
