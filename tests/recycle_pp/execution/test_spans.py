"""The duration of an op, and its own time."""

import os
import subprocess
import sys
import time

import pytest
import torch

from recycle_pp.execution.device import finisher
from recycle_pp.execution.spans import Spans


def test_a_span_lasts_until_the_device_has_finished():
    spans = Spans(finish=lambda: time.sleep(0.02))
    with spans.span(3, "F", (1, 0)):
        pass
    ((kind, pipeline, index, start, end, own),) = spans.take(3)
    assert (kind, pipeline, index) == ("F", 1, 0) and end - start >= own >= 0.02


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


def test_a_sleep_is_own_time():
    spans = Spans()
    with spans.span(0, "F"):
        time.sleep(0.05)
    assert spans.take(0)[0][5] >= 0.05


def test_a_slow_worker_stretches_the_work_of_the_device():
    spans = Spans(finish=lambda: time.sleep(0.02))
    with spans.span(0, "F"):
        assert spans.spent() >= 0.02


def test_a_gpu_has_finished_when_this_threads_stream_has(monkeypatch):
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
