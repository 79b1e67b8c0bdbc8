"""Runs one device at full load, and checks its results. Run it as a process, which can be killed if a kernel hangs.

    python -m recycle_pp.machine_checks.exercise --seconds 60     # only for `python -m recycle_pp.health --active`

Uses the first visible GPU, or else one core. If CUDA cannot use a GPU that CUDA_VISIBLE_DEVICES names, ends with
CUDA's error, because the results of a core would look like those of the GPU. Prints a line of JSON for each exercise
(`health.active.Exercise`):

products  the product of two fixed matrices, again and again; no bit of it may change
copies    copies within the device's memory
links     copies from the host to the device and back; without a GPU, through a socket
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from torch import Tensor

from recycle_pp.health.nvml import scripted

FIFTH = 5  # the rates of the first and the last fifth of the tries are compared
WIDTH = {"cuda": 8192, "cpu": 512}
BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}
Try = Callable[[], bool]
"""Does one piece of work, and returns whether its result is right."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m recycle_pp.machine_checks.exercise", description=__doc__)
    parser.add_argument("--seconds", type=float, required=True, help="for each exercise")
    seconds = parser.parse_args(argv).seconds
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and os.environ.get("CUDA_VISIBLE_DEVICES") and not scripted():
        torch.cuda.init()  # raises CUDA's error
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(27)
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(WIDTH[device.type], WIDTH[device.type], generator=generator) for _ in range(2))
        a, b = left.to(device, dtype), right.to(device, dtype)
        product = a @ b
        digest = hashlib.sha256(product.float().cpu().numpy().tobytes()).hexdigest()
        work = 2.0 * WIDTH[device.type] ** 3
        name = f"products of {str(dtype).removeprefix('torch.')}"
        _report(name, "FLOP/s", work, partial(_repeats, a, b, product), seconds / 2, device, digest)
    data = torch.randint(0, 255, (BYTES[device.type],), dtype=torch.uint8, generator=generator)
    there, back = data.to(device), torch.empty_like(data, device=device)
    _report("copies", "B/s", data.numel(), lambda: torch.equal(back.copy_(there), there), seconds, device)
    with _link(data, device) as attempt:
        _report("links", "B/s", data.numel(), attempt, seconds, device)
    return 0


def _repeats(a: Tensor, b: Tensor, product: Tensor) -> bool:
    return torch.equal(a @ b, product)


def _report(
    name: str, unit: str, work: float, attempt: Try, seconds: float, device: torch.device, digest: str = ""
) -> None:
    """Repeats `attempt` for `seconds`, at least FIFTH times, and prints the results.

    work: operations or bytes of one attempt
    """
    rates: list[float] = []
    wrong = 0
    # On the processor, count only the time of this process, because other programs may be running too.
    now = time.perf_counter if device.type == "cuda" else time.process_time
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(rates) < FIFTH:
        begun = now()
        wrong += not attempt()  # waits for the device, because it compares the result
        rates.append(work / (now() - begun))
    part = len(rates) // FIFTH
    first, last = median(rates[:part]), median(rates[-part:])
    found = {"name": name, "unit": unit, "rate": median(rates), "first": first, "last": last}
    print(json.dumps(found | {"tries": len(rates), "wrong": wrong, "digest": digest}), flush=True)


@contextmanager
def _link(data: Tensor, device: torch.device) -> Iterator[Try]:
    if device.type == "cuda":
        there, back = torch.empty_like(data, device=device), torch.empty_like(data).pin_memory()
        data = data.pin_memory()
        yield lambda: torch.equal(back.copy_(there.copy_(data)), data)
        return
    sent, received = data.numpy(), torch.empty_like(data)
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def attempt() -> bool:
            thread = threading.Thread(target=ours.sendall, args=(memoryview(sent.data),), daemon=True)
            thread.start()
            left = memoryview(received.numpy().data)
            while left:
                left = left[theirs.recv_into(left) :]
            thread.join()
            return torch.equal(received, data)

        yield attempt


if __name__ == "__main__":
    sys.exit(main())
