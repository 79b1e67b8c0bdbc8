"""The jobs that `bench/peers.py` measures, all with the same interface: the live processes and the committed steps.

with JOBS["torchft"](setup, folder) as job:
    job.update()
    job.commits, job.pids, job.victims(), job.over
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peer_worker import Peer, free_port

from recycle_pp.chaos import Live
from recycle_pp.config.compose import compose
from recycle_pp.model.split import layers_of
from recycle_pp.model.transformer import Build, Transformer, depth
from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.wire.terms import EARLIER

BENCH = Path(__file__).parent
PIPELINES, STAGES, MICROBATCHES = 3, 4, 6
WORKERS = [f"{d}.{s}" for d in range(PIPELINES) for s in range(STAGES)]


class Commit(NamedTuple):
    """A committed step. samples: number of samples in its gradient. full: whether all workers took part."""

    time: float
    step: int
    samples: int
    full: bool


@dataclasses.dataclass(frozen=True)
class Setup:
    """The settings of a measurement.

    slot        seconds of F, I and W; O takes three slots
    python      interpreter of torchft's environment
    checkpoint  seconds between two checkpoints"""

    slot: float
    checkpoint: float
    python: Path

    @property
    def seconds(self) -> dict[str, float]:
        return dict.fromkeys("FIW", self.slot) | {"O": 3 * self.slot}

    @property
    def settings(self) -> list[str]:
        """The settings of recycle_pp."""
        emulated = [f"emulate.{kind}={seconds}" for kind, seconds in self.seconds.items()]
        return [
            f"parallel={PIPELINES}x{STAGES}", f"parallel.microbatches={MICROBATCHES}", "model=small", "emulate=sleep",
            *emulated, "run.steps=1000000", "run.validate_every=0", "run.respawns=1000000",
        ]  # fmt: skip

    def peer(self, **more: Any) -> Peer:
        """The same job for the peers, with tensors of the same size."""
        settings = compose(self.settings)
        shape, parallel, build = settings.model, settings.parallel, Build(settings.model, 0, torch.device("cpu"))
        stages = layers_of(depth(shape), STAGES, shape.layout)
        floats = [sum(p.numel() for p in Transformer(build, layers).parameters()) for layers in stages]
        step = (MICROBATCHES + STAGES - 1) * sum(self.seconds[kind] for kind in "FIW") + self.seconds["O"]
        return Peer(
            stages=STAGES, microbatches=MICROBATCHES, boundary=[parallel.microbatch_size, shape.sequence, shape.width],
            floats=floats, seconds=self.seconds, checkpoint_every=max(1, round(self.checkpoint / step)), **more,
        )  # fmt: skip


class Job(ABC):
    """A job. pids: all live processes that a fault may hit, including those that are still starting."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        self._samples = PIPELINES * MICROBATCHES * compose(setup.settings).parallel.microbatch_size  # in a step
        self.commits: list[Commit] = []
        self.pids: dict[str, int] = {}
        self._processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def update(self) -> None:
        """Reads what the job has written since the last call."""

    @abstractmethod
    def victims(self) -> list[str]:
        """Workers that may die, because another worker then still has the newest state."""

    def killed(self, worker: str) -> None:
        self.pids.pop(worker, None)

    @property
    def over(self) -> bool:
        return any(process.poll() is not None for process in self._processes)

    def _launch(self, command: list[str | Path], **environment: str) -> None:
        log = (self.folder / "log").open("ab")
        common = {
            "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo", "RUST_LOG": "warn",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        env = {**os.environ, **common, **environment}
        with log:
            self._processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))

    def __enter__(self) -> Job:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Recycle(Job):
    """recycle_pp under torchrun. more: further settings."""

    def __init__(self, setup: Setup, folder: Path, more: tuple[str, ...] = ()) -> None:
        super().__init__(setup, folder)
        self._more, run = more, RunFolder(folder / "run")
        self._live, self._steps = Live(run), RunReader(run).follow().steps

    def start(self) -> None:
        command: list[str | Path] = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={len(WORKERS)}",
            f"--master-port={free_port()}", "-m", "recycle_pp.train",
        ]  # fmt: skip
        self._launch([*command, *self.setup.settings, f"run.dir={self.folder / 'run'}", *self._more])

    def update(self) -> None:
        self._live.update()
        self.pids = self._live.pids
        for line in self._steps.new():
            if line.time is not None and (not self.commits or line.step > self.commits[-1].step):
                self.commits.append(Commit(line.time, line.step, self._samples, line.live_workers == len(WORKERS)))

    def victims(self) -> list[str]:
        return self._live.victims(cruel=False)

    def killed(self, worker: str) -> None:
        self._live.remove(worker)


class PeerJob(Job):
    """torch's 1F1B.

    torchft  a group per pipeline with torchft, otherwise one group with checkpoints
    warm     whether the workers are forked after all imports"""

    def __init__(self, setup: Setup, folder: Path, torchft: bool, warm: bool) -> None:
        super().__init__(setup, folder)
        self._torchft, self._warm = torchft, warm
        self._groups = PIPELINES if torchft else 1
        self._events = folder / "events.jsonl"
        self._events.touch()
        self._lines = Follower(self._events, 0, lambda line: (json.loads(line), EARLIER))
        self._incarnations: dict[int, int] = {}  # group -> number
        self._members: set[int] = set()  # groups with the newest state

    def start(self) -> None:
        python = self.setup.python if self._torchft else Path(sys.executable)
        more: dict[str, Any] = {"groups": self._groups, "pipelines": PIPELINES // self._groups}
        if self._torchft:
            port = free_port()
            more["lighthouse"] = f"http://127.0.0.1:{port}"
            self._launch([
                python.with_name("torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", "--min_replicas", "1",
                *("--quorum_tick_ms", "20", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "500"),
            ])  # fmt: skip
            time.sleep(0.5)
        else:
            more["checkpoints"] = str(self.folder)
        peer = self.setup.peer(events=str(self._events), **more)
        environment = {"PEER": json.dumps(dataclasses.asdict(peer)), "PYTHONPATH": str(BENCH)}
        if self._warm:
            self._launch([python, "-c", "import peer_worker; peer_worker.forked()"], **environment)
            return
        for group in range(self._groups):
            self._launch(
                [
                    python, "-m", "torch.distributed.run", f"--nproc-per-node={peer.size}", "--max-restarts=1000000",
                    "--monitor-interval=0.1", f"--master-port={free_port()}", "--no-python",
                    python, "-c", "import peer_worker; peer_worker.under_torchrun()",
                ],
                PEER_GROUP=str(group), **environment,
            )  # fmt: skip

    def update(self) -> None:
        for line in self._lines.new():
            if line["event"] == "spawned":
                group = self._group(line["worker"])
                self.pids[line["worker"]] = line["pid"]
                if self._incarnations.get(group) != line["incarnation"]:
                    self._incarnations[group] = line["incarnation"]
                    self._members.discard(group)
            elif line["event"] == "step" and line["committed"]:
                last = self.commits[-1].step if self.commits else -1
                current = line["incarnation"] == self._incarnations.get(line["group"])
                if line["participating"] and current and line["step"] >= last:
                    self._members.add(line["group"])
                if line["step"] > last:
                    samples = self._samples * line["pipelines"] // PIPELINES
                    self.commits.append(Commit(line["time"], line["step"], samples, line["pipelines"] == PIPELINES))

    def victims(self) -> list[str]:
        if not self._torchft:
            return list(self.pids)
        return [worker for worker in self.pids if self._members - {self._group(worker)}]

    def killed(self, worker: str) -> None:
        group = self._group(worker)
        self._members.discard(group)
        self.pids = {other: pid for other, pid in self.pids.items() if self._group(other) != group}

    def _group(self, worker: str) -> int:
        return int(worker.partition(".")[0]) if self._torchft else 0


JOBS: Mapping[str, Callable[[Setup, Path], Job]] = {
    "recycle_pp": Recycle,
    "recycle_pp-1f1b": partial(Recycle, more=("schedule=coupled",)),
    "torchft-warm": partial(PeerJob, torchft=True, warm=True),
    "torchft": partial(PeerJob, torchft=True, warm=False),
    "restart-warm": partial(PeerJob, torchft=False, warm=True),
    "restart": partial(PeerJob, torchft=False, warm=False),
}
"""The jobs by their names in the table. Without "warm", torchrun starts new interpreters."""
