"""A worker of the peers that `bench/peers.py` measures: torch's own 1F1B, under torchft or with checkpoints.

Imports torch and torchft only, because it runs in an environment without recycle_pp. `peers.py` starts it in two ways:

    torchrun --no-python PYTHON -c "import peer_worker; peer_worker.under_torchrun()"     # a new interpreter per worker
    PYTHON -c "import peer_worker; peer_worker.forked()"                  # forks workers, after all imports

The environment variable PEER contains the settings as JSON (`Peer`). All workers append events to one file, a JSON
object per line: `spawned`, `ready` and `step`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

HOST_AHEAD = 0.001  # seconds of host work between two ops, as in recycle_pp's emulation
PATIENCE = timedelta(seconds=60)
GIVE_UP = 5  # number of failures within a second after which the supervisor gives up


@dataclass(frozen=True)
class Peer:
    """One job. groups: number of groups, each of which restarts as a whole. pipelines: number in each group."""

    groups: int
    pipelines: int
    stages: int
    microbatches: int
    boundary: list[int]  # shape of a boundary tensor
    floats: list[int]  # parameters, by stage
    seconds: dict[str, float]  # of F, I, W and O
    events: str
    lighthouse: str = ""  # address of torchft's lighthouse; "": checkpoints instead of torchft
    checkpoints: str = ""  # folder
    checkpoint_every: int = 0  # steps

    @property
    def size(self) -> int:
        return self.pipelines * self.stages


class Device:
    """A device with a queue, like recycle_pp's emulated one: the host's work between two ops costs no time."""

    def __init__(self) -> None:
        self._free, self.on = 0.0, False

    def run(self, seconds: float) -> None:
        if not self.on:
            return
        now = time.monotonic()
        begin = self._free if now - self._free < HOST_AHEAD else now
        self._free = begin + seconds
        time.sleep(max(0.0, self._free - now))


class Op(torch.autograd.Function):
    """One stage's forward and backward: sleeps, and makes tensors of the real size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, peer: Peer, device: Device) -> torch.Tensor:
        ctx.peer, ctx.device, ctx.need = peer, device, x.requires_grad
        device.run(peer.seconds["F"])
        return torch.empty(peer.boundary)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.device.run(ctx.peer.seconds["I"] + ctx.peer.seconds["W"])
        return (torch.empty(ctx.peer.boundary) if ctx.need else None), None, None, None


class Stage(torch.nn.Module):
    def __init__(self, peer: Peer, stage: int, device: Device) -> None:
        super().__init__()
        self.peer, self.device = peer, device
        self.weight = torch.nn.Parameter(torch.zeros(peer.floats[stage]))
        self.weight.grad = torch.zeros(peer.floats[stage])
        self.moments = [torch.zeros(peer.floats[stage]) for _ in range(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Op.apply(x, self.weight, self.peer, self.device)
        return result

    def state(self) -> dict[str, Any]:
        return {"weight": self.weight.detach(), "moments": self.moments}

    def load(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            self.weight.copy_(state["weight"])
            for mine, new in zip(self.moments, state["moments"], strict=True):
                mine.copy_(new)


class Pipeline:
    """This worker's part of a 1F1B pipeline. group: the ranks of the pipeline."""

    def __init__(self, peer: Peer, stage: int, group: dist.ProcessGroup | None) -> None:
        self.device = Device()
        self.stage = Stage(peer, stage, self.device)
        self._first, self._last = stage == 0, stage == peer.stages - 1
        x = torch.empty(peer.boundary)
        part = PipelineStage(
            self.stage, stage, peer.stages, torch.device("cpu"), group=group,
            input_args=(x if self._first else x.clone().requires_grad_(),), output_args=(x.clone().requires_grad_(),),
        )  # fmt: skip
        self._schedule = Schedule1F1B(
            part, peer.microbatches, loss_fn=lambda output, target: output.mean(), scale_grads=False
        )
        samples = peer.boundary[0] * peer.microbatches
        self._batch, self._target = torch.zeros(samples, *peer.boundary[1:]), torch.zeros(samples, 1)
        self.step()  # creates the connections
        self.device.on = True

    def step(self) -> None:
        if self._first:
            self._schedule.step(self._batch)
        elif self._last:
            self._schedule.step(target=self._target, losses=[], return_outputs=False)
        else:
            self._schedule.step()


def log(peer: Peer, event: str, **fields: Any) -> None:
    line = json.dumps({"time": time.time(), "event": event, **fields}) + "\n"
    with open(peer.events, "ab", buffering=0) as file:
        file.write(line.encode())


def work(peer: Peer, group: int, rank: int, port: int, incarnation: int) -> None:
    """Trains until this process is killed. port: port of the store that rank 0 of this incarnation serves."""
    torch.set_num_threads(1)
    log(peer, "spawned", worker=name(peer, group, rank), pid=os.getpid(), incarnation=incarnation)
    store = dist.TCPStore("127.0.0.1", port, peer.size, rank == 0, wait_for_workers=False, timeout=PATIENCE)
    joined = dist.PrefixStore("pipelines", store)
    dist.init_process_group("gloo", store=joined, rank=rank, world_size=peer.size, timeout=PATIENCE)
    train = with_torchft if peer.lighthouse else with_checkpoints
    train(peer, group, rank, port, incarnation)


def name(peer: Peer, group: int, rank: int) -> str:
    """The worker's name, pipeline.stage."""
    pipeline, stage = divmod(rank, peer.stages)
    return f"{group * peer.pipelines + pipeline}.{stage}"


def with_torchft(peer: Peer, group: int, rank: int, port: int, incarnation: int) -> None:
    """A replica group is one pipeline. torchft sums its gradients with those of the other groups."""
    from torchft import Manager, ProcessGroupGloo

    pipeline = Pipeline(peer, rank, None)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=1)), min_replica_size=1, replica_id=f"g{group}",
        load_state_dict=pipeline.stage.load, state_dict=pipeline.stage.state, init_sync=False,
        store_addr="127.0.0.1", store_port=port, rank=rank, world_size=peer.size, hostname="127.0.0.1",
        lighthouse_addr=peer.lighthouse, heartbeat_interval=timedelta(milliseconds=50),
        timeout=timedelta(seconds=5), quorum_timeout=PATIENCE, connect_timeout=timedelta(seconds=10),
    )  # fmt: skip
    if rank == 0:
        log(peer, "ready", group=group, incarnation=incarnation)
    while True:
        manager.start_quorum()
        pipeline.step()
        assert pipeline.stage.weight.grad is not None
        manager.allreduce(pipeline.stage.weight.grad).wait()
        step, committed = manager.current_step(), manager.should_commit()
        if rank == 0:
            log(
                peer, "step", group=group, incarnation=incarnation, step=step, committed=committed,
                pipelines=manager.num_participants(), participating=manager.is_participating(),
            )  # fmt: skip
        if committed:
            pipeline.device.run(peer.seconds["O"])


def with_checkpoints(peer: Peer, group: int, rank: int, port: int, incarnation: int) -> None:
    """Plain data and pipeline parallel training. All workers load the newest checkpoint when they start."""
    mine, stage = divmod(rank, peer.stages)
    lines = [dist.new_group([d * peer.stages + s for s in range(peer.stages)]) for d in range(peer.pipelines)]
    peers = [dist.new_group([d * peer.stages + s for d in range(peer.pipelines)]) for s in range(peer.stages)]
    pipeline, folder = Pipeline(peer, stage, lines[mine]), Path(peer.checkpoints)
    newest, step = folder / "newest", 0
    if newest.exists():
        step = int(newest.read_text())
        pipeline.stage.load(torch.load(folder / f"{step}.{rank}"))
    dist.barrier()
    if rank == 0:
        log(peer, "ready", group=group, incarnation=incarnation)
    while True:
        pipeline.step()
        assert pipeline.stage.weight.grad is not None
        dist.all_reduce(pipeline.stage.weight.grad, group=peers[stage])
        if rank == 0:
            log(
                peer, "step", group=group, incarnation=incarnation, step=step, committed=True,
                pipelines=peer.pipelines, participating=True,
            )  # fmt: skip
        pipeline.device.run(peer.seconds["O"])
        step += 1
        if step % peer.checkpoint_every == 0:
            torch.save(pipeline.stage.state(), folder / f"{step}.{rank}")
            dist.barrier()
            if rank == 0:
                (folder / "new").write_text(str(step))
                (folder / "new").replace(newest)
                log(peer, "checkpoint", step=step)


# ------------------------------------------------------------------------------------------------------------ start


def _prepare() -> Peer:
    socket.gethostname = lambda: "127.0.0.1"  # torchft looks up the host name, and a slow name server must not count
    return Peer(**json.loads(os.environ["PEER"]))


def under_torchrun() -> None:
    """A worker of torchrun. The agent's store outlives a restart, so each incarnation has its own store."""
    peer, rank = _prepare(), int(os.environ["RANK"])
    incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    agent = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    if rank == 0:
        agent.set(f"port{incarnation}", str(free_port()))
    work(peer, int(os.environ.get("PEER_GROUP", "0")), rank, int(agent.get(f"port{incarnation}")), incarnation)


def forked() -> None:
    """Supervises all groups: if a worker dies, kills its group and forks it again at once."""
    peer = _prepare()
    if peer.lighthouse:
        import torchft  # noqa: F401
    gc.collect()
    gc.freeze()
    Supervisor(peer).run()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Supervisor:
    def __init__(self, peer: Peer) -> None:
        self._peer, self._poll = peer, select.poll()
        self._alive: dict[int, tuple[int, int]] = {}  # pidfd -> (group, pid)
        self._incarnations = [0] * peer.groups
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def run(self) -> None:
        try:
            for group in range(self._peer.groups):
                self._start(group)
            recent: list[float] = []
            while True:
                group = self._alive[self._poll.poll()[0][0]][0]
                self._end(group)
                recent = [*recent, time.monotonic()][-GIVE_UP:]
                if len(recent) == GIVE_UP and recent[-1] - recent[0] < 1.0:
                    raise SystemExit("the workers fail as soon as they start")
                self._start(group)
        finally:
            for group in range(self._peer.groups):
                self._end(group)

    def _start(self, group: int) -> None:
        port = free_port()
        for rank in range(self._peer.size):
            pid = os.fork()
            if pid == 0:
                self._child(group, rank, port)
            pidfd = os.pidfd_open(pid)
            self._alive[pidfd] = group, pid
            self._poll.register(pidfd, select.POLLIN)
        self._incarnations[group] += 1

    def _child(self, group: int, rank: int, port: int) -> None:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with the supervisor
            for pidfd in self._alive:
                os.close(pidfd)
            work(self._peer, group, rank, port, self._incarnations[group])
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def _end(self, group: int) -> None:
        mine = [(pidfd, pid) for pidfd, (its, pid) in self._alive.items() if its == group]
        for pidfd, _ in mine:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd, pid in mine:
            os.waitpid(pid, 0)
            self._poll.unregister(pidfd)
            os.close(pidfd)
            del self._alive[pidfd]
