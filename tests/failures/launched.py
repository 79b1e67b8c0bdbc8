"""A job launched the way users launch it: one real torchrun agent per node, all on 127.0.0.1, without a zygote.

    with Launched(tmp_path, nodes=3, workers=2, arguments=["run.steps=100"]) as job:
        job.wait_for_step(3)
        job.kill(0)                           # SIGKILL to the agent of node 0, its supervisors and its workers
        assert job.wait([1, 2], 60) == [0, 0], job.explain()
        job.longest_gap()                     # longest time between two commits, seconds

All processes end at the end of the block, or with the process that started them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from recycle_pp.linux.processes import die_with_parent
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.ports import free_ports

Json = dict[str, Any]
TOKEN = "the secret of the launched tests"
# control=cluster with a suspicion of 10 s instead of 30 s, which is long enough even on a very busy machine.
COMMON = ("control=cluster", "control.heartbeat=0.2", "control.suspicion=10", "model=tiny", "numerics=reproducible")


class Launched(contextlib.AbstractContextManager):
    """nodes: number of agents. workers: number per node. Node n runs pipeline n, with the ranks from n * workers on."""

    launcher: tuple[str, ...] = ()  # a command that starts each agent

    def __init__(
        self,
        folder: Path,
        nodes: int = 3,
        workers: int = 2,
        arguments: Sequence[str] = (),
        run: Path | None = None,
        port: int | None = None,
    ) -> None:
        """folder: for the agents' output. run: the run folder (default: in `folder`). port: that of an earlier job."""
        self.run = RunFolder(run or folder / "run")
        self.arguments = [f"parallel.pipelines={nodes}", f"parallel.stages={workers}", *COMMON, *arguments]
        self._folder = folder
        self.port = port or free_ports(2)  # torchrun's store uses this port, the first coordinator the next one
        self._known: dict[int, psutil.Process] = {}  # all processes of this job seen so far
        self.agents = [self._start(node, nodes, workers) for node in range(nodes)]

    def _start(self, node: int, nodes: int, workers: int) -> subprocess.Popen[bytes]:
        command = [*self.launcher, str(Path(sys.executable).with_name("torchrun")), f"--nproc-per-node={workers}"]
        if nodes > 1:
            command += [f"--nnodes={nodes}", f"--node-rank={node}", "--master-addr=127.0.0.1"]
            command += [f"--master-port={self.port}"]
        command += ["-m", "recycle_pp.train", *self.arguments, f"run.dir={self.run.path}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RECYCLE_TOKEN": TOKEN}
        parent = os.getpid()
        with open(self._log(node), "ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(parent),
            )

    # -- results -----------------------------------------------------------------------------------------------

    def output(self, node: int) -> str:
        return self._log(node).read_text(errors="replace")

    def events(self, name: str | None = None) -> list[Json]:
        return [event for event in self.run.lines(self.run.events) if name in (None, event["event"])]

    def metrics(self) -> list[Json]:
        return self.run.lines(self.run.metrics)

    def committed(self) -> int:
        return max((line["step"] for line in self.metrics()), default=-1)

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        self._wait(lambda: self.committed() >= step, f"step {step}", seconds)

    def wait_for_event(self, name: str, nth: int = 1, seconds: float = 120) -> Json:
        self._wait(lambda: len(self.events(name)) >= nth, f"event {name}", seconds)
        return self.events(name)[nth - 1]

    def wait_until(self, condition: Any, what: str, seconds: float = 120) -> None:
        self._wait(condition, what, seconds)

    def wait(self, nodes: Sequence[int], seconds: float) -> list[int]:
        """Exit codes of these agents. Raises AssertionError with diagnostics if one does not end in time."""
        deadline = time.monotonic() + seconds
        for node in nodes:
            while self.agents[node].poll() is None:
                self._update()
                assert time.monotonic() < deadline, f"agent {node} still runs after {seconds} s\n{self.explain()}"
                time.sleep(0.02)
        return [self.agents[node].returncode for node in nodes]

    def longest_gap(self) -> float:
        """Longest time between two commits, seconds, without the start and the end of the job."""
        times = [line["time"] for line in self.metrics()]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def explain(self) -> str:
        outputs = "".join(f"--- agent {n}\n{self.output(n)[-6000:]}\n" for n in range(len(self.agents)))
        logs = "".join(f"--- {p.name}\n{p.read_text()[-1500:]}\n" for p in sorted(self.run.logs.glob("*")))
        tail = "\n".join(map(str, self.events()[-30:]))
        return f"{outputs}{tail}\n{logs}step {self.committed()}"

    # -- faults ------------------------------------------------------------------------------------------------

    def processes(self, node: int) -> list[psutil.Process]:
        """The agent, the supervisors and the workers of a node, in this order."""
        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.agents[node].pid)
            found = [agent, *agent.children(recursive=True)]
            self._known |= {process.pid: process for process in found}
            return found
        return []

    def supervisors(self, nodes: Sequence[int]) -> list[psutil.Process]:
        """The supervisors of these nodes, by rank."""
        return [child for node in nodes for child in self._children(self.agents[node].pid)]

    def worker(self, name: str) -> psutil.Process:
        """The newest process of that worker, not its standby process."""
        return psutil.Process([event["pid"] for event in self.events("spawned") if event["worker"] == name][-1])

    def _children(self, pid: int) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child for child in psutil.Process(pid).children() if child.status() != psutil.STATUS_ZOMBIE]
        return []

    def kill(self, node: int) -> float:
        """Kills a node. Returns the time.time() of the loss."""
        found = self.processes(node)
        at = time.time()
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.agents[node].wait()
        for process in found:  # a process that they started after `processes` ends with its parent
            with contextlib.suppress(psutil.NoSuchProcess):
                process.wait(10)
        return at

    def __exit__(self, *exception: object) -> None:
        for node in range(len(self.agents)):
            self.kill(node)
        psutil.wait_procs(self._known.values(), 10)
        left = [process for process in self._known.values() if process.is_running() and process.status() != "zombie"]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert exception[0] is not None or not left, f"processes outlived the job: {left}"

    def _wait(self, condition: Any, what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self._update()
            assert time.monotonic() < deadline, f"no {what} in {seconds} s\n{self.explain()}"
            running = any(agent.poll() is None for agent in self.agents)
            assert running or condition(), f"all agents ended before: {what}\n{self.explain()}"
            time.sleep(0.02)

    def _update(self) -> None:
        for node in range(len(self.agents)):
            self.processes(node)

    def _log(self, node: int) -> Path:
        return self._folder / f"agent{node}.log"
