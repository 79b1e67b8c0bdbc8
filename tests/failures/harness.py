"""Runs the cases of the failure suite and checks their results.

    CASES = [Case("killed in the middle of a forward", "2x2", fails("3:0.1@forward")), ...]
    outcome = runs.of(case, "kind")  # raises if it hangs, ends with an unexpected code, or leaves a process behind
    runs.check_exact(outcome)        # weights, losses and samples equal those of a fault-free run

A case is data: a shape, command-line settings that inject faults, and signals that are sent at events of the run. For
example, `SignalAt("death_detected", "0.0")` kills worker 0.0 as soon as a death is detected. A case that runs for more
than `bound` seconds counts as hung.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from recycle_schedules import Trace

from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.replay import Replay
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.local_cluster import LocalJob, LocalNodes, Zygote
from tests.once import once

Json = dict[str, Any]
# shape -> (pipelines, stages, micro-batches)
SHAPES = {
    "1x1": (1, 1, 4),
    "1x2": (1, 2, 4),
    "2x2": (2, 2, 4),
    "3x1": (3, 1, 3),
    "3x2": (3, 2, 3),
    "4x2": (4, 2, 2),
    "3x3": (3, 3, 2),
    "3x4": (3, 4, 2),
}
_FAULT_KEYS = (
    "+", "checkpoint", "coordinator", "control", "run.dir", "run.resume", "run.respawns", "run.validate_every",
    "parallel.sharded", "parallel.optimizer_", "parallel.backend", "schedule",
)  # fmt: skip
TEXT = Path(json.__file__).with_name("decoder.py")  # a small text that exists on every machine


@dataclass(frozen=True)
class SignalAt:
    """A signal to worker `victim`, `after` seconds after the `nth` event of that name in events.jsonl."""

    event: str
    victim: str
    nth: int = 1
    after: float = 0.0
    number: int = signal.SIGKILL
    resume: float | None = None  # seconds after which SIGCONT follows
    supervisor: bool = False  # signal the worker and its supervisor
    above: bool = False  # signal only the worker's supervisor
    launcher: bool = False  # signal only the launcher, like `kill` with the pid of torchrun


@dataclass(frozen=True)
class Case:
    claim: str
    shape: str
    overrides: tuple[str, ...] = ()
    signals: tuple[SignalAt, ...] = ()
    steps: int = 8
    stagger: bool = False
    ends: str | None = None  # part of the message with which the job must stop; None: the job must finish
    deaths: int | None = 1  # required number, so that a case cannot pass without its faults; None: any
    bound: float = 60.0  # seconds
    nodes: int = 1  # number of launchers; with more than one, the job survives the loss of a node

    def __str__(self) -> str:
        return f"{self.shape}{' staggered' if self.stagger else ''}, {self.claim}".replace(" ", "-")

    @property
    def arguments(self) -> list[str]:
        common = [
            "model=tiny",
            f"data.path={TEXT}",
            "run.validate_every=0",
            "numerics=reproducible",
            "run.sample_log=true",
        ]
        pipelines, stages, microbatches = SHAPES[self.shape]
        shape = [
            f"parallel.pipelines={pipelines}",
            f"parallel.stages={stages}",
            f"parallel.microbatches={microbatches}",
        ]
        return [
            *shape,
            f"run.steps={self.steps}",
            *common,
            *(["optimizer=staggered"] if self.stagger else []),
            *self.overrides,
        ]

    def fault_free(self) -> Case:
        """The run to compare with: one worker, no faults. Shape, deaths and early updates must change no bit."""
        pipelines, _, microbatches = SHAPES[self.shape]
        kept = tuple(o for o in self.overrides if not o.startswith(_FAULT_KEYS))
        kept += tuple(_shape(1, 1, pipelines * microbatches))
        quiet = replace(self, claim="no worker dies", overrides=kept, signals=(), stagger=False, deaths=0, nodes=1)
        return replace(quiet, bound=max(300.0, self.bound))


@dataclass
class Outcome:
    case: Case
    code: int
    seconds: float
    output: str
    logs: str
    events: list[Json]
    metrics: list[Json]
    summary: Json
    samples: dict[int, list[int]]  # by step: the samples that the step was trained on
    traces: dict[int, Trace] = field(default_factory=dict)

    @property
    def deaths(self) -> int:
        return len(self.all("death_detected"))

    @property
    def stalls(self) -> list[float]:
        return [e["stall_seconds"] for e in self.all("resumed")]

    @property
    def losses(self) -> dict[int, float]:
        """Loss by step. If a step was repeated after a restart from a checkpoint, the last value counts."""
        return {line["step"]: line["loss"] for line in self.metrics}

    def all(self, event: str) -> list[Json]:
        return [e for e in self.events if e["event"] == event]


def _shape(pipelines: int, stages: int, microbatches: int) -> list[str]:
    return [f"parallel.pipelines={pipelines}", f"parallel.stages={stages}", f"parallel.microbatches={microbatches}"]


def fails(*texts: str) -> tuple[str, ...]:
    return (f"+fail_at=[{','.join(texts)}]",)


def rejoins(*texts: str) -> tuple[str, ...]:
    return (f"+rejoin_at=[{','.join(texts)}]",)


class Runs:
    """Runs cases. results: kind -> outcomes, for the table at the end. shared: the fixture `shared_folder`."""

    def __init__(self, zygote: Zygote, results: dict[str, list[Json]], shared: Path) -> None:
        self._zygote, self.results, self._shared = zygote, results, shared
        self._quiet = self

    def forked_from(self, zygote: Zygote) -> Runs:
        """A Runs whose jobs are forked from another zygote and compared with the same fault-free jobs."""
        other = Runs(zygote, self.results, self._shared)
        other._quiet = self._quiet
        return other

    def of(
        self,
        case: Case,
        kind: str,
        environment: dict[str, str] | None = None,
        meanwhile: Callable[[LocalJob], None] | None = None,
    ) -> Outcome:
        """Runs a case to its end. Raises AssertionError with diagnostics if it hangs or leaves a process behind."""
        begun = time.monotonic()
        with self._start(case, environment) as job, Signaller(job, case.signals):
            try:
                if meanwhile is not None:
                    meanwhile(job)
                code = job.wait(case.bound)
            except TimeoutError as error:
                raise AssertionError(f"hung: {case}\n{_diagnostics(job)}") from error
            outcome = _outcome(case, code, time.monotonic() - begun, job)
            self.results[kind].append({"deaths": outcome.deaths, "stalls": outcome.stalls, "seconds": outcome.seconds})
            _check_no_process_lives(job)
            _check_replay(job.run)
        if case.ends is None:
            assert code == 0, explain(outcome)
        else:
            assert code != 0, explain(outcome)
            assert case.ends in outcome.output, explain(outcome)
        if case.deaths is not None:
            assert outcome.deaths == case.deaths, explain(outcome)
        return outcome

    def _start(self, case: Case, environment: dict[str, str] | None) -> LocalJob | LocalNodes:
        if case.nodes == 1:
            return self._zygote.run(case.arguments, environment)
        return self._zygote.run_nodes(case.arguments, case.nodes, environment)

    def fault_free(self, case: Case) -> Outcome:
        """The outcome of the fault-free run of a case, without traces. Cases with equal fault-free runs share one."""
        case = case.fault_free()
        make = partial(self._quiet._without_traces, case)
        return once(self._shared, f"fault-free {case.arguments}", make)

    def _without_traces(self, case: Case) -> Outcome:
        return replace(self.of(case, "fault-free"), traces={})

    def check_exact(self, outcome: Outcome) -> None:
        """Checks weights, losses and samples against the fault-free run, and that no survivor repeated an op."""
        expected = self.fault_free(outcome.case)
        assert outcome.losses == expected.losses, explain(outcome)
        assert outcome.summary["weights_sha256"] == expected.summary["weights_sha256"] is not None, explain(outcome)
        assert outcome.samples == expected.samples, explain(outcome)
        check_one_truth(outcome)
        for step, samples in outcome.samples.items():
            assert len(set(samples)) == len(samples), f"step {step} used a sample twice: {samples}"
        for step, trace in outcome.traces.items():
            near = (step - 1, step, step + 1)  # a worker with early optimizer steps may be one step ahead
            dead = {e["worker"] for e in outcome.all("death_detected") if e["step"] in near}
            # The ops of an understudy in its old role do not count.
            dead |= {e["understudy"] for e in outcome.all("took_over") if e["step"] in near}
            check_no_survivor_repeats(trace, dead, step)


def check_one_truth(outcome: Outcome) -> None:
    """Checks that the run has one line per step, in order, even if the job restarted from a checkpoint."""
    steps = [line["step"] for line in outcome.metrics]
    assert steps == sorted(set(steps)), f"not one line per step, in order: {steps}\n{explain(outcome)}"


def check_no_survivor_repeats(trace: Trace, dead: set[str], step: int) -> None:
    """Checks that the survivors of a stage ran each micro-batch's forward, and each part of its backward, once."""
    parts = {"F": "F", "I": "I", "W": "W", "B": "IW"}
    lived = [op for op in trace.ops if op.kind in parts and str(op.worker) not in dead]
    ran = Counter((part, op.microbatch, op.stage) for op in lived for part in parts[op.kind])
    twice = {op: n for op, n in ran.items() if n > 1}
    assert not twice, f"step {step}: survivors repeated ops: {twice}"


class Signaller(contextlib.AbstractContextManager):
    """Follows a job's events in a thread and sends the signals of a case."""

    def __init__(self, job: LocalJob, signals: tuple[SignalAt, ...]) -> None:
        self._job, self._left = job, list(signals)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Signaller:
        if self._left:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _follow(self) -> None:
        seen: Counter[str] = Counter()
        events = Follower(self._job.run.events)
        while self._left and not self._over.wait(0.002):
            seen.update(event["event"] for event in events.new())
            for due in [s for s in self._left if seen[s.event] >= s.nth]:
                self._left.remove(due)
                self._send(due)

    def _send(self, due: SignalAt) -> None:
        self._over.wait(due.after)
        if due.launcher:
            self._job.signal(due.number)
            return
        pid = pid_of(due.victim, self._job.run.lines(self._job.run.events))
        try:
            above = psutil.Process(pid).ppid()
        except psutil.NoSuchProcess:  # an earlier signal has killed it
            return
        for target in [above] if due.above else [above, pid] if due.supervisor else [pid]:
            _signal(target, due.number)
            if due.resume is not None:
                threading.Timer(due.resume, _signal, (target, signal.SIGCONT)).start()


def pid_of(worker: str, events: list[Json]) -> int:
    """Id of the newest process of that worker."""
    return next(e["pid"] for e in reversed(events) if e["event"] == "spawned" and e["worker"] == worker)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _outcome(case: Case, code: int, seconds: float, job: LocalJob) -> Outcome:
    run = job.run
    summary = json.loads(run.summary.read_text()) if run.summary.exists() else {}
    traces = {int(p.stem.split("-")[1]): Trace.load(p) for p in sorted(run.traces.glob("step-*.json"))}
    logs = _logs(run)
    for path in (run.metrics, run.samples):
        _check_one_line_a_step(path)
    samples = {line["step"]: line["samples"] for line in run.lines(run.samples)}
    return Outcome(
        case, code, seconds, job.output, logs, run.lines(run.events), run.lines(run.metrics), summary, samples, traces
    )


def _logs(run: RunFolder) -> str:
    return "".join(f"--- {p.name}\n{text}" for p in sorted(run.logs.glob("*")) if (text := p.read_text()[-4000:]))


def _check_one_line_a_step(path: Path) -> None:
    """Reads the file directly, because the run folder's reader skips superseded lines."""
    places = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # truncated by a full disk
            record = json.loads(line)
            places.append((record["step"], record["term"]))
    steps = [step for step, _ in places]
    assert steps == sorted(set(steps)), f"{path.name} has repeated or unordered steps: (step, term) = {places}"


def _check_replay(run: RunFolder) -> None:
    """Replays the coordinators' log and checks that each decision is the same."""
    if run.protocol.exists():
        different = [decision for decision in Replay(run.protocol) if not decision.same]
        assert not different, different[0]


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _check_no_process_lives(job: LocalJob) -> None:
    """Checks that no spawned worker and no supervisor outlives the job.

    A process that started after a worker's spawn event is a different process with the same id: after thousands of
    deaths, ids recur.
    """
    spawned = {e["pid"]: e["time"] for e in job.run.lines(job.run.events) if e["event"] == "spawned"}
    processes = [p for pid, at in spawned.items() if (p := _process(pid)) is not None and p.create_time() < at + 1.0]
    _, alive = psutil.wait_procs(processes, 10)
    assert not alive, f"processes outlived the job: {alive}"
    assert not job.supervisors()


def _diagnostics(job: LocalJob) -> str:
    """Diagnostics of a job, with the stack traces of all workers' threads."""
    for pid in job.workers().values():
        _signal(pid, signal.SIGUSR1)
    time.sleep(1)
    tail = "\n".join(json.dumps(e) for e in job.run.lines(job.run.events)[-25:])
    return f"{job.output}\n{tail}\n{_logs(job.run)}"


def explain(outcome: Outcome) -> str:
    tail = "\n".join(json.dumps(e) for e in outcome.events[-25:])
    return f"{outcome.case}: exit code {outcome.code}\n{outcome.output}\n{tail}\n{outcome.logs}"
