"""Time until a worker's death is detected, by its lifeline and by its pidfd (the usual way).

    python bench/detection.py [--deaths 20] [--megabytes 300]

A process that has imported torch and holds some memory gets SIGKILL. The bench prints milliseconds from the kill.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import statistics
import threading
import time

import torch

from recycle_pp.supervisor.lifeline import Lifeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=20)
    parser.add_argument("--megabytes", type=int, default=300)
    arguments = parser.parse_args()
    rows = [die(arguments.megabytes) for _ in range(arguments.deaths)]
    for name, values in zip(("lifeline", "pidfd"), zip(*rows, strict=True), strict=True):
        print(f"{name:>10}  median {statistics.median(values):7.2f} ms   max {max(values):7.2f} ms")


def die(megabytes: int) -> tuple[float, float]:
    """Kills a process. Returns the milliseconds until its death is detected by the lifeline and by the pidfd."""
    line, (ready, is_ready) = Lifeline.create(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _hold = torch.ones(megabytes << 18)
        Lifeline(line.descriptor).hold()
        os.write(is_ready, b"!")
        signal.pause()
    os.read(ready, 1)
    seen: list[float] = []

    def wait() -> None:
        line.wait()
        seen.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    pidfd = os.pidfd_open(pid)
    time.sleep(0.05)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    select.select([pidfd], [], [])
    gone = time.monotonic()
    waiting.join()
    os.waitpid(pid, 0)
    for descriptor in (pidfd, ready, is_ready):
        os.close(descriptor)
    line.close()
    return 1e3 * (seen[0] - killed), 1e3 * (gone - killed)


if __name__ == "__main__":
    main()
