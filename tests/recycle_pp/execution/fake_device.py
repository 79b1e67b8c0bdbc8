"""A device with a queue: it works only while a thread waits for it, or when the test lets it run."""

from __future__ import annotations


class FakeDevice:
    """A fake device, and its marks for `Spans`. Each launched piece of work takes one second of the device's clock.

    waits: names of the ops that a thread has waited for, as passed to `on_wait`
    """

    on_host = False

    def __init__(self):
        self.waits = []
        self.now = 0.0
        self._queue = []
        self._failed = None

    def launch(self, work):
        self._queue.append(work)

    def place(self):
        mark = FakeMark(self)
        self._queue.append(mark)
        return mark

    def waited(self, kind, step, microbatch):
        self.waits.append(f"{kind}{microbatch[1]}")

    def run(self, ops=1):
        """Finishes the next `ops` pieces of work. After a failure, as in CUDA, every use raises its error."""
        while ops and self._queue and self._failed is None:
            work = self._queue.pop(0)
            if isinstance(work, FakeMark):
                work.at = self.now
                continue
            try:
                work()
            except RuntimeError as error:
                self._failed = error
            self.now += 1
            ops -= 1
        while self._failed is None and self._queue and isinstance(self._queue[0], FakeMark):
            self._queue.pop(0).at = self.now

    def check(self):
        if self._failed is not None:
            raise self._failed


class FakeMark:
    def __init__(self, device):
        self._device = device
        self.at = None

    def reached(self):
        self._device.check()
        return self.at is not None

    def wait(self):
        while self.at is None:
            self._device.run()
            self._device.check()

    def time(self):
        return self.at
