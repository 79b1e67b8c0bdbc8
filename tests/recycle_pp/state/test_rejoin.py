"""What a donor holds for a joiner."""

import threading
from types import SimpleNamespace

import torch

from recycle_pp.state import rejoin
from recycle_pp.state.rejoin import BACKLOG, Donations


class Slow:
    """A stream whose other side takes nothing until it is told to; then all that was sent is in `parcels`."""

    def __init__(self):
        self.parcels, self.taking = [], threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def send(self, about, tensors):
        assert self.taking.wait(20)
        self.parcels.append((about, tensors))


def test_a_joiner_that_takes_nothing_costs_a_bounded_backlog_and_ends_with_every_step(monkeypatch):
    stream, parameter = Slow(), torch.zeros(1)
    monkeypatch.setattr(rejoin, "connect", lambda *_, **__: stream)
    optimizer = SimpleNamespace(state=lambda: {"model.x": parameter})
    reduced = SimpleNamespace(to_tensors=lambda: [parameter.clone()])
    donations = Donations(optimizer, "token", lambda *_: None)
    donations.asked({"address": ["127.0.0.1", 1], "session": 7})
    last = 10 * BACKLOG
    for step in range(last + 1):
        parameter += 1  # what the step does; its "gradient" is the parameter that it leads to
        donations.committed(SimpleNamespace(step=step, scale=1.0), reduced)
        assert all(line.waiting() <= BACKLOG for line in donations._lines)
    stream.taking.set()
    (line,) = donations._lines
    while stream.parcels[-1:] == [] or stream.parcels[-1][0]["step"] < last:
        line.join(0.01)
    at = None
    for about, tensors in stream.parcels:
        assert about["kind"] == "state" or about["step"] == at + 1, "a step is missing"
        at = about["step"]
        assert all(tensor.item() == at + 1 for tensor in tensors.values())
    assert {about["session"] for about, _ in stream.parcels if about["kind"] == "state"} == {7}
    assert len(stream.parcels) <= BACKLOG + 2
