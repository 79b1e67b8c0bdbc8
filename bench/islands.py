"""Speed of two islands that share a distant store, compared with the same two jobs without islands.

    python bench/islands.py [--steps 150] [--every 50] [--fragments 1] [SETTING ...]

The store is moto's S3 server in its own process. The islands reach it through a simulated link. Each byte arrives half
of `--delay` later, and each direction carries `--link` Gb/s over all connections together. The jobs train
`model=bench17m`, 17.3 M parameters, with one worker each. The server and the link run on the same cores as the jobs, so
their work counts as a loss of speed too; with a real store it would not.

The speed of a machine varies by more than the islands cost, so each job is compared with itself. Its speed is the mean
time of the steps that begin at least `NEAR` steps after the end of a round, divided by the mean time of all steps.
Steps before the first round do not count. The ratio of the jobs without islands should be 1, so it shows the error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.local_cluster import Zygote
from recycle_pp.testing.s3_server import S3Server

OUT = Path(__file__).parent / "out" / "islands"
COMMON = [
    "model=bench17m", "parallel=1x1", "parallel.microbatches=4", "run.validate_every=0", "schedule.profile_steps=0",
    "run.standby=off", "islands.parts=2",
]  # fmt: skip
NAMES = ("oregon", "frankfurt")
SECONDS = 3600.0  # time limit of a job
NEAR = 10  # steps after the end of a round that its transfers may slow down


class Link(contextlib.AbstractContextManager["Link"]):
    """Forwards TCP connections to a local port, with a delay and a limited speed, in a thread."""

    def __init__(self, port: int, delay: float, gigabits: float) -> None:
        """delay: seconds from one end to the other. gigabits: Gb/s in each direction."""
        self._to, self._delay, self._rate = port, delay, gigabits * 1e9 / 8
        self._free = {"up": 0.0, "down": 0.0}  # time from which a direction is free
        self.bytes = {"up": 0, "down": 0}
        self._loop = asyncio.new_event_loop()
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port: int = server.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", self._to)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(self._forward(reader, back, "up"), self._forward(onward, writer, "down"))

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
        while data := await reader.read(1 << 18):
            self.bytes[direction] += len(data)
            now = self._loop.time()
            sent = self._free[direction] = max(now, self._free[direction]) + len(data) / self._rate
            self._loop.call_at(sent + self._delay, writer.write, data)
            await asyncio.sleep(sent - now)
        self._loop.call_later(self._delay, writer.close)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=50, help="islands.steps")
    parser.add_argument("--fragments", type=int, default=1, help="islands.fragments")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds of a round trip")
    parser.add_argument("--link", type=float, default=1.0, help="Gb/s")
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    if given.every // given.fragments <= NEAR or given.steps <= given.every:
        parser.error(f"--every / --fragments must be above {NEAR}, and --steps above --every")
    shutil.rmtree(OUT, ignore_errors=True)
    with Zygote() as zygote, S3Server() as server, Link(server.port, given.delay / 2, given.link) as link:
        bucket = server.url("islands")
        for kind, store in (("plain", None), ("islands", f"{bucket}/run")):
            train(zygote, kind, store, server.environment(link.port), given)
            for name in NAMES:
                found = speed(RunFolder(OUT / f"{kind}-{name}"), given.every // given.fragments)
                print(f"{kind:<8}{name:<10}{found:.3f}")
    up, down = (link.bytes[direction] / 1e6 for direction in ("up", "down"))
    print(f"islands.steps={given.every} islands.fragments={given.fragments}: {up:.1f} MB up, {down:.1f} MB down")


def train(zygote: Zygote, kind: str, store: str | None, environment: dict[str, str], given: argparse.Namespace) -> None:
    """Runs two jobs side by side. Prints the rounds of each island."""
    with ExitStack() as stack:
        jobs = []
        for name in NAMES:
            words = [*COMMON, *given.overrides, f"run.steps={given.steps}", f"run.dir={OUT}/{kind}-{name}"]
            if store is not None:
                words += [f"islands.store={store}", f"islands.name={name}", f"islands.steps={given.every}"]
                words += [f"islands.fragments={given.fragments}"]
            jobs.append(stack.enter_context(zygote.run(words, environment)))
        for job in jobs:
            if code := job.wait(SECONDS):
                raise SystemExit(f"{kind}: exit code {code}\n{job.output[-3000:]}")
    for job in jobs if store is not None else ():
        rounds: list[dict[str, Any]] = [event for event in job.run.lines(job.run.events) if "lag_steps" in event]
        print(json.dumps([{key: of[key] for key in ("round", "islands", "lag_steps", "sent_bytes")} for of in rounds]))


def speed(run: RunFolder, every: int) -> float:
    """Mean time of a step far from the end of a round, divided by the mean time of all steps."""
    times: list[float] = [line["time"] for line in run.lines(run.metrics)]
    seconds = {step: times[step] - times[step - 1] for step in range(every, len(times))}
    far = [of for step, of in seconds.items() if step % every >= NEAR]
    return statistics.mean(far) / statistics.mean(seconds.values())


if __name__ == "__main__":
    main()
