"""The stream on which a communicator runs its operations, separate from the compute stream."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


class GpuStream:
    """One of torch's 32 streams of the device. If there are more communicators, some share a stream."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.handle = int(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[object]:
        """Makes the device current in this thread. By default a new thread would create a context on GPU 0."""
        return torch.cuda.device(self._device)

    def follow(self) -> torch.cuda.Event:
        """Makes later work on this stream wait for all work that this thread has launched on its current stream.
        Returns an event that is reached when that work is done."""
        event = torch.cuda.current_stream(self._device).record_event()
        self._stream.wait_event(event)
        return event

    def mark(self) -> torch.cuda.Event:
        """An event that is reached when all work launched so far on this stream is done."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
