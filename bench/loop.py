"""Longest time that the coordinator's event loop is blocked, with a large checkpoint and a long history on disk.

    python bench/loop.py                          # 16x8x64: 128 workers; 10 GB, 100,000 steps
    python bench/loop.py --size 3x4x6 --gigabytes 1 --history 1000

The coordinator is real and runs in a real server. Its supervisors and workers are simulated in another process, which
sends real messages but computes nothing.

1. The workers start and run some steps. One worker dies and returns.
2. All workers of a stage die. The newest checkpoint is read completely while the coordinator serves the others.
3. The coordinator is lost, and another one takes over with the whole folder.

`still` is the time of the loop's longest callback, without the time in which the loop's thread was ready to run but
other threads had the processors (schedstat). `wall` includes this time. `cpu` is the part spent computing. The rest of
`still` is either a bug or a wait for the interpreter's lock. The five longest callbacks are listed. The results are
also in bench/out/loop.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from impostors import HOST, TOKEN, impersonate
from recycle_schedules.compiled import load
from results import save

from recycle_pp.config.settings import Emulate, Parallel, Run, Settings
from recycle_pp.coordinator.checkpoints import NOTHING
from recycle_pp.coordinator.coordinator import Coordinator
from recycle_pp.coordinator.host import SWITCH_SECONDS
from recycle_pp.state.checksum import fingerprint
from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.progress import Progress
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.connection import Peer, serve
from recycle_pp.wire.messages.agreement import Leader, Place, Takeover

PHASES = ("start", "steps", "death", "restore", "take-over")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="16x8x64", metavar="DxPxM", help="pipelines, stages, micro-batches")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="checkpoint's size (a sparse file, read in full)")
    parser.add_argument("--history", type=int, default=100_000, help="steps already in metrics.jsonl")
    arguments = parser.parse_args()
    load()
    pipelines, stages, microbatches = map(int, arguments.size.split("x"))
    settings = Settings(
        parallel=Parallel(pipelines=pipelines, stages=stages, microbatches=microbatches),
        run=Run(steps=arguments.history + 100_000, respawns=100),
        emulate=Emulate(mode="sleep", F=0.01, I=0.01, W=0.01, O=0.01),
    )
    with tempfile.TemporaryDirectory(prefix="recycle-bench-") as folder:
        run = RunFolder(folder)
        run.make()
        prepare(run, arguments.history, arguments.gigabytes)
        still = asyncio.run(measure(settings, run, arguments.history))
    print(f"{arguments.size}: {pipelines * stages} workers, {arguments.gigabytes:g} GB, {arguments.history} steps")
    print(f"{'':>10}{'still':>9}{'cpu':>9}{'wall':>9}   ms; the longest callbacks")
    for phase in PHASES:
        longest = still[phase]
        figures = "".join(f"{1e3 * max(column):9.1f}" for column in list(zip(*longest, strict=True))[:3])
        print(f"{phase:>10}{figures}   {', '.join(f'{1e3 * each[0]:.0f} {each[3]}' for each in longest)}")
    save("loop.json", {"arguments": vars(arguments), "still": still})
    return 0


def prepare(run: RunFolder, steps: int, gigabytes: float) -> None:
    """Fills the run folder with `steps` steps and a checkpoint after the last one."""
    line = {"time": time.time(), "generation": 0, "loss": 2.0, "grad_norm": 1.0, "cpu_seconds": 0.5, "live_workers": 1}
    with run.metrics.open("w") as file:
        file.writelines(json.dumps({"step": step, **line}) + "\n" for step in range(steps))
    event = {"time": time.time(), "step": 0, "generation": 0, "worker": None}
    with run.events.open("w") as file:
        file.write(json.dumps({**event, "event": "started"}) + "\n")
        file.writelines(
            json.dumps({**event, "event": "resumed", "stall_seconds": 0.1, "lost_ops": 3}) + "\n"
            for _ in range(steps // 10)
        )
    checkpoint = run.checkpoints / f"step-{steps:06d}"
    checkpoint.mkdir()
    part = checkpoint / "weights.distcp"
    with part.open("wb") as file:
        file.truncate(int(gigabytes * 1e9))
    (checkpoint / ".metadata").touch()
    files = {name: fingerprint(checkpoint / name) for name in (part.name, ".metadata")}
    (checkpoint / "about.json").write_text(json.dumps({"step": steps, "files": files}))


# ----------------------------------------------------------------------------------------------- the coordinator


class Alone:
    """A fake agreement, for a single supervisor."""

    def __init__(self) -> None:
        self.places: Mapping[int, Place] = {}

    async def agree(self, generation: int, supervisors: Mapping[int, Place]) -> int:
        self.places = dict(supervisors)
        return 0

    async def confirm(self, held: bool) -> int:
        return 0

    async def generation(self) -> int:
        return 0

    async def supervisors(self) -> Mapping[int, Place]:
        return self.places


Still = tuple[float, float, float, str]  # seconds: `still`, `cpu` and `wall` of a callback; its name


class Stopwatch:
    """Measures every callback of the loop."""

    def __init__(self) -> None:
        self.longest: dict[str, list[Still]] = {phase: [] for phase in PHASES}
        self.phase = PHASES[0]
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        handles: Any = asyncio.events.Handle
        original = handles._run

        def timed(handle: asyncio.Handle) -> None:
            begun, cpu, delayed = time.perf_counter(), time.thread_time(), self._delayed()
            original(handle)
            wall = time.perf_counter() - begun
            self._add(wall - (self._delayed() - delayed), time.thread_time() - cpu, wall, handle)

        handles._run = timed

    def _delayed(self) -> float:
        """Seconds for which this thread has waited for a processor so far."""
        return int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def _add(self, seconds: float, cpu: float, wall: float, handle: Any) -> None:
        longest = self.longest[self.phase]
        if len(longest) < 5 or seconds > longest[-1][0]:
            callback: Any = handle._callback
            task = getattr(callback, "__self__", None)
            runs = task.get_coro() if isinstance(task, asyncio.Task) else callback
            name = getattr(runs, "__qualname__", repr(runs))
            longest.append((seconds, cpu, wall, name))
            longest.sort(reverse=True)
            del longest[5:]


async def measure(settings: Settings, run: RunFolder, history: int) -> dict[str, list[Still]]:
    sys.setswitchinterval(SWITCH_SECONDS)  # as a host of the coordinator does
    gc.freeze()  # a host calls this too, now and when the planner is compiled
    watch, progress = Stopwatch(), Progress(settings.run.steps, 1, io.StringIO())
    agreement: Any = Alone()
    current: Coordinator | None = None
    world = settings.parallel.pipelines * settings.parallel.stages
    peers: set[Peer] = set()

    async def handle(peer: Peer) -> None:
        peers.add(peer)
        if current is not None:
            await current.handle(peer)

    server = await serve(handle, HOST, 0, TOKEN)
    port = server.sockets[0].getsockname()[1]
    leader = Leader(0, 0, HOST, port)
    events = EventLog(run.events, settings.run.steps, progress.say, run.later)
    current = Coordinator(settings, run, events, progress, agreement, leader, NOTHING)
    running = asyncio.create_task(current.run())
    spawner = multiprocessing.get_context("spawn")
    ours, theirs = spawner.Pipe()
    impostors = spawner.Process(target=impersonate, args=(settings, port, theirs), daemon=True)
    impostors.start()

    async def until(true: Any, what: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline or running.done():
                raise SystemExit(f"no {what} in {seconds} s: {progress._stream.getvalue()[-3000:]}")  # type: ignore[union-attr]
            await asyncio.sleep(0.02)

    async def steps(count: int) -> None:
        assert current is not None
        before = current.state.job.committed
        await until(lambda: current.state.job.committed >= before + count, f"{count} steps")

    await until(lambda: current.state.job.started, "start")
    await steps(5)
    gc.freeze()
    watch.phase = "steps"
    await steps(20)
    watch.phase = "death"
    ours.send([settings.parallel.stages + 1])
    await until(lambda: len(current.state.job.live) == world - 1, "death")
    await until(lambda: len(current.state.job.live) == world, "return")
    await steps(5)
    watch.phase = "restore"
    stages = settings.parallel.stages
    ours.send([d * stages for d in range(settings.parallel.pipelines)])
    await until(lambda: current.state.job.first_step == history, "restored job")
    await until(lambda: current.state.job.committed > history + 3, "steps after it")
    watch.phase = "take-over"
    current.stand_down()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    takeover = Takeover(0, 0, time.monotonic(), time.monotonic())
    events = EventLog(run.events, settings.run.steps, progress.say, run.later)
    current = Coordinator(
        settings, run, events, progress, agreement, Leader(1, 0, HOST, port),
        NOTHING, takeover=takeover, token=TOKEN,
    )  # fmt: skip
    running = asyncio.create_task(current.run())
    for peer in list(peers):
        peer.abort()
    await until(lambda: current.state.job.committed > history + 3, "take-over")
    await steps(20)
    impostors.kill()
    running.cancel()
    server.close()
    return watch.longest


if __name__ == "__main__":
    sys.exit(main())
