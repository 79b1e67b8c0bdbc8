"""The executor launches ops ahead of the device, which finishes them later and in order."""

from types import SimpleNamespace

import pytest
import torch
from recycle_schedules import Action, OpKind, TensorKind, Worker

from recycle_pp.comm.waiting import Pending
from recycle_pp.execution.executor import Executor
from recycle_pp.execution.injection import Injector
from recycle_pp.execution.mailbox import Mailbox
from recycle_pp.execution.session import Session, Superseded
from recycle_pp.execution.spans import AHEAD, Spans
from recycle_pp.protocol.participant import Participant
from tests.recycle_pp.in_process import small

from .fake_device import FakeDevice

BEFORE, ME, AFTER = Worker(0, 0), Worker(0, 1), Worker(0, 2)
F, I, W = OpKind.FORWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
CPU = torch.device("cpu")


class Compute:
    """A fake stage. The output of an op is valid only after the device has run it. fails: op -> error on the device."""

    stage, last, device, module = ME.stage, False, CPU, SimpleNamespace(reads=False)

    def __init__(self, device):
        self._device, self.fails = device, {}

    def forward(self, step, g, batch, boundary):
        return [self._launch(("F", g), boundary[0], 10)]

    def backward_input(self, g, grads):
        return [self._launch(("I", g), grads[0], 20)]

    def backward_weight(self, g):
        if g == 99:
            raise ValueError("on the host")
        self._launch(("W", g), torch.zeros(1), 0)

    def _launch(self, op, taken, more):
        made = torch.full((1,), -1.0)

        def work():
            if op in self.fails:
                raise self.fails[op]
            made.copy_(taken + more)

        self._device.launch(work)
        return made


class Wires:
    """Fake links to both neighbours. Received tensors hold the number of the message.

    late: number of polls for which the next message counts as not arrived
    """

    def __init__(self, device, in_stream):
        self.device, self.in_stream, self.late = device, in_stream, 0
        self.sent, self._received = [], 0

    def member(self, worker):
        return worker.stage

    def connect(self, members):
        pass

    def receive(self, buffer, frm, tag):
        self._received += 1
        buffer.view(torch.float32).fill_(self._received)

        def arrived():
            self.late -= 1
            return self.late < 0

        return Pending(None, arrived)

    def send(self, tensor, to, tag):
        def read():
            self.sent.append(tensor.view(torch.float32).item())

        self.device.launch(read) if self.in_stream else read()


class Commits:
    """Records how many launched ops were not observed as done at the reduction and at the vote, then ends the step."""

    def __init__(self, spans):
        self._spans, self.seen = spans, []

    def sum_gradients(self, orders, step):
        self.seen.append(("reduce", len(self._spans._launched)))

    def sum_tied_gradients(self, orders, step):
        pass

    def vote(self, orders, step, logged):
        self.seen.append(("vote", len(self._spans._launched)))
        raise Superseded


@pytest.fixture
def build():
    """A function that makes an executor of the middle stage of three, on a fake device."""

    def make(in_stream=True):
        device = FakeDevice()
        links = Wires(device, in_stream)
        participant = Participant(1, ME)
        participant.orders = orders = SimpleNamespace(generation=0, stagger=False)
        session = Session(SimpleNamespace(state=None, send=lambda *_: None), participant, links, None)
        spans = Spans(1e9, device, device.waited)
        comes = {kind: [torch.empty(1)] for kind in TensorKind}
        mailbox = Mailbox(links, comes, CPU, (1, 3, 100))
        settings = small(parallel__pipelines=1, parallel__stages=3, parallel__microbatches=100)
        faults = Injector([], lambda **_: None)
        executor = Executor(session, Compute(device), Commits(spans), mailbox, None, faults, spans, settings)
        executor.in_stream = in_stream
        executor.device, executor.orders, executor.wires = device, orders, links
        return executor

    return make


def forward(executor, i):
    executor.mailbox.post(0, (TensorKind.ACTIVATION, (0, i), 0), BEFORE)
    executor._compute(executor.orders, 0, Action(F, 1, (0, i)))


def done(executor):
    return executor.session.participant.record(0).done


def test_the_host_launches_two_ops_before_the_device_has_finished_the_current_one(build):
    executor = build()
    for i in range(AHEAD):
        forward(executor, i)
    assert done(executor) == {} and executor.device.waits == []
    forward(executor, AHEAD)
    assert done(executor) == {F: [0, 0]} and executor.device.waits == ["F0"]
    executor.device.run(2)
    executor.spans.observe(AHEAD)
    assert done(executor) == {F: [0, 0, 0, 1, 0, 2]} and executor.device.waits == ["F0"]


def test_a_span_is_the_time_of_the_device(build):
    executor = build()
    for i in range(2):
        forward(executor, i)
    assert executor.spans.take(0) == []
    executor.spans.observe()
    assert executor.spans.take(0) == [(F, 0, i, i, i + 1, 1) for i in range(2)], "back to back"


def test_a_report_counts_launched_ops_once_and_has_their_remaining_time(build, monkeypatch):
    executor = build()
    forward(executor, 0)
    executor.device.run()
    executor.spans.observe()
    monkeypatch.setattr("recycle_pp.execution.spans.time.monotonic", lambda: 1.0)
    forward(executor, 1)
    forward(executor, 2)
    record = executor.session.participant.record(0)
    assert record.done == {F: [0, 0]} and record.reported().done == {F: [0, 0, 0, 1, 0, 2]}
    assert executor.spans.left() == 2.0
    executor.spans.observe()
    assert record.done == record.reported().done == {F: [0, 0, 0, 1, 0, 2]}
    assert [executor.mailbox.log.get(0, (TensorKind.ACTIVATION, (0, i), 1))[0].item() for i in range(3)] == [11, 12, 13]


def step(executor):
    """Runs a step of four micro-batches with all its messages."""
    actions = []
    for i in range(4):
        actions += [Action(OpKind.RECV_ACTIVATION, 1, (0, i), BEFORE), Action(F, 1, (0, i))]
        actions += [Action(OpKind.SEND_ACTIVATION, 1, (0, i), AFTER)]
    for i in range(4):
        actions += [Action(OpKind.RECV_GRADIENT, 1, (0, i), AFTER), Action(I, 1, (0, i))]
        actions += [Action(OpKind.SEND_GRADIENT, 1, (0, i), BEFORE), Action(W, 1, (0, i))]
    with pytest.raises(Superseded):
        executor._run_step(executor.orders, 0, [*actions, Action(OpKind.REDUCE, 1)])
    executor.device.run(99)


@pytest.mark.parametrize("in_stream", [True, False], ids=["by the device", "through the host"])
def test_a_message_holds_the_finished_output(build, in_stream):
    executor = build(in_stream)
    step(executor)
    assert executor.wires.sent == [11, 12, 13, 14, 25, 26, 27, 28]


def test_all_ops_are_done_before_the_reduction_and_the_vote(build):
    executor = build()
    step(executor)
    assert executor.commits.seen == [("reduce", 0), ("vote", 0)]
    assert {kind: len(of) // 2 for kind, of in done(executor).items()} == {F: 4, I: 4, W: 4}
    assert len(executor.spans.take(0)) == 12


def test_the_executor_waits_for_launched_ops_before_it_waits_for_an_input(build):
    """So if an op hangs on the device, the hang detector finds that op, and not the neighbour that sends the input."""
    executor = build()
    forward(executor, 0)
    executor.wires.late = 3
    forward(executor, 1)
    assert executor.device.waits == ["F0"] and done(executor) == {}, "F1 is launched as soon as its input arrives"


def test_an_op_that_fails_on_the_device_is_named_and_does_not_count(build):
    executor = build()
    executor.stage.fails["F", 1] = RuntimeError("CUDA error: an illegal memory access was encountered")
    for i in range(3):
        forward(executor, i)
    executor.device.run()
    with pytest.raises(RuntimeError, match="illegal") as caught:
        executor.spans.observe()
    assert caught.value.recycle_where == "F of micro-batch 0.1 in step 0"
    assert done(executor) == {F: [0, 0]} and len(executor.spans.take(0)) == 1


def test_a_late_error_of_the_gpu_names_the_oldest_unfinished_op_and_an_error_of_the_host_the_current_op(build):
    executor = build()
    forward(executor, 0)

    def fail(g):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(ValueError, match="on the host") as own:
        executor._compute(executor.orders, 0, Action(W, 1, (0, 99)))
    executor.stage.backward_weight = fail
    with pytest.raises(torch.AcceleratorError) as late:
        executor._compute(executor.orders, 0, Action(W, 1, (0, 2)))
    assert own.value.recycle_where == "W of micro-batch 0.99 in step 0"
    assert late.value.recycle_where == "F of micro-batch 0.0 in step 0"


def test_an_error_of_the_gpu_that_a_message_reports_names_the_oldest_unfinished_op(build):
    executor = build()
    forward(executor, 0)
    forward(executor, 1)
    late, other = torch.AcceleratorError("CUDA error: unspecified launch failure"), RuntimeError("another")
    executor.spans.locate(late)
    executor.spans.locate(other)
    assert late.recycle_where == "F of micro-batch 0.0 in step 0" and not hasattr(other, "recycle_where")
