"""Places marks in the work that a thread launches on a device, and measures when the device reaches them.

    marks = marks_of(device)
    begin = marks.place(); launch(); end = marks.place()
    end.reached()                    # whether all work launched before the mark is done; does not block
    end.wait()                       # blocks until all work launched before the mark is done
    end.time() - begin.time()        # seconds of the monotonic clock; only after `end` is reached

On a CPU a mark is reached as soon as it is placed. On a GPU marks are CUDA events, and are reached in the order in
which a thread placed them. `reached` and `wait` raise the errors of the work before the mark.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

ANCHOR_SECONDS = 60.0  # CUDA returns float32 milliseconds, with a resolution of 4 us one minute after the anchor


class Mark(Protocol):
    def reached(self) -> bool: ...
    def wait(self) -> None: ...
    def time(self) -> float: ...


class Marks(Protocol):
    on_host: bool  # whether the thread that places marks also does the work

    def place(self) -> Mark: ...


class HostMark:
    __slots__ = ("_time",)

    def __init__(self) -> None:
        self._time = time.monotonic()

    def reached(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def time(self) -> float:
        return self._time


class HostMarks:
    on_host = True

    def place(self) -> HostMark:
        return HostMark()


class GpuMark:
    """A mark on a GPU.

    anchor: a completed event of the GPU, and its time in seconds of the monotonic clock
    """

    def __init__(self, device: torch.device, anchor: tuple[torch.cuda.Event, float]) -> None:
        self._event, self._anchor = _event(device), anchor

    def reached(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()

    def time(self) -> float:
        event, at = self._anchor
        return at + event.elapsed_time(self._event) / 1e3


class GpuMarks:
    """Marks on the current stream of the thread that places them."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = self._now()

    def place(self) -> GpuMark:
        if time.monotonic() - self._anchor[1] > ANCHOR_SECONDS:
            self._anchor = self._now()
        return GpuMark(self._device, self._anchor)

    def _now(self) -> tuple[torch.cuda.Event, float]:
        event = _event(self._device)
        event.synchronize()
        return event, time.monotonic()


def marks_of(device: torch.device) -> Marks:
    return HostMarks() if device.type == "cpu" else GpuMarks(device)


def _event(device: torch.device) -> torch.cuda.Event:
    """Records an event after all work that this thread has launched."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
