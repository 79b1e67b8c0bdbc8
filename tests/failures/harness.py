"""How a case of the failure suite is run, and what must hold when it is over.

    CASES = [Case("killed in the middle of a forward", "2x2", fails("3:0.1@forward")), ...]
    outcome = runs.of(case)          # runs it; raises if it hangs, ends with another code, or leaves a process
    runs.check_exact(outcome)        # the weights, every loss, and every op of a fault-free run

A case is data: a shape, the faults that the command line knows, and strikes from outside, which wait for an event of
the run (`Strike("death_detected", "0.0")` kills worker 0.0 as soon as a death is known). Every case has a bound in
seconds: a job that outlives it has hung.

(A little longer than other files: what every case must have left behind is checked in one place.)
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
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.local_cluster import LocalJob, LocalNodes, Zygote
from tests.once import once

Json = dict[str, Any]
SHAPES = {
    "1x1": (1, 1, 4),
    "1x2": (1, 2, 4),
    "2x2": (2, 2, 4),
    "3x2": (3, 2, 3),
    "3x3": (3, 3, 2),
    "3x4": (3, 4, 2),
}  # D, P, M
_OF_A_STRUCK_RUN = (
    "+", "checkpoint", "coordinator", "control", "run.dir", "run.resume", "run.respawns", "run.validate_every",
    "parallel.sharded", "parallel.optimizer_", "parallel.backend",
)  # fmt: skip
TEXT = Path(json.__file__).with_name("decoder.py")  # a small text that is on every machine


@dataclass(frozen=True)
class Strike:
    """A signal to worker `victim` when the `nth` event of that name is in events.jsonl, `after` seconds later."""

    event: str
    victim: str
    nth: int = 1
    after: float = 0.0
    number: int = signal.SIGKILL
    resume: float | None = None  # seconds after which SIGCONT follows
    supervisor: bool = False  # strikes the worker's supervisor as well
    above: bool = False  # strikes the supervisor and not the worker
    launcher: bool = False  # strikes the whole job, as `kill` of torchrun does, and no worker


@dataclass(frozen=True)
class Case:
    claim: str
    shape: str
    overrides: tuple[str, ...] = ()
    strikes: tuple[Strike, ...] = ()
    steps: int = 8
    stagger: bool = False
    ends: str | None = None  # the documented sentence with which the job must stop; None: it finishes exactly
    deaths: int | None = 1  # that must have happened, so that no case passes because nothing struck; None: any
    bound: float = 60.0  # seconds
    nodes: int = 1  # launchers: who loses a node goes on without it

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
        """The run to compare with, by one worker alone: neither the shape, nor who dies, nor when the optimizer steps
        may make a difference."""
        pipelines, _, microbatches = SHAPES[self.shape]
        kept = tuple(o for o in self.overrides if not o.startswith(_OF_A_STRUCK_RUN))
        kept += tuple(_shape(1, 1, pipelines * microbatches))
        quiet = replace(self, claim="nobody dies", overrides=kept, strikes=(), stagger=False, deaths=0, nodes=1)
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
    samples: dict[int, list[int]]  # that each step was trained on
    traces: dict[int, Trace] = field(default_factory=dict)

    @property
    def deaths(self) -> int:
        return len(self.all("death_detected"))

    @property
    def stalls(self) -> list[float]:
        return [e["stall_seconds"] for e in self.all("resumed")]

    @property
    def losses(self) -> dict[int, float]:
        """By step; of a step that was run again from a checkpoint, the last one."""
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
    """results: kind -> outcomes, for the closing table. shared: the folder of the fixture `shared_folder`."""

    def __init__(self, zygote: Zygote, results: dict[str, list[Json]], shared: Path) -> None:
        self._zygote, self.results, self._shared = zygote, results, shared
        self._quiet = self

    def forked_from(self, zygote: Zygote) -> Runs:
        """Runs cases in jobs of another zygote, and compares them with the same fault-free jobs."""
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
        """Runs a case to its end; AssertionError with all that is known if it hangs or leaves something behind."""
        begun = time.monotonic()
        with self._start(case, environment) as job, Striker(job, case.strikes):
            try:
                if meanwhile is not None:
                    meanwhile(job)
                code = job.wait(case.bound)
            except TimeoutError as error:
                raise AssertionError(f"hung: {case}\n{_all_that_is_known(job)}") from error
            outcome = _outcome(case, code, time.monotonic() - begun, job)
            self.results[kind].append({"deaths": outcome.deaths, "stalls": outcome.stalls, "seconds": outcome.seconds})
            _check_nobody_lives(job)
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
        """The run to compare with, without its traces; each is run once."""
        case = case.fault_free()
        make = partial(self._quiet._without_traces, case)
        return once(self._shared, f"fault-free {case.arguments}", make)

    def _without_traces(self, case: Case) -> Outcome:
        return replace(self.of(case, "fault-free"), traces={})

    def check_exact(self, outcome: Outcome) -> None:
        """Bit for bit what the fault-free run computes, from the same samples; no op of a survivor twice."""
        expected = self.fault_free(outcome.case)
        assert outcome.losses == expected.losses, explain(outcome)
        assert outcome.summary["weights_sha256"] == expected.summary["weights_sha256"] is not None, explain(outcome)
        assert outcome.samples == expected.samples, explain(outcome)
        check_one_truth(outcome)
        for step, samples in outcome.samples.items():
            assert len(set(samples)) == len(samples), f"step {step} saw a sample twice: {samples}"
        for step, trace in outcome.traces.items():
            near = (step - 1, step, step + 1)  # a staggered worker may be a step ahead of the commit
            dead = {e["worker"] for e in outcome.all("death_detected") if e["step"] in near}
            check_no_survivor_repeats(trace, dead, step)


def check_one_truth(outcome: Outcome) -> None:
    """One line a step, in order: also if the job went back to a checkpoint."""
    steps = [line["step"] for line in outcome.metrics]
    assert steps == sorted(set(steps)), f"lines of the steps {steps}\n{explain(outcome)}"


def check_no_survivor_repeats(trace: Trace, dead: set[str], step: int) -> None:
    """At a stage, each micro-batch's forward and each part of its backward ran once on those who lived on."""
    parts = {"F": "F", "I": "I", "W": "W", "B": "IW"}
    lived = [op for op in trace.ops if op.kind in parts and str(op.worker) not in dead]
    ran = Counter((part, op.microbatch, op.stage) for op in lived for part in parts[op.kind])
    twice = {op: n for op, n in ran.items() if n > 1}
    assert not twice, f"step {step}: {twice}"


class Striker(contextlib.AbstractContextManager):
    """Follows a job's events in a thread and strikes where a case says so."""

    def __init__(self, job: LocalJob, strikes: tuple[Strike, ...]) -> None:
        self._job, self._left = job, list(strikes)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Striker:
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
            for strike in [s for s in self._left if seen[s.event] >= s.nth]:
                self._left.remove(strike)
                self._strike(strike)

    def _strike(self, strike: Strike) -> None:
        self._over.wait(strike.after)
        if strike.launcher:
            self._job.signal(strike.number)
            return
        pid = pid_of(strike.victim, self._job.run.lines(self._job.run.events))
        try:
            above = psutil.Process(pid).ppid()
        except psutil.NoSuchProcess:  # a strike before this one was its end
            return
        for target in [above] if strike.above else [above, pid] if strike.supervisor else [pid]:
            _signal(target, strike.number)
            if strike.resume is not None:
                threading.Timer(strike.resume, _signal, (target, signal.SIGCONT)).start()


def pid_of(worker: str, events: list[Json]) -> int:
    """The newest process of that worker."""
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
    """Reads the file itself: a reader of the run folder would leave out lines that do not count."""
    places = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # a full disk took a part of it
            record = json.loads(line)
            places.append((record["step"], record["term"]))
    steps = [step for step, _ in places]
    assert steps == sorted(set(steps)), f"{path.name} has steps twice or in disorder: {places}"


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _check_nobody_lives(job: LocalJob) -> None:
    """No worker that was ever spawned, and no supervisor, outlives the job. Who has begun to live after a worker was
    spawned only has its number: after thousands of deaths these come again."""
    spawned = {e["pid"]: e["time"] for e in job.run.lines(job.run.events) if e["event"] == "spawned"}
    processes = [p for pid, at in spawned.items() if (p := _process(pid)) is not None and p.create_time() < at + 1.0]
    _, alive = psutil.wait_procs(processes, 10)
    assert not alive, f"outlived the job: {alive}"
    assert not job.supervisors()


def _all_that_is_known(job: LocalJob) -> str:
    """Also where every thread of every worker stands."""
    for pid in job.workers().values():
        _signal(pid, signal.SIGUSR1)
    time.sleep(1)
    tail = "\n".join(json.dumps(e) for e in job.run.lines(job.run.events)[-25:])
    return f"{job.output}\n{tail}\n{_logs(job.run)}"


def explain(outcome: Outcome) -> str:
    tail = "\n".join(json.dumps(e) for e in outcome.events[-25:])
    return f"{outcome.case}: exit code {outcome.code}\n{outcome.output}\n{tail}\n{outcome.logs}"
