"""Plain DistributedDataParallel that continues when a worker is killed.

    python examples/ddp_survives.py                          # 4 workers, 40 steps, no death
    python examples/ddp_survives.py --kill 2@10              # rank 2 gets SIGKILL in step 10

The program does not use the trainer. It uses only the backend "recycle", a process group that can be aborted and
rebuilt without its dead member. Any program needs three more parts, which are in this file:

1. The launcher below detects the death and announces the survivors, through a store that it hosts itself. torchrun does
   not work here: it ends all workers when one dies.
2. A thread of every worker receives the announcement and aborts the group. So a worker that waits for the dead one gets
   an exception.
3. The training loop catches the exception, rebuilds the group, and copies the state of the worker with the most steps.
   A death in the middle of a step may leave some workers one step ahead.

The global batch of a step depends only on the step's number, and is divided by rank. So the losses equal those of a
run without deaths, up to float rounding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import recycle_pp.comm.torch_backend.process_group  # noqa: F401  (registers the backend "recycle")

WORKERS, STEPS, SAMPLES = 4, 40, 24  # SAMPLES: in a global batch; 2, 3 and 4 workers share it evenly
PATIENCE = timedelta(seconds=600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", metavar="RANK@STEP", help="SIGKILL for this rank in the middle of this step")
    kill = parser.parse_args().kill
    victim = tuple(map(int, kill.split("@"))) if kill else None
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")  # imports torch once
    context.set_forkserver_preload(["torch.nn.parallel", "recycle_pp.comm.torch_backend.process_group"])
    alive = {rank: context.Process(target=worker, args=(rank, store.port, victim)) for rank in range(WORKERS)}
    for process in alive.values():
        process.start()
    generation = 0
    while alive:  # part 1: detect deaths
        multiprocessing.connection.wait([process.sentinel for process in alive.values()])
        ended = [rank for rank, process in alive.items() if not process.is_alive()]
        codes = [alive.pop(rank).exitcode for rank in ended]
        if any(codes) and alive:
            generation += 1
            print(f"rank {ended} died; {sorted(alive)} continue", flush=True)
            store.set(f"members/{generation}", ",".join(map(str, sorted(alive))))


def worker(name: int, port: int, victim: tuple[int, int] | None) -> None:
    """`name` is the rank that the worker starts with; it changes with the members."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
    dist.init_process_group("recycle", store=dist.PrefixStore("group", store), rank=name, world_size=WORKERS)
    announced: dict[int, list[int]] = {}
    changed = threading.Condition()

    def listen() -> None:  # part 2, on its own connection, because it blocks
        news = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=PATIENCE)
        for generation in range(1, WORKERS):
            members = [int(rank) for rank in news.get(f"members/{generation}").decode().split(",")]
            dist.group.WORLD.abort()
            with changed:
                announced[generation] = members
                changed.notify_all()

    threading.Thread(target=listen, daemon=True).start()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = generation = 0
    replica = DistributedDataParallel(model)
    while step < STEPS:
        try:
            loss = one_step(replica, optimizer, step, lambda: die(victim == (name, step)))  # noqa: B023
        except RuntimeError:  # part 3: a connection broke, or the group was aborted
            while True:
                with changed:
                    changed.wait_for(lambda: max(announced, default=0) > generation)  # noqa: B023
                    generation = max(announced)
                    members = announced[generation]
                try:
                    dist.group.WORLD.rebuild(generation, members.index(name), len(members))
                    step = adopt_the_furthest(model, optimizer, step)
                    replica = DistributedDataParallel(model)
                    break
                except RuntimeError:  # another death during the rebuild
                    continue
        else:
            step += 1
            if dist.get_rank() == 0:
                print(f"step {step} loss {loss:.6f} workers {dist.get_world_size()}", flush=True)
    os._exit(0)  # no destructor of a group may wait for a peer that has ended


def one_step(replica, optimizer, step: int, in_the_midst) -> float:
    """The mean loss over the global batch of `step`; the parameters are stepped when it returns."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 16, generator=generator)
    targets = inputs.sin().sum(1, keepdim=True)
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(replica(inputs[rank::size]), targets[rank::size])
    in_the_midst()
    loss.backward()  # DDP sums the gradients here
    mean = loss.detach() / size
    dist.all_reduce(mean)
    optimizer.step()
    return mean.item()


def adopt_the_furthest(model, optimizer, step: int) -> int:
    """Load the state of the member with the most steps; returns its number of steps."""
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    state = [model.state_dict(), optimizer.state_dict()]
    dist.broadcast_object_list(state, src=steps.index(max(steps)))
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return max(steps)


def die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
