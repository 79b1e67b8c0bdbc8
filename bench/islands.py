"""Speed of two islands that meet in a store far away, beside the same two jobs without islands.

    python -m bench.islands [--steps 150] [--every 50] [--fragments 1] [--rounds 1] [SETTING ...]

The store is moto's S3 server in its own process. Between it and the islands is a link: each byte arrives half of
`--delay` later, in both directions, and each direction carries `--link` Gb/s for all connections together. The jobs
train `model=bench17m`, 17.3 M parameters, with one worker each. The server and the link run on the same cores as the
jobs, so their work counts as a loss of speed too; with a real store it would not.

Both kinds of jobs run in turn, `--rounds` times. The time of a job is that from its first commit after `--every` steps
to its last, so that every interval between two rounds has its round. The bound is 1.
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
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.testing.local_cluster import Zygote
from tests.s3_server import S3Server

OUT = Path(__file__).parent / "out" / "islands"
COMMON = [
    "model=bench17m", "parallel=1x1", "parallel.microbatches=4", "run.validate_every=0", "schedule.profile_steps=0",
    "run.standby=off", "islands.parts=2",
]  # fmt: skip
NAMES = ("oregon", "frankfurt")
SECONDS = 3600.0


class Link(contextlib.AbstractContextManager["Link"]):
    """Forwards TCP connections to a local port, with a delay and a limited speed, in a thread."""

    def __init__(self, port: int, delay: float, gigabits: float) -> None:
        """delay: seconds from one end to the other. gigabits: per second and direction"""
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
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    seconds: dict[str, list[float]] = {"plain": [], "islands": []}
    with Zygote() as zygote, S3Server() as server, Link(server.port, given.delay / 2, given.link) as link:
        bucket = server.url("islands")
        environment = server.environment(link.port)
        for number in range(given.rounds):
            for kind, found in seconds.items():
                store = f"{bucket}/{number}" if kind == "islands" else None
                found += train(zygote, f"{kind}{number}", store, environment, given)
        up, down = (link.bytes[direction] / 1e6 for direction in ("up", "down"))
    ratio = statistics.median(seconds["plain"]) / statistics.median(seconds["islands"])
    for kind, found in seconds.items():
        print(f"{kind:<8} {given.steps - given.every} steps: " + ", ".join(f"{each:.1f} s" for each in sorted(found)))
    print(f"speed with islands, as a share of that without: {ratio:.3f}")
    print(f"islands.steps={given.every} islands.fragments={given.fragments}: {up:.1f} MB up, {down:.1f} MB down")


def train(
    zygote: Zygote, key: str, store: str | None, environment: dict[str, str], given: argparse.Namespace
) -> list[float]:
    """Runs two jobs side by side. Returns their seconds from step `every` to the end."""
    with ExitStack() as stack:
        jobs = []
        for name in NAMES:
            words = [*COMMON, *given.overrides, f"run.steps={given.steps}", f"run.dir={OUT}/{key}-{name}"]
            if store is not None:
                words += [f"islands.store={store}", f"islands.name={name}", f"islands.steps={given.every}"]
                words += [f"islands.fragments={given.fragments}"]
            jobs.append(stack.enter_context(zygote.run(words, environment)))
        for job in jobs:
            if code := job.wait(SECONDS):
                raise SystemExit(f"{key}: exit code {code}\n{job.output[-3000:]}")
    return [taken(RunFolder(OUT / f"{key}-{name}"), store is not None, given) for name in NAMES]


def taken(run: RunFolder, island: bool, given: argparse.Namespace) -> float:
    """Seconds of a job. Prints the rounds of an island."""
    if island:
        rounds: list[dict[str, Any]] = [event for event in run.lines(run.events) if event["event"] == "round_applied"]
        print(json.dumps([{key: of[key] for key in ("round", "islands", "lag_steps", "sent_bytes")} for of in rounds]))
    times = [line.time for line in RunReader(run).steps()]
    return times[-1] - times[given.every - 1]


if __name__ == "__main__":
    main()
