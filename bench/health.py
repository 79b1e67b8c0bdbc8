"""The cost of health samples for a supervisor: CPU seconds an hour, and memory.

    python bench/health.py                # the GPUs of this machine, if it has any, and the host
    python bench/health.py --scripted     # a scripted GPU: the cost without the driver's own part

A sample is timed by the CPU time of its thread. An hour has 360 samples and, with a real GPU, 3600 waits for an XID.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from recycle_pp.health.host import Host
from recycle_pp.health.nvml import scripted
from recycle_pp.health.watch import XID_SECONDS, Watch
from recycle_pp.linux.processes import process_size

EVERY = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripted", action="store_true", help="use the stand-in for NVIDIA's library")
    parser.add_argument("--looks", type=int, default=200, help="number of samples; the median is printed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.scripted:
            script = Path(folder, "script.json")
            script.write_text(json.dumps({"devices": 8, "metrics": f"{folder}/none", "timeline": []}))
            os.environ["RECYCLE_NVML"] = "recycle_pp.testing.scripted_nvml"
            os.environ["RECYCLE_NVML_SCRIPT"] = str(script)
        measure(Path(folder), arguments.looks)


def measure(folder: Path, looks: int) -> None:
    before = process_size(os.getpid())
    started = time.process_time()
    watch, host = Watch(0, EVERY, "auto", folder / "quarantine.json", print), Host()
    watch.open()
    watch.once(host)
    opened = time.process_time() - started
    times = []
    for _ in range(looks):
        began = time.thread_time()
        watch.once(host)
        times.append(time.thread_time() - began)
    look = sorted(times)[len(times) // 2]
    hour = 3600 / EVERY * look
    if watch.gpu is not None and not scripted():  # not with the stand-in, whose wait polls its script
        began = time.thread_time()
        watch.gpu.wait(XID_SECONDS)
        hour += 3600 / XID_SECONDS * (time.thread_time() - began)
    after = process_size(os.getpid())
    print(f"GPU: {'none' if watch.gpu is None else watch.gpu.name}")
    print(f"a sample: {1000 * look:.2f} ms of CPU")
    print(f"an hour: {hour:.2f} s of CPU for each rank; once, at the start: {opened:.2f} s")
    print(f"memory: {after.mib - before.mib:.1f} MiB for each rank")


if __name__ == "__main__":
    main()
