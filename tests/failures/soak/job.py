"""A job on three nodes: injects faults, replaces lost machines and waits for the end of the job.

    with SoakedJob(case, folder, disk, say) as job:
        job.start()
        job.survive(faults)              # until the job has ended
        job.end()                        # ends all faults and waits for all processes
        job.differences                  # broken promises, as sentences; [] if there are none
        job.outcome()

Tracks which nodes and workers are intact, so that a majority of the nodes and a worker of each stage always survive.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.heartbeat import Sign
from tests.failures.disk import Disk
from tests.failures.harness import Case
from tests.failures.network import Machine
from tests.failures.nodes import WORKERS, Agent, Node, NodesJob

from .faults import KINDS, PLACES, Fault

SETTLED = 3.0  # seconds after a fault until heartbeats reliably show the new state
PATIENCE = 60.0  # seconds for which a fault waits for its requirements; then it is skipped
RETURN = 20.0  # seconds after a fault until a missing node is rebooted, as an operator would do it
JOIN = 90.0  # maximum seconds for a new node to join, on a busy machine
REBOOT = 3.0  # minimum time between two attempts to join, seconds
ATTEMPTS = 15  # maximum number of attempts to join
START = 240.0  # maximum seconds until the first step, on a busy machine
ABSENT = 60.0  # seconds after which a node is rebooted if it takes no part although it had no fault
HUNG = 120.0  # seconds without a step, outside faults, after which the job counts as hung
ENDING = 90.0  # maximum seconds from the end of the job to the end of its agents


@dataclass
class Place:
    """The node of one pipeline, which may be replaced. state: whole, faulty (a fault is active) or returning."""

    number: int
    node: Node
    state: str = "whole"
    since: float = 0.0  # time.time() of the last change of state
    attempts: int = 0
    seen: float = field(default_factory=time.time)  # time.time() when all of its workers last took part

    @property
    def machine(self) -> Machine:
        return self.node.machine

    @property
    def agent(self) -> Agent:
        assert isinstance(self.node.agent, Agent)
        return self.node.agent

    def becomes(self, state: str) -> None:
        self.state, self.since = state, time.time()


@dataclass
class Injected:
    """A past fault. left_out: it was not injected, because its requirements were not met in time."""

    fault: Fault
    at: float  # time.time()
    step: int
    left_out: bool = False


@dataclass
class SoakedJob(contextlib.AbstractContextManager):
    case: Case
    folder: Path
    disk: Disk | None
    say: Callable[[str], None]
    seen: Callable[[Injected], None] = lambda injected: None
    injected: list[Injected] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    joins: int = 0

    def __post_init__(self) -> None:
        self.stages = WORKERS[self.case.shape][1]
        self._undo: dict[threading.Timer, Callable[[], None]] = {}
        self._down: dict[str, float] = {}  # worker -> end of its last fault
        self._pids: dict[str, tuple[str, int]] = {}  # worker -> (host, process id on that host)
        self._live: set[str] = set()
        self.given_up = 0  # number of nodes that the job lost without a fault
        self._frozen = False
        self._ended: str | None = None
        self._stopped = ""
        self._committed, self._live_workers = -1, 0
        self._moved, self._calm = time.monotonic(), time.time()

    def start(self) -> None:
        """Starts the job and waits until the first step is committed."""
        run = self.disk.path / "run" if self.disk else self.folder / "run"
        self.job = NodesJob(self.case, self.folder, None, "embedded", run)
        self._events, self._metrics = Follower(run / "events.jsonl"), Follower(run / "metrics.jsonl")
        self.job.start("embedded", {})
        self.places = [Place(n, node) for n, node in enumerate(self.job.nodes)]
        deadline = time.monotonic() + START
        while self._committed < 0 and not self._ended:
            self._update()
            if time.monotonic() > deadline:
                self._differs(f"no step in {START:.0f} s")
                return
            time.sleep(0.05)

    def survive(self, faults: Iterator[Fault]) -> None:
        """Injects faults until the job has ended or hangs."""
        fault = next(faults)
        due = time.monotonic() + fault.pause
        while not self._ended:
            self._update()
            self._replace()
            now = time.monotonic()
            if now > self._moved + HUNG and not self._undo and not self._frozen:
                self._differs(f"no step for {HUNG:.0f} s after step {self._committed}")
                return
            if now >= due and ((possible := self._may(fault)) or now > due + PATIENCE):
                self._inject(fault, left_out=not possible)
                fault = next(faults)
                due = time.monotonic() + fault.pause
            time.sleep(0.05)

    def end(self) -> None:
        """Ends all faults. All processes of nodes without faults must end with code 0."""
        whole = [place for place in self.places if place.state == "whole"]
        self._end_faults()
        if self._ended != "finished":
            self._differs(f"the job has not finished: {self._ended or 'it still runs'}")
            return
        if self._stopped:
            self._differs(f"the job finished, but events.jsonl contains the event stopped: {self._stopped}")
        deadline = time.monotonic() + ENDING
        while any(place.agent.code is None for place in whole) and time.monotonic() < deadline:
            time.sleep(0.1)
        for place in whole:
            code = place.agent.code
            if code is None:
                self._differs(f"torchrun on {place.machine.name} still runs {ENDING:.0f} s after the end of the job")
            elif code:
                self._differs(f"torchrun on {place.machine.name}, which had no fault, ended with {code}")
            else:
                self._check_empty(place.machine)
        for path in self.job.run.path.rglob("*.tmp"):
            self._differs(f"left behind: {path}")

    def _check_empty(self, machine: Machine) -> None:
        deadline = time.monotonic() + 10
        while (left := machine.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._differs(f"left behind on {machine.name}: process {' '.join(process.cmdline())[:150]}")
        if not left:
            for path in machine.path("/dev/shm").iterdir():
                self._differs(f"left behind on {machine.name}: /dev/shm/{path.name}")

    def __exit__(self, *exception: object) -> None:
        self._end_faults()
        if hasattr(self, "job"):
            self.job.__exit__()

    def _differs(self, sentence: str) -> None:
        self.differences.append(sentence)
        self.say(f"DIFFERS: {sentence}")

    # ---------------------------------------------------------------------------------------- the state of the job

    def _update(self) -> None:
        for event in self._events.new():
            match event["event"]:
                case "spawned":
                    self._pids[event["worker"]] = event["host"], event["pid"]
                case "finished":
                    self._ended = "finished"
                case "stopped":  # must not occur in a job that finishes, not even on a node that was cut off
                    self._stopped = event["reason"]
                case "restored":
                    self._differs(
                        f"step {event['step']}: restarted from a checkpoint, although a worker of each stage was alive"
                    )
        for line in self._metrics.new():
            self._committed, self._live_workers = line["step"], line["live_workers"]
            self._moved = time.monotonic()
        if self._undo or self._frozen:
            self._moved, self._calm = time.monotonic(), time.time()
        if not self._ended and all(place.agent.code is not None for place in self.places):
            self._ended = f"all agents have ended: {self._stopped}"
        self._settle()

    def _settle(self) -> None:
        """Marks places and workers that have recovered as intact."""
        try:
            sign = Sign.read(self.job.run)
        except ValueError:
            return
        if sign is None:
            return
        self._live = set(sign.live)
        self._down = {w: at for w, at in self._down.items() if w not in sign.live or sign.time < at + SETTLED}
        for place in self.places:
            if all(f"{place.number}.{stage}" in sign.live for stage in range(self.stages)):
                place.seen = sign.time
                if place.state == "returning" and sign.time > place.since + SETTLED and place.agent.code is None:
                    place.becomes("whole")
                    place.attempts = 0

    def _is_live(self, worker: str) -> bool:
        return worker in self._live and worker not in self._down

    def _intact(self, place: Place) -> bool:
        return place.state == "whole" and all(self._is_live(f"{place.number}.{stage}") for stage in range(self.stages))

    def _may(self, fault: Fault) -> bool:
        if fault.kind == "freeze disk":
            return self.disk is not None and not self._frozen
        match KINDS[fault.kind].needs:
            case "nodes":
                return all(map(self._intact, self.places)) and self._live_workers == PLACES * self.stages
            case "peer":
                whole = [place.number for place in self.places if place.state == "whole"]
                live = [number for number in whole if self._is_live(f"{number}.{fault.stage}")]
                sharded = "parallel.sharded=true" in self.case.overrides
                return fault.place in live and len(live) >= (PLACES if sharded else 2)
        return True

    # ------------------------------------------------------------------------------------------------ returning nodes

    def _replace(self) -> None:
        """Replaces each machine whose agent has ended or whose workers are still missing long after a fault."""
        for place in self.places:
            ended, waited = place.agent.code is not None, time.time() - place.since
            if place.state == "whole" and ended and not self._finishes():
                self._differs(f"torchrun on {place.machine.name}, which had no fault, ended with {place.agent.code}")
                place.becomes("returning")
            if place.state == "whole" and time.time() > max(place.seen, self._calm) + ABSENT:
                self.given_up += 1
                self.say(f"{place.machine.name} had no fault and takes no part for {ABSENT:.0f} s")
                place.becomes("returning")
            patience = REBOOT if ended else JOIN if place.attempts else RETURN
            if place.state == "returning" and not self._frozen and waited > patience:
                if place.attempts == ATTEMPTS:
                    self._differs(f"no node could join for pipeline {place.number} in {ATTEMPTS} attempts")
                if place.attempts < ATTEMPTS:
                    self._join(place)

    def _finishes(self) -> bool:
        """Whether the last step is committed. Agents may end just before the final event is written."""
        return self._committed == self.case.steps - 1

    def _join(self, place: Place) -> None:
        said = (place.agent.output.strip().splitlines() or [""])[-1]
        place.machine.kill()
        sign = Sign.read(self.job.run)
        where = str(self.job.run.path) if self.joins % 2 or sign is None else sign.address
        place.node = self.job.join(where=where)
        place.attempts += 1
        self.joins += 1
        place.becomes("returning")
        self.say(f"{place.machine.name} joins at {where} for pipeline {place.number} (before: {said[:160]})")

    # -------------------------------------------------------------------------------------------------------- faults

    def _inject(self, fault: Fault, left_out: bool) -> None:
        injected = Injected(fault, time.time(), self._committed + 1, left_out)
        self.injected.append(injected)
        self.seen(injected)
        self.say(f"step {injected.step}: {fault}{' (left out)' if left_out else ''}")
        if left_out:
            return
        try:
            self._apply(fault)
        except (LookupError, psutil.Error) as error:
            self.say(f"the process for this fault does not exist: {error!r}")

    def _apply(self, fault: Fault) -> None:
        place, other = self.places[fault.place], self.places[fault.other]
        a, b, network = place.machine, other.machine, self.job.network
        match fault.kind:
            case "kill worker":
                self._signal_worker(fault, signal.SIGKILL)
            case "stop worker":
                self._signal_worker(fault, signal.SIGSTOP)
            case "kill supervisor" | "stop supervisor":
                number = signal.SIGKILL if fault.kind == "kill supervisor" else signal.SIGSTOP
                self._hold([place], fault, [(supervisors(place)[fault.stage], number)])
            case "stop coordinator":
                place, process = self._coordinator()
                self._hold([place], fault, [(process, signal.SIGSTOP)])
            case "kill agent" | "drain node":
                number = signal.SIGKILL if fault.kind == "kill agent" else signal.SIGTERM
                self._hold([place], fault, [(agent(place), number)])
            case "stop agent":
                # nsenter stops together with the agent, and must be continued too
                self._hold([], fault, [(agent(place), signal.SIGSTOP), (place.agent.process, 0)])
            case "stop node":
                everything = [(process, signal.SIGSTOP) for process in a.processes().values()]
                self._hold([place], fault, [*everything, (place.agent.process, 0)])
            case "kill node":
                a.kill()
                place.becomes("returning")
            case "cut node":
                self._cut([place], fault, lambda: network.cut(a))
            case "deafen node":
                self._cut([place], fault, lambda: [network.cut(m, a, one_way=True) for m in network.machines])
            case "mute node":
                self._cut([place], fault, lambda: network.cut(a, one_way=True))
            case "cut link":
                self._cut([place, other], fault, lambda: network.cut(a, b))
            case "cut link one way":
                self._cut([place, other], fault, lambda: network.cut(a, b, one_way=True))
            case "reset node":
                network.reset(a, seconds=fault.seconds)
            case "reset link":
                network.reset(a, b, seconds=fault.seconds)
            case "storm":
                network.weather(delay=0.05, loss=0.05, reorder=0.1)
                self._later(fault.seconds, network.weather)
            case "freeze disk":
                self._freeze(fault.seconds)

    def _signal_worker(self, fault: Fault, number: int) -> None:
        worker = f"{fault.place}.{fault.stage}"
        host, pid = self._pids[worker]
        self._down[worker] = time.time() + fault.seconds
        process = self.places[fault.place].machine.processes().get(pid)
        if process is None or host != self.places[fault.place].machine.name:
            self.say(f"worker {worker} has no process")
            return
        self._hold([], fault, [(process, number)])

    def _hold(self, places: list[Place], fault: Fault, signals: list[tuple[Any, int]]) -> None:
        """Sends the signals. At the end of the fault, sends SIGCONT to all of these processes."""
        for place in places:
            place.becomes("faulty" if fault.seconds else "returning")
        for process, number in signals:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        if fault.seconds:
            self._later(fault.seconds, lambda: self._release(places, [process for process, _ in signals]))

    def _release(self, places: list[Place], processes: list[Any]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        for place in places:
            place.becomes("returning")

    def _cut(self, places: list[Place], fault: Fault, cut: Callable[[], object]) -> None:
        for place in places:
            place.becomes("faulty")
        cut()

        def heal() -> None:
            self.job.network.heal()
            for place in places:
                place.becomes("returning")

        self._later(fault.seconds, heal)

    def _freeze(self, seconds: float) -> None:
        assert self.disk is not None
        frozen = self.disk.frozen()
        frozen.__enter__()
        self._frozen = True

        def thaw() -> None:
            frozen.__exit__(None, None, None)
            self._frozen = False

        self._later(seconds, thaw)

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        def run() -> None:
            if self._undo.pop(timer, None):
                undo()
                self.say(f"step {self._committed + 1}: the fault is over")

        timer = threading.Timer(seconds, run)
        self._undo[timer] = undo
        timer.daemon = True
        timer.start()

    def _end_faults(self) -> None:
        for timer in list(self._undo):
            timer.cancel()
            if undo := self._undo.pop(timer, None):
                undo()

    def _coordinator(self) -> tuple[Place, psutil.Process]:
        sign = Sign.read(self.job.run)
        assert sign is not None
        for place in self.places:
            if place.machine.name == sign.host and sign.pid in (processes := place.machine.processes()):
                return place, processes[sign.pid]
        return self.places[0], supervisors(self.places[0])[0]


def agent(place: Place) -> psutil.Process:
    """The torchrun process at that place."""
    found = [p for p in place.machine.processes().values() if any("torchrun" in word for word in p.cmdline()[:2])]
    return found[0]


def supervisors(place: Place) -> list[psutil.Process]:
    return sorted(agent(place).children(), key=lambda process: int(process.environ()["RANK"]))
