"""How long an op took, and on whose clock."""

import time

import torch

from recycle_pp.execution.device import finisher
from recycle_pp.execution.spans import Spans


def test_a_span_lasts_until_the_device_is_done_not_until_the_host_has_asked():
    spans = Spans(finish=lambda: time.sleep(0.02))
    with spans.span(3, "F", (1, 0)):
        pass
    ((kind, pipeline, index, start, end),) = spans.take(3)
    assert (kind, pipeline, index) == ("F", 1, 0) and end - start >= 0.02


def test_what_a_slow_worker_stretches_is_the_work_of_the_device():
    spans = Spans(finish=lambda: time.sleep(0.02))
    with spans.span(0, "F"):
        assert spans.spent() >= 0.02


def test_a_gpu_has_finished_when_the_stream_of_this_thread_has(monkeypatch):
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
