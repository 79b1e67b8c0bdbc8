"""A job on several simulated machines with one agent each, connected by a network that can fail.

    with nodes.start(case, tmp_path, zygote) as job:     # three nodes with one pipeline each
        job.wait_for_step(3)
        job.nodes[2].machine.kill()
        outcome = job.outcome()                          # waits for node 0; all others end at the end of the block

Without a zygote, each node's agent is the real torchrun. With one, a small stand-in forks the processes. This is ten
times faster at the start and makes no difference afterwards.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.local_cluster import LocalJob, Zygote
from recycle_pp.testing.zygote import Part
from tests.etcd import EtcdServer

from .harness import Case, Json, Outcome, _logs, _outcome
from .network import Machine, Network

BOUND = 120.0  # seconds after which a wait counts as hung
PORT = 29501
TOKEN = {"RECYCLE_TOKEN": "the secret of the tests"}
WORKERS = {"3x1": (3, 1), "3x2": (3, 2), "3x4": (3, 4)}  # shape -> (number of nodes, workers per node)
QUICK = ("control=cluster", "control.heartbeat=0.1", "control.suspicion=4")


class Agent:
    """A real torchrun with the interface of a LocalJob."""

    def __init__(self, process: subprocess.Popen[Any], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self.process.poll()

    def wait(self, seconds: float) -> int:
        """Waits until all workers and supervisors have ended. torchrun may then still wait for other agents.

        Returns the exit code, or 0 if torchrun still waits.
        """
        deadline = time.monotonic() + seconds
        while (code := self.process.poll()) is None and "Local worker group finished" not in self.output:
            if time.monotonic() > deadline:
                raise TimeoutError(f"torchrun still runs after {seconds} s; it printed:\n{self.output}")
            time.sleep(0.05)
        return code or 0

    def end(self, seconds: float) -> int:
        """Waits until torchrun has ended. Returns its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"torchrun still runs after {seconds} s; it printed:\n{self.output}") from error

    def close(self) -> None:
        """Does nothing, because torchrun ends with its machine."""


@dataclass
class Node:
    machine: Machine
    agent: LocalJob | Agent


class NodesJob(contextlib.AbstractContextManager):
    """A case with one machine per pipeline. All machines and processes end at the end of the block."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        zygote: Zygote | None,
        coordinator: str,
        run: Path | None = None,
        environments: Mapping[int, dict[str, str]] | None = None,
    ) -> None:
        self.case, self.run = case, RunFolder(run or folder / "run")
        self.network = Network()
        self.nodes: list[Node] = []
        self._folder, self._zygote, self._environments = folder, zygote, environments or {}
        self._coordinator = [f"coordinator={coordinator}"]
        self._begun = time.monotonic()
        self._world = WORKERS[case.shape]

    def start(self, coordinator: str, far: Mapping[int, float]) -> None:
        nodes, workers = self._world
        if coordinator == "etcd":
            self.etcd = EtcdServer(self._folder, self.network.machine("etcd"))
            self.etcd.start()
            self._coordinator += [f"control.endpoints=[{self.etcd.endpoint}]"]
        machines = [self.network.machine(f"node{k}") for k in range(nodes)]
        for number, delay in far.items():
            self.network.far(machines[number], delay)
        for number, machine in enumerate(machines):
            self.nodes.append(Node(machine, self._agent(number, machine, machines[0].address, nodes, workers)))

    def _agent(self, number: int, machine: Machine, master: str, nodes: int, workers: int) -> LocalJob | Agent:
        where_to = [f"control.address={master}:{PORT}", f"run.dir={self.run.path}"]
        arguments = [*QUICK, *self.case.arguments, *self._coordinator, *where_to]
        if self._zygote is not None:
            part = Part(number * workers, workers, nodes * workers, machine.holder)
            return self._zygote.run(arguments, TOKEN | self._environments.get(number, {}), part)
        where = [f"--nnodes={nodes}", f"--node-rank={number}", f"--nproc-per-node={workers}"]
        where += [f"--master-addr={master}", "--master-port=29500", "--rdzv-backend=static"]
        return self.torchrun(machine, where, arguments)

    def join(self, machine: Machine | None = None, token: str | None = None, where: str | None = None) -> Node:
        """Starts an agent with +join=`where` (default: node 0's address) on a machine (default: a new one)."""
        machine = machine or self.network.machine(f"node{len(self.nodes)}")
        _, workers = self._world
        where = where or f"{self.nodes[0].machine.address}:{PORT}"
        environment = TOKEN | ({"RECYCLE_TOKEN": token} if token else {})
        arguments = [f"+join={where}"]
        if self._zygote is not None:
            agent = self._zygote.start(arguments, self.run, Part(0, workers, workers, machine.holder), environment)
        else:
            # Addresses, because the machines cannot resolve host names.
            where_to = [
                f"--nproc-per-node={workers}",
                f"--local-addr={machine.address}",
            ]
            agent = self.torchrun(machine, where_to, arguments)
        self.nodes.append(Node(machine, agent))
        return self.nodes[-1]

    def torchrun(self, machine: Machine, where: list[str], arguments: list[str]) -> Agent:
        log, temporary = self._folder / f"{machine.name}.log", self._folder / f"{machine.name}.tmp"
        temporary.mkdir(exist_ok=True)  # with equal process ids on two machines, temporary files would have equal names
        command = [Path(sys.executable).with_name("torchrun"), *where, "-m", "recycle_pp.train", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO", "TMPDIR": str(temporary), **TOKEN}
        with open(log, "a") as output:
            return Agent(machine.run(command, env=environment, stdout=output, stderr=output), log)

    @property
    def output(self) -> str:
        return "".join(f"[{node.machine.name}] {node.agent.output}" for node in self.nodes)

    def events(self, name: str | None = None) -> list[Json]:
        return [e for e in self.run.lines(self.run.events) if name in (None, e["event"])]

    def wait_for_event(self, name: str, seconds: float = BOUND, nth: int = 1, **fields: Any) -> Json:
        """Waits for the nth event with that name and those fields."""
        deadline = time.monotonic() + seconds
        while True:
            found = [e for e in self.events(name) if fields.items() <= e.items()]
            if len(found) >= nth:
                return found[nth - 1]
            if time.monotonic() > deadline:
                raise AssertionError(f"no event {name} {fields} in {seconds} s\n{self.all_that_is_known()}")
            time.sleep(0.02)

    def wait_for_step(self, step: int, seconds: float = BOUND) -> None:
        """Waits until that step is committed."""
        deadline = time.monotonic() + seconds
        while not any(line["step"] >= step for line in self.run.lines(self.run.metrics)):
            if time.monotonic() > deadline:
                raise AssertionError(f"step {step} not committed in {seconds} s\n{self.all_that_is_known()}")
            time.sleep(0.02)

    def outcome(self, seconds: float = BOUND, node: int = 0) -> Outcome:
        """Waits until that node's agent has ended. Returns the outcome of the job."""
        try:
            code = self.nodes[node].agent.wait(seconds)
        except TimeoutError as error:
            raise AssertionError(f"hung: {self.case}\n{self.all_that_is_known()}") from error
        return _outcome(self.case, code, time.monotonic() - self._begun, self)

    def all_that_is_known(self) -> str:
        tail = "\n".join(map(str, self.events()[-25:]))
        return f"{self.output}\n{tail}\n{_logs(self.run)}"

    def __exit__(self, *exception: object) -> None:
        self.network.__exit__()
        for node in self.nodes:
            node.agent.close()


def start(
    case: Case,
    folder: Path,
    zygote: Zygote | None = None,
    coordinator: str = "embedded",
    far: Mapping[int, float] | None = None,
    run: Path | None = None,
    environments: Mapping[int, dict[str, str]] | None = None,
) -> NodesJob:
    """Starts a job: forked from `zygote`, or by torchrun if `zygote` is None. An etcd gets its own machine.

    far           one-way delay of a node's packets, seconds, by node
    run           run folder; default: a new one in `folder`
    environments  additional environment variables, by node; only for jobs forked from a zygote
    """
    job = NodesJob(case, folder, zygote, coordinator, run, environments)
    try:
        job.start(coordinator, far or {})
    except BaseException:
        job.__exit__()
        raise
    return job
