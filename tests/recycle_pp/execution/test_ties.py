"""Who sends whom its sums of a parameter that both hold: one worker each of the other stages, whoever is alive."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.execution.ties import exchange

STAGES = 4
TIED = (0, 1, 3)


class Wire:
    """Of one worker: what it sends, what it waits for."""

    def __init__(self):
        self.sent, self.awaited, self.connected = [], [], set()
        self.order = {}  # by the other worker: what is sent and awaited, in this order

    def meetings(self, me, workers):
        self.connected |= {*workers}
        return []

    def send(self, tensor, to, tag):
        assert to in self.connected
        self.order.setdefault(to, []).append("send")
        self.sent.append((to, int(tensor[0]), tag))

    def receive(self, buffer, frm, tag):
        assert frm in self.connected
        self.order.setdefault(frm, []).append("receive")
        self.awaited.append((frm, tag))
        return frm

    def wait(self, pending, giver):
        assert pending == giver, "the coordinator is told who has to give it"


class Parcels:
    def __init__(self, stage):
        self.stage, self.stages = stage, [other for other in TIED if other != stage]

    def parcel(self, reduced, to):
        return torch.tensor([10 * self.stage + to])

    def room(self, to):
        return torch.empty(1)


alive = st.sets(st.builds(Worker, st.integers(0, 4), st.integers(0, STAGES - 1)), min_size=STAGES).filter(
    lambda workers: {worker.stage for worker in workers} == set(range(STAGES))
)


@given(alive)
def test_every_worker_gets_one_parcel_of_every_other_stage_and_nobody_else_sends_it_any(members):
    wires = {}
    for me in members:
        if me.stage in TIED:
            wires[me] = Wire()
            exchange(wires[me], Parcels(me.stage), None, me, members, 7, wires[me].wait)
    sent = {(frm, to, what, tag) for frm, wire in wires.items() for to, what, tag in wire.sent}
    awaited = {(frm, to, 10 * frm.stage + to.stage, tag) for to, wire in wires.items() for frm, tag in wire.awaited}
    assert sent == awaited
    for worker, wire in wires.items():
        assert sorted(frm.stage for frm, _ in wire.awaited) == [stage for stage in TIED if stage != worker.stage]
    for me, wire in wires.items():
        for other, order in wire.order.items():
            turned = ["receive" if what == "send" else "send" for what in wires[other].order[me]]
            assert order == turned, "on one ordered stream, each message meets its other end"
    loads = [len(wire.sent) for wire in wires.values()]
    assert max(loads) <= 2 * 5, "spread over the peers"
