"""The state of a run, read from its folder by any process on any machine that has the folder.

reader = StatusReader(RunFolder("runs/mine"))
status = reader.read()                 # reads only the lines since the last call
status.state, status.step, status.live
text(status), status.to_json()
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from typing import Any

from msgspec.structs import asdict as asdict_of
from msgspec.structs import replace
from recycle_schedules import Worker

from recycle_pp.config.sizes import format_size
from recycle_pp.wire.files import UnreadableFile
from recycle_pp.wire.records import Step
from recycle_pp.wire.terms import without_undone

from .efficiency import PHASES
from .events.checkpoints import (
    CheckpointFailed,
    CheckpointNotStored,
    CheckpointSaved,
    CheckpointSkipped,
    CheckpointStored,
)
from .events.coordinators import CoordinatorLost
from .events.deaths import DeathDetected, DeathExplained, cause_in_words, explained
from .events.event import Event
from .events.health import HealthFound, HealthOver
from .events.job import DATA_SECONDS, Finished, PlanAdopted, Started, Stopped, WaitsForData
from .events.layers import Rebalanced, Rebalancing, RebalancingAbandoned, in_words
from .events.recovery import Restored, Resumed, StageLost
from .events.workers import Left, Rejoined
from .heartbeat import Life, Pulse, Sign
from .island_figures import Figures, IslandRounds
from .island_figures import in_words as rounds_in_words
from .progress import duration, hardware
from .run_folder import RunFolder
from .run_reader import RunReader
from .words import plural, when

RECENT = 20  # steps from which the speed is computed
DEATHS = 5  # number of deaths shown
MOST_ROWS = 16  # rows of the map; with more pipelines, one row counts those with all workers live


@dataclass(frozen=True)
class Status:
    """The state of a run. Durations are in seconds; `..._ago` counts from the event. None: not known yet.

    state: starting | running | silent (no heartbeat, seen from another machine) | dead | finished | stopped
    """

    run: str
    state: str
    proof: str
    step: int | None  # newest committed step, from 0
    steps: int
    loss: float | None
    tokens_per_second: float | None
    tokens_per_second_per_worker: float | None
    tflops: float | None  # 10^12 operations per second and worker; this and the next four are of the newest step
    mfu: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    phase_seconds: dict[str, float]  # mean time of a worker by phase; empty if unknown
    step_seconds: float | None  # median of recent steps
    last_step_seconds_ago: float | None
    eta_seconds: float | None
    pipelines: int
    stages: int
    live: list[str]
    layout: list[int] | None  # decoder layers of each stage, if they have moved since the last start or restore
    moving_to: list[int] | None  # the layout to which layers are moving
    moving_seconds: float | None  # since layers began to move
    deaths: int
    last_deaths: list[dict[str, Any]]  # step, worker, cause (in words), seconds_ago
    stalls: int
    last_stall_seconds: float | None
    stall_seconds: float  # sum of all stalls
    recovering: bool  # whether a death or a restore has interrupted a step that is not yet committed
    waits: str | None  # while the disk of the training data does not answer, a sentence with the file and the duration
    unsaved: str | None  # if the last due checkpoint was not saved, a sentence with the reason and the newest one's age
    islands: Figures | None  # the rounds of this island; None before the first event about them
    health: list[str]  # a sentence for each hardware fault that persists
    devices: list[dict[str, Any]]  # the newest figures of each GPU and of the hosts, see health.json
    damaged: list[str]  # a sentence for each file with damaged lines

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class StatusReader:
    def __init__(self, run: RunFolder) -> None:
        """Opens the folder. Raises ValueError if it contains no run, or if its config.yaml is damaged."""
        run.require()
        self._run = run
        self._settings = run.read_settings()
        self._reader = RunReader(run)
        self._lines = self._reader.follow()
        self._pulse = Pulse(run)
        self._steps: list[Step] = []  # the newest RECENT ones
        self._deaths: list[DeathDetected] = []
        self._stalls: list[float] = []
        self._away: set[str] = set()  # workers that died or left and are not back
        self._layout: list[int] | None = None
        self._moving: Rebalancing | None = None
        self._broken: int | None = None  # the step interrupted by a death or a restore
        self._restoring = False
        self._waits: WaitsForData | None = None  # the newest report
        self._unsaved: CheckpointFailed | CheckpointSkipped | None = None  # None once a checkpoint is saved
        self._rounds = IslandRounds(self._settings.islands.name or "")
        self._faults: dict[tuple[str, str, str], HealthFound] = {}  # by worker, device and signal
        self._unstored: CheckpointNotStored | None = None  # None once a checkpoint is stored

    def read(self) -> Status:
        """The current status. The first call waits like `Pulse.look`.

        Raises:
            UnreadableFile: a file is damaged and no job runs. While a job runs, `Status.damaged` lists the damage.
        """
        verdict, proof, sign, age = self._life()
        for event in self._lines.events.new():
            self._follow(event)
            self._rounds.follow(event)
        # Read after the events, because a restore drops the steps of earlier calls, but not those since the restore.
        self._steps = without_undone(chain(self._steps, self._lines.steps.each()), lambda line: line.step, RECENT)
        s = self._settings
        now = sign.time + age if sign else time.time()  # on the coordinator's clock
        last = self._steps[-1] if self._steps else Step(step=-1)
        measured = [line.step_seconds for line in self._steps if line.step_seconds is not None]
        seconds = median(measured) if measured else None
        alive = verdict == "alive"
        damaged = self._lines.damage
        if damaged and not alive:
            raise damaged[0]
        return Status(
            run=str(self._run.path),
            state=self._state(verdict, sign),
            proof=proof,
            step=last.step if self._steps else None,
            steps=s.run.steps,
            loss=last.loss,
            tokens_per_second=last.tokens_per_second,
            tokens_per_second_per_worker=last.tokens_per_second_per_worker,
            tflops=last.tflops,
            mfu=last.mfu,
            peak_bytes=last.peak_bytes,
            reserved_bytes=last.reserved_bytes,
            phase_seconds=_phases(last),
            step_seconds=seconds,
            last_step_seconds_ago=None if last.time is None else max(0.0, now - last.time),
            eta_seconds=(s.run.steps - 1 - last.step) * seconds if alive and seconds is not None else None,
            pipelines=s.parallel.pipelines,
            stages=s.parallel.stages,
            live=sign.live if sign else [],
            layout=self._layout,
            moving_to=self._moving.layout if alive and self._moving else None,
            moving_seconds=max(0.0, now - self._moving.time) if alive and self._moving else None,
            deaths=len(self._deaths),
            last_deaths=[
                {
                    "step": death.step,
                    "worker": death.worker,
                    "cause": cause_in_words(death),
                    "seconds_ago": max(0.0, now - death.time),
                }
                for death in self._deaths[-DEATHS:]
            ],
            stalls=len(self._stalls),
            last_stall_seconds=self._stalls[-1] if self._stalls else None,
            stall_seconds=sum(self._stalls),
            recovering=alive and self._recovering(last.step),
            waits=self._waiting(last.step, now) if alive else None,
            unsaved=self._not_saved(now),
            islands=self._rounds.figures(),
            health=[fault.text() for fault in self._faults.values()],
            devices=self._devices(),
            damaged=[str(damage) for damage in damaged],
        )

    def _devices(self) -> list[dict[str, Any]]:
        with suppress(UnreadableFile):
            record = self._reader.health()
            return [asdict_of(device) for device in record.devices] if record else []
        return []

    def _life(self) -> Life:
        try:
            return self._pulse.look()
        except UnreadableFile as damage:
            return Life("silent", str(damage), None, 0.0)

    def _follow(self, event: Event) -> None:
        match event:
            case Started():
                self._deaths = []
                self._stalls = []
                self._away.clear()
                self._broken = None
                self._unsaved = self._unstored = None
                self._layout = self._moving = None
                self._faults.clear()
            case HealthFound(worker=worker, device=device, signal=signal):
                self._faults[worker, device, signal] = event
            case HealthOver(worker=worker, device=device, signal=signal):
                self._faults.pop((worker, device, signal), None)
            case Rebalancing():
                self._moving = event
            case Rebalanced():
                self._layout, self._moving = event.layout, None
            case RebalancingAbandoned():
                self._moving = None
            case WaitsForData():
                self._waits = event
            case CheckpointFailed() | CheckpointSkipped():
                self._unsaved = event
            case CheckpointSaved():
                self._unsaved = None
            case CheckpointNotStored():
                self._unstored = event
            case CheckpointStored():
                self._unsaved = self._unstored = None
            case DeathDetected():
                self._deaths.append(event)
                if event.worker not in self._away:
                    self._broken = event.step
                self._away.add(event.worker)
            case DeathExplained():
                self._deaths = [e for e in explained([*self._deaths, event]) if isinstance(e, DeathDetected)]
            case Left():
                self._away.add(event.worker)
            case Rejoined():
                self._away.discard(event.worker)
            case Resumed():
                self._stalls.append(event.stall_seconds)
                self._broken = None
            case CoordinatorLost() | StageLost():
                self._broken = event.step
                self._moving = None  # the next coordinator abandons the move
            case Restored():  # all workers restart from a checkpoint, with new roles
                self._away.clear()
                self._layout = self._moving = None
                self._broken = event.checkpoint
                self._restoring = True
                self._steps = [line for line in self._steps if line.step < event.checkpoint]
            case PlanAdopted() if self._restoring:
                self._broken = None
                self._restoring = False
            case Finished() | Stopped():
                self._broken = None

    def _recovering(self, committed: int) -> bool:
        """Whether a death or a restore has interrupted a step that is not committed. Checks the commit, not events,
        because a new coordinator may record a death after its recovery."""
        return self._broken is not None and committed < self._broken < self._settings.run.steps

    def _waiting(self, committed: int, now: float) -> str | None:
        waits = self._waits
        if waits is None or committed >= waits.step or now > waits.time + 2 * DATA_SECONDS:
            return None
        return replace(waits, seconds=waits.seconds + max(0.0, now - waits.time)).text()

    def _not_saved(self, now: float) -> str | None:
        def text(event: CheckpointFailed | CheckpointSkipped | CheckpointNotStored) -> str:
            return replace(event, unsaved_seconds=event.unsaved_seconds + max(0.0, now - event.time)).text()

        return "; ".join(text(event) for event in (self._unsaved, self._unstored) if event is not None) or None

    def _state(self, verdict: str, sign: Sign | None) -> str:
        if verdict == "over":
            return "finished" if sign and sign.code == 0 else "stopped"
        if verdict == "alive":
            return "running" if self._steps else "starting"
        return "dead" if verdict == "gone" else verdict


def text(status: Status) -> str:
    """The status as several lines of text."""
    lines = [f"{status.run}: {status.state} ({status.proof})"]
    if status.step is not None:
        parts = [f"step {status.step}, {plural(status.steps - 1 - status.step, 'step')} left"]
        parts += [] if status.loss is None else [f"loss {status.loss:.4f}"]
        parts += [] if status.tokens_per_second is None else [f"{status.tokens_per_second:,.0f} tokens/s"]
        parts += [] if status.step_seconds is None else [f"{status.step_seconds:.3g} s a step"]
        parts += [] if status.eta_seconds is None else [f"ETA {duration(status.eta_seconds)}"]
        lines.append(", ".join(parts))
        if usage := _usage(status):
            lines.append(", ".join(usage))
        if status.phase_seconds:
            times = ", ".join(f"{name} {1000 * of:.3g}" for name, of in status.phase_seconds.items())
            lines.append(f"milliseconds of a worker in the newest step: {times}")
        if _late(status):
            lines.append(f"no step for {duration(status.last_step_seconds_ago or 0.0)}")
    lines.append(f"{len(status.live)} of {status.pipelines * status.stages} workers live")
    lines += worker_map(status.live, status.pipelines, status.stages)
    if status.layout is not None:
        lines.append(f"decoder layers by stage, after moves: {in_words(status.layout)}")
    if status.moving_to is not None:
        moving = duration(status.moving_seconds or 0.0)
        lines.append(f"layers have been moving to {in_words(status.moving_to)} for {moving}")
    if status.deaths:
        lines.append(f"{plural(status.deaths, 'death')}, newest first:")
        for death in reversed(status.last_deaths):
            ago = duration(death["seconds_ago"])
            lines.append(
                f"  {when(death['step'], status.steps)}: worker {death['worker']}, {death['cause']}, {ago} ago"
            )
    if status.recovering:
        lines.append("the job is recovering")
    lines += [sentence for sentence in (status.waits, status.unsaved) if sentence is not None]
    if status.last_stall_seconds is not None:
        total = f"{plural(status.stalls, 'stall')}, {1000 * status.stall_seconds:.0f} ms in all"
        lines.append(f"{total}, the last {1000 * status.last_stall_seconds:.0f} ms")
    lines += [] if status.islands is None else rounds_in_words(status.islands)
    lines += status.health
    if figures := _figures(status.devices):
        lines.append(figures)
    lines += status.damaged
    return "\n".join(lines)


def _figures(devices: Sequence[dict[str, Any]]) -> str:
    """The figures of the GPUs in words: "8 GPUs: 51 to 83 C, 380 to 690 W, 1410 to 1980 MHz"; "" without GPUs."""
    gpus = [device for device in devices if device["device"] != "host"]
    parts = []
    for key, unit in (("temperature", "C"), ("power", "W"), ("clock", "MHz")):
        if values := [gpu[key] for gpu in gpus if gpu[key] is not None]:
            least, most = round(min(values)), round(max(values))
            parts.append(f"{least} {unit}" if least == most else f"{least} to {most} {unit}")
    return f"{plural(len(gpus), 'GPU')}: {', '.join(parts)}" if parts else ""


def _phases(step: Step) -> dict[str, float]:
    """The newest step's times by phase: {"forward": ..., "wait": ...}, in seconds."""
    times = {key: getattr(step, key) for key in PHASES}
    return {key.removesuffix("_seconds"): of for key, of in times.items() if of is not None}


def _usage(status: Status) -> list[str]:
    """Phrases about the use of the hardware."""
    found = hardware(status.to_json())
    reserved = status.reserved_bytes
    return found if reserved is None else [*found, f"reserved {format_size(reserved)}"]


def _late(status: Status) -> bool:
    ago, usual = status.last_step_seconds_ago, status.step_seconds
    return status.state == "running" and ago is not None and usual is not None and ago > max(10.0, 10 * usual)


def worker_map(live: Sequence[str], pipelines: int, stages: int) -> list[str]:
    """A map of the live workers, with a row per pipeline and a mark per stage. With many pipelines, one row counts the
    pipelines with all workers live."""
    alive = {Worker.parse(name) for name in live}
    rows = {d: [Worker(d, s) in alive for s in range(stages)] for d in range(pipelines)}
    whole = [d for d in rows if all(rows[d])] if pipelines > MOST_ROWS else []
    shown = [d for d in rows if d not in set(whole)]
    width = len(str(stages - 1)) + 1
    lines = [f"{'stage':>14}" + "".join(f"{s:>{width}}" for s in range(stages))]
    for d in shown[: 4 * MOST_ROWS]:
        lines.append(f"{f'pipeline {d}':>14}" + "".join(f"{'■' if up else '·':>{width}}" for up in rows[d]))
    if len(shown) > 4 * MOST_ROWS:
        lines.append(f"{'':>14} and {plural(len(shown) - 4 * MOST_ROWS, 'pipeline')} more with dead workers")
    if whole:
        lines.append(f"{'':>14} {len(whole)} whole pipeline{'s' * (len(whole) != 1)}")
    return lines
