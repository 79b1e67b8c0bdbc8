"""The duration of an op, and its own time (without waits for a core)."""

import os
import subprocess
import sys
import time

import pytest
import torch

from recycle_pp.execution.device import finisher
from recycle_pp.execution.marks import marks_of
from recycle_pp.execution.spans import AHEAD, Spans

from .fake_device import FakeDevice


def test_a_span_lasts_until_the_device_has_finished():
    device = FakeDevice()
    spans = Spans(marks=device, on_wait=device.waited)
    with spans.span(3, "F", (1, 0)):
        device.launch(lambda: None)
    assert spans.take(3) == [("F", 1, 0, 0.0, 1.0, 1.0)] and device.waits == ["F0"]


def test_on_a_cpu_an_op_is_done_at_once_and_no_wait_is_recorded():
    waits, done = [], []
    spans = Spans(on_wait=lambda *op: waits.append(op))
    for number in range(2):
        with spans.launch(0, "F", (0, number), lambda number=number: done.append(number)):
            pass
        spans.observe(AHEAD)
    assert done == [0, 1] and waits == [] and len(spans.take(0)) == 2 and spans.left() == 0


def test_a_busy_core_lengthens_a_span_but_not_its_own_time():
    """Two busy processes share one core with this one, so it waits for about two thirds of the time."""
    cores = os.sched_getaffinity(0)
    spin = f"import os\nos.sched_setaffinity(0, {{{min(cores)}}})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        os.sched_setaffinity(0, {min(cores)})
        time.sleep(0.5)
        spans = Spans()
        with spans.span(0, "F"):
            begun = time.thread_time()
            while time.thread_time() - begun < 0.3:
                pass
    finally:
        os.sched_setaffinity(0, cores)
        for other in others:
            other.kill()
            other.wait()
    ((*_, start, end, own),) = spans.take(0)
    assert own == pytest.approx(0.3, rel=0.2) and end - start > 1.5 * own


def test_a_sleep_counts_as_own_time():
    spans = Spans()
    with spans.span(0, "F"):
        time.sleep(0.05)
    assert spans.take(0)[0][5] > 0.04  # the wait for a core after the sleep does not count


def test_the_time_that_a_slow_worker_stretches_includes_the_work_of_the_device():
    device = FakeDevice()
    spans = Spans(marks=device)
    with spans.span(0, "F"):
        device.launch(lambda: None)
        assert spans.spent() == 1


def test_a_gpu_counts_as_finished_when_the_stream_of_this_thread_has_finished(monkeypatch):
    asked = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def synchronize(self):
            asked.append(self.device)

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    finisher(torch.device("cuda", 1))()
    finisher(torch.device("cpu"))()
    assert asked == [torch.device("cuda", 1)]


def test_marks_of_a_gpu_are_events_in_this_threads_stream_converted_to_seconds_of_the_host(monkeypatch):
    clock = iter([0.0, 4500.0, 4502.5])  # milliseconds of the GPU: the anchor and two marks

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "stream of cuda:1"
            self.at = next(clock)

        def query(self):
            return False

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    before = time.monotonic()
    marks = marks_of(torch.device("cuda", 1))
    begin, end = marks.place(), marks.place()
    assert not end.reached() and end.time() - begin.time() == pytest.approx(0.0025)
    assert begin.time() == pytest.approx(before + 4.5, abs=1) and not marks.on_host
