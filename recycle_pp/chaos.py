"""Kills, hangs, slows and evicts workers of a live job, to test how the job copes with faults.

    torchrun --nproc-per-node=12 -m recycle_pp.train run.dir=runs/mine run.steps=2000 run.respawns=100000
    python -m recycle_pp.chaos --run-dir runs/mine --mtbf 5s --until-step 1500 --seed 7      # in another terminal

Reads the live workers from the run's events and sends signals to their processes on this machine. Faults come at random
times (--mtbf apart on average) or at the times of --trace. Ends with the job, at --until-step, on Ctrl-C, SIGTERM or
SIGHUP. Workers that it has paused or holds back then continue. Then prints deaths, stalls, steps, resources of the
processes, and goodput (progress relative to a run without deaths).

Without --cruel, at least one member of every stage survives. Killed workers are restarted as often as run.respawns
allows, and evicted workers are not. The same seed gives the same times, but the live workers and their position in a
step vary.

--trace: a CSV file as for `python -m recycle_pp.simulate` (docs/simulate.md), with the number of workers or the state
of each machine over time. If the number falls by n, n workers are killed, and their new processes are suspended. If it
rises by n, n of these processes continue. --speed 60 turns a minute into a second.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from recycle_pp.command import exit_code, parser_of
from recycle_pp.config.times import parse_seconds
from recycle_pp.linux.processes import started_at
from recycle_pp.simulation import availability
from recycle_pp.telemetry.chaos_table import Usage, table
from recycle_pp.telemetry.events.deaths import DeathDetected
from recycle_pp.telemetry.events.job import Finished, PlanAdopted, Started, Stopped
from recycle_pp.telemetry.events.recovery import Restored
from recycle_pp.telemetry.events.workers import Left, Rejoined, Spawned
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader

KINDS = {
    "kill": "SIGKILL",
    "hang": "SIGSTOP, until the job detects and kills it",
    "pause": "SIGSTOP for a fraction of a second",
    "slow": "stopped half of the time, for some seconds",
    "evict": "SIGTERM: the worker hands over its work and leaves",
}
SHARES = {"kill": 6, "hang": 1, "pause": 1, "slow": 1, "evict": 1}
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end this command
_LATER = 1.0  # seconds by which a process may seem to start after the event of its start, if the clock was changed
_POLL = 0.02  # seconds between checks of the run folder
_MEASURE = 5.0  # seconds between measurements of the processes' resources


@dataclass
class Live:
    """The processes of a run on this machine, from its events."""

    run: RunFolder
    pids: dict[str, int] = field(default_factory=dict)  # worker -> its process
    # workers that take part in steps; workers that are still joining do not count
    members: set[str] = field(default_factory=set)
    # worker that the trace keeps down -> pid of its new process; None until the process has started
    held: dict[str, int | None] = field(default_factory=dict)
    over: bool = False
    _begun: bool = False
    # the workers whose newest process has not died, the newest process last
    _spawned: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lines = RunReader(self.run).follow()
        self._steps = 0

    def update(self) -> None:
        """Reads the new events. Raises UnreadableFile if the file is damaged."""
        for event in self._lines.events.new():
            match event:
                case Spawned():
                    if self.over:  # a resume continues in the same folder, maybe with fewer workers
                        self._restart()
                    self._spawned.pop(event.worker, None)
                    self._spawned[event.worker] = None
                    if event.host == socket.gethostname() and _is_of(event.pid, event.time):
                        self._found(event.worker, event.pid)
                    if not self._begun:
                        self.members.add(event.worker)
                case Rejoined() if event.worker in self.pids:  # absent if a fault has hit the worker since
                    self.members.add(event.worker)
                case DeathDetected() | Left():
                    self.remove(event.worker)
                case Restored():  # all workers restart, with new roles
                    self._restart()
                case Started():  # an earlier job that was killed with all its processes has left no event of its end
                    self.members = set(list(self._spawned)[-event.workers :])
                    self.pids = {worker: pid for worker, pid in self.pids.items() if worker in self.members}
                case PlanAdopted():
                    self._begun = True
                case Finished() | Stopped():
                    self.over = True
        if (damage := self._lines.events.damage) is not None:
            raise damage

    def _restart(self) -> None:
        self.over = self._begun = False
        for workers in (self.pids, self.members, self._spawned):
            workers.clear()

    def _found(self, worker: str, pid: int) -> None:
        if worker in self.held:
            self.held[worker] = pid
            _signal(pid, signal.SIGSTOP)  # the new process has not joined yet, so no worker waits for it
        else:
            self.pids[worker] = pid

    def release(self, worker: str) -> None:
        pid = self.held.pop(worker)
        if pid is not None:
            self.pids[worker] = pid
            _signal(pid, signal.SIGCONT)

    def remove(self, worker: str) -> None:
        self.pids.pop(worker, None)
        self._spawned.pop(worker, None)
        self.members.discard(worker)

    def steps(self) -> int:
        """Number of committed steps."""
        self._steps = max((line.step + 1 for line in self._lines.steps.new()), default=self._steps)
        return self._steps

    def victims(self, cruel: bool) -> list[str]:
        """Workers that faults may hit. Includes the last member of a stage only if `cruel`."""
        stages = [_stage(worker) for worker in self.members]
        return sorted(w for w in self.pids if cruel or w not in self.members or stages.count(_stage(w)) > 1)


def _stage(worker: str) -> str:
    return worker.partition(".")[2]


def main(arguments: Sequence[str]) -> int:
    return exit_code(lambda: _run(arguments), "recycle_pp.chaos")


def _run(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    run = RunFolder(options.run_dir)
    if not run.events.exists():
        raise ValueError(f"--run-dir {options.run_dir} contains no run: there is no {run.events.name}")
    times = changes_of(options.trace, options.speed) if options.trace else _at_random(options.mtbf, options.seed)
    live, usage, begun, hitter = Live(run), Usage(), time.time(), Hitter()
    # A signal that the caller ignores, as nohup does, stays ignored.
    handlers = {number: of for number in ENDS if (of := signal.getsignal(number)) != signal.SIG_IGN}
    try:
        for number in handlers:
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
        inject_faults(live, times, random.Random(options.seed), options, usage, hitter)
    except KeyboardInterrupt:
        pass
    finally:
        for number in handlers:  # a second signal must not leave a worker stopped
            signal.signal(number, signal.SIG_IGN)
        hitter.close()
        for worker in list(live.held):
            live.release(worker)
        for number, of in handlers.items():
            signal.signal(number, of)
    print(table(run, begun, usage))
    return 0


def _is_of(pid: int, at: float) -> bool:
    """Whether the process belongs to recycle_pp and was running at this time. It may not: the id of a dead worker may
    have been reused, or the job may run in a container with the name of this machine, but its own process ids."""
    started = started_at(pid)
    if started is None or started >= at + _LATER:
        return False
    with suppress(OSError):
        return b"recycle_pp" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def inject_faults(
    live: Live, times: Iterator[Change], rng: random.Random, options: argparse.Namespace, usage: Usage, hitter: Hitter
) -> None:
    """Injects faults at `times` until the job ends or has completed `options.until_step` steps."""
    begun, due, looked = time.monotonic(), next(times, None), 0.0
    while due is not None:
        live.update()
        if live.over or (options.until_step is not None and live.steps() >= options.until_step):
            return
        now = time.monotonic() - begun
        if now >= looked + _MEASURE:
            looked = now
            usage.measure(list(live.pids.values()))
        if now < due.at:
            time.sleep(_POLL)
            continue
        victims = live.victims(options.cruel)
        if due.up and live.held:
            worker, kind = next(iter(live.held)), "return"
            live.release(worker)
            print(f"{now:8.2f} s  {kind:<6} worker {worker}", flush=True)
        elif not due.up and victims:
            worker = rng.choice(victims)
            kind = "kill" if options.trace else rng.choices(options.kinds, [SHARES[k] for k in options.kinds])[0]
            if worker not in live.members:
                kind = "kill"  # because a hang of a starting worker is detected only after control.lease seconds
            if options.trace:
                live.held[worker] = None
            hitter.hit(kind, live.pids[worker], rng)
            print(f"{now:8.2f} s  {kind:<6} worker {worker}", flush=True)
            if kind not in ("pause", "slow"):
                live.remove(worker)
        due = next(times, None)


class Hitter:
    """Sends signals to processes. A process that is hung during a pause does not continue after the pause."""

    def __init__(self) -> None:
        self._hang: set[int] = set()
        self._over = threading.Event()  # ends all pauses
        self._pauses: list[threading.Thread] = []
        self._lock = threading.Lock()

    def hit(self, kind: str, pid: int, rng: random.Random) -> None:
        with self._lock:
            self._hang.discard(pid)  # an earlier process with the same id may have hung
        if kind in ("pause", "slow"):
            pauses = [rng.uniform(0.05, 0.5)] if kind == "pause" else [0.02] * rng.randrange(25, 100)
            self._pauses = [thread for thread in self._pauses if thread.is_alive()]
            self._pauses.append(threading.Thread(target=self._pause, args=(pid, pauses), daemon=True))
            self._pauses[-1].start()
            return
        with self._lock:
            if kind == "hang":
                self._hang.add(pid)
            _signal(pid, {"kill": signal.SIGKILL, "evict": signal.SIGTERM, "hang": signal.SIGSTOP}[kind])

    def close(self) -> None:
        """Ends all pauses. The paused processes continue."""
        self._over.set()
        for thread in self._pauses:
            if thread.is_alive():  # a signal may have come before its start
                thread.join()

    def _pause(self, pid: int, pauses: Sequence[float]) -> None:
        """Stops the process for each of the pauses (seconds), and lets it run for the same time after each."""
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            try:
                for seconds in pauses:
                    if self._over.is_set():
                        return
                    signal.pidfd_send_signal(process, signal.SIGSTOP)
                    self._over.wait(seconds)
                    with self._lock:
                        if pid in self._hang:
                            return
                        signal.pidfd_send_signal(process, signal.SIGCONT)
                    self._over.wait(seconds)
            finally:
                os.close(process)


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# ------------------------------------------------------------------------------------------------------------ times


class Change(NamedTuple):
    at: float  # seconds from now
    up: bool = False  # whether the job gains a worker, instead of losing one


def _at_random(mtbf: float, seed: int) -> Iterator[Change]:
    """Faults at random times: a Poisson process with a mean of `mtbf` seconds between two faults."""
    rng, now = random.Random(f"times {seed}"), 0.0
    while True:
        now += rng.expovariate(1 / mtbf)
        yield Change(now)


def changes_of(path: str, speed: float) -> Iterator[Change]:
    """One change for every worker that is lost or gained in a trace. Raises ValueError for an invalid file."""
    try:
        trace = availability.read(path)
    except OSError as error:
        raise ValueError(f"--trace {path} cannot be read: {error.strerror}") from error
    return iter([Change(change.at / speed, change.up) for change in trace.changes])


# ---------------------------------------------------------------------------------------------------------- options


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed options. Raises ValueError for an invalid value. `--help` and unknown options exit like argparse."""
    parser = parser_of("chaos", __doc__)
    parser.add_argument("--run-dir", required=True, help="the run folder of a live job on this machine")
    parser.add_argument("--mtbf", default="10s", help="mean time between faults: 500ms, 5s, 2m (default 10s)")
    parser.add_argument(
        "--until-step", type=int, help="stop when this step starts; steps count from 0 (default: when the job ends)"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed for the choice of victims, kinds and times")
    parser.add_argument("--kinds", default="kill", help=f"one or more of {', '.join(KINDS)}, comma-separated, or all")
    parser.add_argument("--cruel", action="store_true", help="also hit the last worker of a stage")
    parser.add_argument("--trace", help="CSV file with the times of losses and returns, instead of --mtbf")
    parser.add_argument("--speed", type=float, default=1.0, help="replay the trace this many times faster")
    options = parser.parse_args(list(arguments))
    options.mtbf = parse_seconds(options.mtbf, "--mtbf")
    options.kinds = list(KINDS) if options.kinds == "all" else options.kinds.split(",")
    for kind in options.kinds:
        if kind not in KINDS:
            raise ValueError(f"--kinds must be one or more of {', '.join(KINDS)}, or all, not {kind!r}")
    if not 0 < options.speed < math.inf:
        raise ValueError(f"--speed must be a number above 0, not {options.speed:g}")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
