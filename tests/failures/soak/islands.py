"""Three islands that come and go, and a store that fails.

    python -m tests.failures.soak.islands --minutes 60 --seed 7 --out out/islands    # in a clone of the repository

Each island has its own torchrun, and reaches moto's S3 server through its own proxy. At least one island always runs.
Faults:

- a worker is killed or paused
- an island is killed or ends after SIGTERM, and restarts later
- an island and its folder are lost, and a new island replaces it
- the store answers 500 or closes connections, for one island or for all

Checks:

- for each round, theta is equal on all islands that have applied the round, and no checksum ever changes
- no sample is read by two islands, or twice by one
- the rounds count no more samples than the islands have read
- after the last fault, all islands apply two more rounds
- an island that gets SIGTERM ends with a checkpoint of its last step

OUT/islands.jsonl has a line for each fault, and a last line with the result. The exit code is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from recycle_pp.islands.__main__ import state
from recycle_pp.linux.processes import die_with_parent
from recycle_pp.storage.store import Store, StoreError
from recycle_pp.telemetry.checkpoint_folders import finished
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.s3_server import Proxy, S3Server

SHAPES = (  # (number of workers, settings) of the first three islands; later ones reuse them in turn
    (2, ("parallel=2x1",)),
    (4, ("parallel=2x2",)),
    (3, ("parallel=3x1", "parallel.sharded=true")),
)
PARTS = 8
COMMON = (
    "model=tiny", "parallel.microbatches=1", "run.steps=1000000", "run.validate_every=0", "run.sample_log=true",
    "run.respawns=100000", "run.resume=auto", "numerics=reproducible", "control.suspicion=5", "checkpoint.every=40",
    "islands.steps=20", "islands.fragments=2", "islands.patience=10", "islands.max_local=100", f"islands.parts={PARTS}",
)  # fmt: skip
KINDS = {  # relative frequency, shortest and longest duration in seconds
    "kill worker": (6, 0.0, 0.0),
    "stop worker": (3, 2.0, 20.0),
    "kill island": (4, 5.0, 240.0),
    "end island": (2, 5.0, 240.0),
    "lose island": (1, 5.0, 60.0),
    "store answers 500": (3, 5.0, 200.0),
    "store closes connections": (2, 5.0, 200.0),
    "store answers 500 to all": (1, 5.0, 60.0),
}
LOOK = 10.0  # seconds between two reads of the store
ATTEMPTS = 20  # maximum number of attempts to start an island
ENDING = 120.0  # maximum seconds from SIGTERM to the end of an island
HEALED = 600.0  # maximum seconds after the last fault until all islands have applied two rounds
GRACE = 40.0  # seconds after a fault during which long gaps are attributed to it


class Island:
    """One island: its torchrun, its run folder, its proxy to the store.

    wanted  whether it should be running
    begun   time.time() of its latest start
    faulty  (begin, end) of its own faults, time.time()
    codes   exit codes of torchrun when it ended by itself
    """

    def __init__(self, out: Path, number: int, server: S3Server, store: str) -> None:
        self.name = f"island{number}"
        self.run = RunFolder(out / self.name)
        self.agent: subprocess.Popen[bytes] | None = None
        self.wanted = True
        self.begun = 0.0
        self.faulty: list[tuple[float, float]] = []
        self.codes: list[int] = []
        self.proxy = Proxy(server)
        self._log = out / f"{self.name}.log"
        workers, shape = SHAPES[number % len(SHAPES)]
        launcher = str(Path(sys.executable).with_name("torchrun"))
        self._command = [launcher, f"--nproc-per-node={workers}", "--standalone", "-m", "recycle_pp.train"]
        self._command += [*COMMON, *shape]
        self._command += [f"run.dir={self.run.path}", f"islands.store={store}", f"islands.name={self.name}"]
        self._environment = {**os.environ, **server.environment(self.proxy.port), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        self.wanted, self.begun = True, time.time()
        parent = os.getpid()
        with open(self._log, "ab") as log:
            self.agent = subprocess.Popen(
                self._command,
                env=self._environment,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with_parent(parent),
            )

    @property
    def runs(self) -> bool:
        return self.agent is not None and self.agent.poll() is None

    def saved(self) -> int:
        """Number of steps in the newest checkpoint; 0 without one."""
        return max(finished(self.run.path / "checkpoints"), default=0)

    def workers(self) -> list[psutil.Process]:
        """The live processes of the workers."""
        newest = {event["worker"]: event["pid"] for event in self.events("spawned")}
        with contextlib.suppress(psutil.NoSuchProcess):
            assert self.agent is not None
            below = {process.pid: process for process in psutil.Process(self.agent.pid).children(recursive=True)}
            return [below[pid] for _, pid in sorted(newest.items()) if pid in below]
        return []

    def kill(self) -> None:
        assert self.agent is not None
        self.wanted = False
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.agent.pid)
            found = [agent, *agent.children(recursive=True)]
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found[1:], 20)
        self.agent.wait()

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.run.lines(self.run.events) if event["event"] == name]

    def samples(self) -> list[int]:
        return [sample for line in self.run.lines(self.run.path / "samples.jsonl") for sample in line["samples"]]

    def longest_gap(self) -> float:
        """Longest time between two commits, seconds, outside this island's own faults."""
        times = sorted(line["time"] for line in self.run.lines(self.run.metrics))
        own = [(a, b) for a, b in pairwise(times) if not any(begin < b and a < end for begin, end in self.faulty)]
        return max((b - a for a, b in own), default=0.0)

    def end_of_log(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]


class Chaos:
    """Runs the islands and injects the faults.

    islands      the islands that should be running now, or return later
    lost         the islands that never return
    differences  failed checks, as sentences
    """

    def __init__(self, options: argparse.Namespace, out: Path, server: S3Server) -> None:
        self.islands: list[Island] = []
        self.lost: list[Island] = []
        self.differences: list[str] = []
        self.faults: Counter[str] = Counter()
        self.sums: dict[int, dict[str, str]] = defaultdict(dict)  # round -> island -> checksum of theta
        self.counted: dict[int, dict[str, int]] = {}  # round -> island -> samples
        self._out, self._server, self._options = out, server, options
        self._url = f"{server.url('islands')}/run"
        os.environ |= server.environment()
        self._store = Store(self._url, 20.0)
        self._chance = random.Random(options.seed)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._begun = self._healed = time.time()

    def run(self) -> None:
        """Runs the islands, injects the faults, waits for two more rounds, and ends the islands."""
        for number in range(3):
            self._new(number)
        self._later(LOOK, self._look)
        self._wait(lambda: all(island.saved() for island in self.islands), 240.0, "first checkpoints")
        until = self._healed = time.time() + 60 * self._options.minutes
        self._later(0.0, lambda: self._next(until))
        self._wait(lambda: time.time() > self._healed, float("inf"), "end of the last fault")
        goal = max(self.counted, default=0) + 2
        self._wait(lambda: all(self._applied(island) >= goal for island in self.islands), HEALED, f"round {goal}")
        for island in self.islands:
            self._end(island)
        self._look()

    def check(self) -> dict[str, Any]:
        """Checks samples and checksums. Returns the result."""
        everyone = [*self.islands, *self.lost]
        for number, sums in sorted(self.sums.items()):
            if len({*sums.values()}) > 1:
                self.differences.append(f"round {number}: different theta: {sums}")
        owners: dict[int, str] = {}
        for island in everyone:
            read = island.samples()
            if len(read) > len({*read}):
                self.differences.append(f"{island.name} has read {len(read) - len({*read})} samples twice")
            for sample in {*read}:
                if owners.setdefault(sample, island.name) != island.name:
                    self.differences.append(f"{island.name} and {owners[sample]} have read sample {sample}")
                    break
            counted = sum(of.get(island.name, 0) for of in self.counted.values())
            if counted > len(read):
                self.differences.append(
                    f"the rounds count {counted} samples of {island.name}, which read only {len(read)}"
                )
        count = {kind: sum(len(island.events(kind)) for island in everyone) for kind in COUNTED}
        return {
            "seconds": round(time.time() - self._begun),
            "faults": sum(self.faults.values()),
            **dict(sorted(self.faults.items())),
            "rounds": len(self.counted),
            "rounds of two islands or more": sum(len(of) > 1 for of in self.counted.values()),
            "checksums": sum(map(len, self.sums.values())),
            "samples": len(owners),
            "counted samples": sum(sum(of.values()) for of in self.counted.values()),
            **count,
            "exit codes": dict(Counter(code for island in everyone for code in island.codes)),
            "longest gap": {island.name: round(island.longest_gap(), 1) for island in everyone},
            "differences": self.differences,
        }

    # -- faults ------------------------------------------------------------------------------------------------

    def _next(self, until: float) -> None:
        """Injects a fault, and plans the next one."""
        pause = self._chance.expovariate(1 / self._options.mean)
        kind = self._chance.choices(list(KINDS), [share for share, _, _ in KINDS.values()])[0]
        low, high = KINDS[kind][1:]
        seconds = low * (high / low) ** self._chance.random() if low else 0.0  # logarithmically uniform
        island = self._chance.choice(self.islands)
        if self._possible(kind, island):
            self.faults[kind] += 1
            self._say({"fault": kind, "island": island.name, "for": round(seconds, 1)})
            for each in self.islands if kind.endswith("all") else [island]:
                each.faulty.append((time.time(), time.time() + seconds + GRACE))
            self._healed = max(self._healed, time.time() + seconds + 1)
            self._inject(kind, island, seconds)
        if time.time() + pause < until:
            self._later(pause, lambda: self._next(until))

    def _possible(self, kind: str, island: Island) -> bool:
        """Whether the island runs and has a checkpoint, another island runs, and a lost island can be replaced."""
        others = any(other.runs for other in self.islands if other is not island)
        new = kind != "lose island" or len(self.islands) + len(self.lost) < PARTS
        return island.runs and others and island.saved() and new

    def _inject(self, kind: str, island: Island, seconds: float) -> None:
        if kind.endswith("worker"):
            found = island.workers()
            if found:
                self._signal(self._chance.choice(found), kind, seconds)
        elif kind.endswith("island"):
            self._end(island) if kind == "end island" else island.kill()
            if kind == "lose island":
                self.islands.remove(island)
                self.lost.append(island)
                self._later(seconds, lambda: self._new(len(self.islands) + len(self.lost)))
            else:
                self._later(seconds, lambda: self._start(island))
        else:
            affected = list(self.islands) if kind.endswith("all") else [island]
            verdict = "close" if kind.endswith("connections") else 500
            for each in affected:
                each.proxy.judge = lambda method, path: verdict
            self._later(seconds, lambda: self._heal(affected))

    def _signal(self, worker: psutil.Process, kind: str, seconds: float) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            if kind == "kill worker":
                worker.kill()
                return
            worker.suspend()
            self._later(seconds, lambda: self._resume(worker))

    def _resume(self, worker: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.resume()

    def _heal(self, affected: list[Island]) -> None:
        for island in affected:
            island.proxy.judge = lambda method, path: None

    def _new(self, number: int) -> None:
        island = Island(self._out, number, self._server, self._url)
        self.islands.append(island)
        self._start(island)

    def _start(self, island: Island, attempt: int = 1) -> None:
        """Starts an island, and restarts it if it ends by itself, as an operator would."""
        island.faulty.append((time.time() - GRACE, time.time() + GRACE))
        island.start()
        self._later(5.0, lambda: self._watch(island, attempt))

    def _watch(self, island: Island, attempt: int) -> None:
        agent = island.agent
        assert agent is not None
        code = agent.poll()
        if code is None:
            self._later(5.0, lambda: self._watch(island, attempt))
        elif island.wanted:
            island.codes.append(code)
            self._say({"ended": island.name, "code": code, "output": island.end_of_log()})
            if attempt == ATTEMPTS:
                self.differences.append(f"{island.name} ended {ATTEMPTS} times by itself")
            else:
                self._start(island, attempt + 1)

    def _end(self, island: Island) -> None:
        """Sends SIGTERM to torchrun and waits for its end."""
        assert island.agent is not None
        island.wanted = False
        island.agent.send_signal(signal.SIGTERM)
        try:
            island.agent.wait(ENDING)
        except subprocess.TimeoutExpired:
            self.differences.append(f"{island.name} did not end within {ENDING} s of SIGTERM")
            island.kill()
            return
        steps = island.run.lines(island.run.metrics)
        if steps and steps[-1]["time"] > island.begun and len(steps) != island.saved():
            self.differences.append(
                f"{island.name} made {len(steps)} steps, but its checkpoint after SIGTERM has {island.saved()}"
            )

    # -- the loop ----------------------------------------------------------------------------------------------

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.time() + seconds, next(self._numbers), action))

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.time() + seconds
        while not condition():
            if time.time() > deadline:
                self.differences.append(f"no {what} within {seconds:.0f} s")
                return
            while self._due and self._due[0][0] <= time.time():
                heapq.heappop(self._due)[2]()
            time.sleep(0.2)

    def _look(self) -> None:
        """Reads the newest rounds in the store."""
        self._later(LOOK, self._look)
        try:
            found = state(self._store)
        except StoreError as error:
            self._say({"store": str(error)})
            return
        for each in found["rounds"]:
            number = each["round"]
            if self.counted.setdefault(number, each["samples"]) != each["samples"]:
                self.differences.append(
                    f"round {number}: its sample counts changed from {self.counted[number]} to {each['samples']}"
                )
            for name, digest in each["theta_sha256"].items():
                if self.sums[number].setdefault(name, digest) != digest:
                    self.differences.append(f"round {number}: the checksum of {name} has changed")

    def _applied(self, island: Island) -> int:
        return max((number for number, sums in self.sums.items() if island.name in sums), default=-1)

    def _say(self, line: dict[str, Any]) -> None:
        steps = {island.name: len(island.run.lines(island.run.metrics)) for island in self.islands}
        line = {"at": round(time.time() - self._begun, 1), **line}
        line |= {"round": max(self.counted, default=-1), "steps": steps}
        print(json.dumps(line), flush=True)
        with open(self._out / "islands.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        for island in [*self.islands, *self.lost]:
            if island.runs:
                island.kill()
            island.proxy.__exit__()


COUNTED = (
    "death_detected", "restored", "island_joined", "island_left", "island_late", "round_applied", "islands_cut_off",
    "round_awaited",
)  # fmt: skip


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.failures.soak.islands",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="duration of the faults (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    parser.add_argument("--mean", type=float, default=15.0, help="average pause between faults, seconds (default 15)")
    parser.add_argument("--out", default="out/islands", help="a new folder")
    options = parser.parse_args(arguments)
    out = Path(options.out).absolute()
    out.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with S3Server() as server:
        chaos = Chaos(options, out, server)
        try:
            chaos.run()
            result = chaos.check()
        finally:
            chaos.close()
    with open(out / "islands.jsonl", "a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if result["differences"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
