"""Links between real processes: messages, sums, deaths and successive generations."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from recycle_pp.comm.gloo.group import GlooGroup
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.links import Links
from recycle_pp.comm.staging import StagedTransport
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.waiting import LinkBroken
from recycle_pp.execution.transports import transport_for
from recycle_pp.testing.rehearsal import Node, Rehearsal, grid

pytestmark = pytest.mark.timeout(120)


def neighbours(node: Node, members):
    """The members after and before this one, in a ring."""
    ring = sorted(members)
    here = ring.index(node.me)
    return ring[(here + 1) % len(ring)], ring[here - 1]


def number_of(member) -> float:
    return 1.0 + member


def exchange(node: Node, members) -> str:
    """Exchanges messages with the neighbouring stages, sums over the stage and broadcasts; raises on a wrong result."""
    beside = [member for member, worker in members.items() if abs(worker.stage - node.worker.stage) == 1]
    peers = [member for member, worker in members.items() if worker.stage == node.worker.stage]
    node.links.connect(beside)
    buffers = {member: torch.empty(1000) for member in beside}
    messages = [node.links.receive(buffer, member, 5) for member, buffer in buffers.items()]
    messages += [node.links.send(torch.full((1000,), number_of(node.me)), member, 5) for member in beside]
    total = torch.full((100,), number_of(node.me))
    node.links.all_reduce([total]).wait()
    first = min(peers)
    said = torch.full((10,), number_of(node.me))
    node.links.broadcast([said], first).wait()
    for_last = torch.full((100,), number_of(node.me))
    last = max(peers)
    node.links.reduce([for_last], last).wait()
    assert node.me != last or torch.equal(for_last, total)
    for message in messages:
        message.wait()
    assert all(buffer.unique().tolist() == [number_of(member)] for member, buffer in buffers.items())
    assert total.unique().tolist() == [sum(map(number_of, peers))]
    assert said.unique().tolist() == [number_of(first)]
    return "exchanged"


def build_and_exchange(node: Node) -> None:
    """Builds each generation on command, exchanges, and reports the outcome."""
    while True:
        word, *rest = node.receive()
        if word == "build":
            generation, members, base = rest
            try:
                node.links.rebuild(generation, members, node.me, base)
                node.report(exchange(node, members))
            except LinkBroken as error:
                node.report(("broken", error.aborted))
        elif word == "use groups":
            node.links._transport = GroupTransport(node.store, torch.device("cpu"), 1800.0, GlooGroup)
        elif word == "use staged":
            node.links._transport = StagedTransport(node.links._transport, torch.device("cpu"))


def test_an_operation_of_an_old_generation_cannot_enter_the_new_one():
    """Otherwise a sum of the broken step would be taken for the first sum of the next plan."""
    links = Links(transport_for("tcp", ControlStore(lambda key, value: None), torch.device("cpu"), size=1))
    links.rebuild(0, grid(1, 1), 0, 0)
    links.follow(0)
    links.all_reduce([torch.ones(3)]).wait()
    links.rebuild(1, grid(1, 1), 0, 0)
    with pytest.raises(LinkBroken, match="superseded by generation 1"):
        links.all_reduce([torch.ones(3)])
    links.follow(1)
    links.all_reduce([torch.ones(3)]).wait()
    links.close()


@pytest.mark.parametrize("kept", [True, False], ids=["connections kept", "new connections"])
@pytest.mark.parametrize("transport", ["mesh", "groups", "staged"])
def test_survivors_continue_after_several_deaths(transport, kept):
    members = grid(3, 2)
    with Rehearsal(members, build_and_exchange) as play:
        if transport != "mesh":
            play.send(f"use {transport}")
        play.send("build", 0, members, 0)
        assert {report for _, report in play.reports(6)} == {"exchanged"}
        live = dict(members)
        for generation, dead in enumerate([3, 0, 5, 4], 1):
            play.kill(dead)
            del live[dead]
            play.send("abort", to=live)
            play.send("build", generation, live, 0 if kept else generation, to=live)
            assert {report for _, report in play.reports(len(live))} == {"exchanged"}


def test_a_generation_that_waits_for_a_dead_member_can_be_superseded():
    members = grid(2, 2)
    with Rehearsal(members, build_in_threads) as play:
        play.kill(1)
        live = {member: worker for member, worker in members.items() if member != 1}
        play.send("build", 0, members, 0, to=live)  # the dead worker will never publish its address
        time.sleep(0.2)
        play.send("build", 1, live, 1, to=live)
        reports = [report for _, report in play.reports(6)]
        assert sorted(reports) == [(0, "broken")] * 3 + [(1, "exchanged")] * 3


def build_in_threads(node: Node) -> None:
    """Builds each announcement in its own thread, like the session, while earlier ones may still be running."""

    def build(generation, members, base):
        try:
            node.links.rebuild(generation, members, node.me, base)
            node.report((generation, exchange(node, members)))
        except LinkBroken:
            node.report((generation, "broken"))

    while True:
        _, *build_arguments = node.receive()
        threading.Thread(target=build, args=build_arguments, daemon=True).start()


def block(node: Node) -> None:
    """Blocks in an operation on command, and reports when and how it ended."""
    members = node.members
    node.links.rebuild(0, members, node.me, 0)
    node.report("built")
    _, where = node.receive()
    after, before = neighbours(node, members)
    try:
        if where == "receive":
            node.links.receive(torch.empty(10), before, 1).wait()
        elif where == "all_reduce":
            if node.worker.pipeline:
                node.links.all_reduce([torch.ones(1000)]).wait()
            else:
                node.links.receive(torch.empty(10), before, 1).wait()
        node.report("done")
    except LinkBroken as error:
        node.report((time.monotonic(), error.aborted, error.generation))
    for operation in (
        lambda: node.links.receive(torch.empty(10), before, 3),
        lambda: node.links.send(torch.empty(10), after, 4),
        lambda: node.links.all_reduce([torch.ones(3)]),
    ):
        start = time.monotonic()
        with pytest.raises(LinkBroken):
            operation().wait()
        assert time.monotonic() - start < 2
    node.report("later operations raise")
    assert node.receive() == ("abort",)
    node.receive()


@pytest.mark.parametrize("where", ["receive", "all_reduce"])
def test_an_abort_ends_operations_that_wait_for_live_workers(where):
    members = grid(2, 2)
    with Rehearsal(members, block) as play:
        play.reports(4)
        play.send("block", where)
        time.sleep(0.3)
        start = time.monotonic()
        play.send("abort")
        reports = play.reports(8)
        times = [report[0] - start for _, report in reports if report != "later operations raise"]
        assert len(times) == 4 and max(times) < 2.0
        assert all(report[1:] == (True, 0) for _, report in reports if report != "later operations raise")


def test_a_lookup_of_a_dead_worker_in_an_ended_generation_raises_link_broken():
    """The next generation may be ready before the executor has read its new orders.

    So the executor may still ask for a worker that is no longer in the links.
    """
    transport = SimpleNamespace(join=lambda *_: None, end=lambda over: None)
    links, members = Links(transport), grid(2, 1)
    links.rebuild(0, members, 0)
    links.follow(0)
    assert links.member(members[1]) == 1
    links.rebuild(1, {0: members[0]}, 0)
    for ask in (lambda: links.member(members[1]), lambda: links.members[1]):
        with pytest.raises(LinkBroken):
            ask()
    links.follow(1)
    assert links.members == {0: members[0]}


def test_a_wait_for_a_dead_peer_fails_before_the_death_is_announced():
    members = grid(1, 2)
    with Rehearsal(members, wait_for_the_other) as play:
        play.reports(2)
        play.kill(1)
        ((_, report),) = play.reports(1, timeout=10)
        assert report == "peer gone, not aborted"


def wait_for_the_other(node: Node) -> None:
    node.links.rebuild(0, node.members, node.me, 0)
    node.report("built")
    other = next(member for member in node.members if member != node.me)
    try:
        node.links.receive(torch.empty(10), other, 1).wait()
    except LinkBroken as error:
        node.report("aborted" if error.aborted else "peer gone, not aborted")


def many_messages(node: Node) -> None:
    """All workers receive from all others, not in the order of the sends, from zero bytes to megabytes."""
    node.links.rebuild(0, node.members, node.me, 0)
    others = [member for member in node.members if member != node.me]
    sizes = [1, 7, 1000, 300_000, 2, 64]
    buffers = {(frm, tag): torch.empty(sizes[tag % 6]) for frm in others for tag in range(30)}
    receives = [node.links.receive(buffer, frm, tag) for (frm, tag), buffer in reversed(buffers.items())]
    sends = [
        node.links.send(torch.full((sizes[tag % 6],), number_of(node.me) * 100 + tag), to, tag)
        for tag in range(30)
        for to in others
    ]
    for work in [*receives, *sends]:
        work.wait()
    for (frm, tag), buffer in buffers.items():
        assert buffer.unique().tolist() == [number_of(frm) * 100 + tag]
    node.meet()
    node.report("all here")
    node.receive()


def test_many_messages_between_all_workers_may_be_in_flight():
    members = grid(2, 2)
    with Rehearsal(members, many_messages) as play:
        assert [report for _, report in play.reports(4)] == ["all here"] * 4


def careless_sender(node: Node) -> None:
    """Sends many messages without waiting for any."""
    node.links.rebuild(0, node.members, node.me, 0)
    after, before = neighbours(node, node.members)
    first = None
    for tag in range(300):
        tensor = torch.ones(1000)
        first = first or weakref.ref(tensor)
        node.links.send(tensor, after, tag)
        node.links.receive(torch.empty(1000), before, tag).wait()
    del tensor
    node.meet()
    gc.collect()
    node.report(first() is None)
    node.receive()


def test_sends_that_are_never_waited_for_are_released():
    with Rehearsal(grid(2, 1), careless_sender) as play:
        assert [let_go for _, let_go in play.reports(2)] == [True, True]


def sums(node: Node) -> None:
    node.links.rebuild(0, node.members, node.me, 0)
    k = node.worker.pipeline
    tensors = [
        torch.full((3, 5), 0.1 * (k + 1)),
        torch.full((7,), 2**40 + k, dtype=torch.int64),
        torch.tensor([[float(k)], [0.5]], dtype=torch.float64),
    ]
    pending = node.links.all_reduce(tensors)
    again = node.links.all_reduce([torch.ones(2)])  # the second may start before the first is done
    again.wait()
    pending.wait()
    copied = [torch.full((4,), float(k)), torch.tensor([k])]
    node.links.broadcast(copied, 2).wait()
    node.report([tensor.tolist() for tensor in (*tensors, *copied)])
    node.receive()


def test_sums_and_broadcasts_of_several_dtypes_work_in_place():
    with Rehearsal(grid(3, 1), sums) as play:
        for _, (floats, integers, doubles, copied, source) in play.reports(3):
            assert torch.tensor(floats).allclose(torch.full((3, 5), 0.6))
            assert integers == [3 * 2**40 + 3] * 7
            assert doubles == [[3.0], [1.5]]
            assert copied == [2.0] * 4 and source == [2]


def alone(node: Node) -> None:
    node.links.rebuild(0, node.members, node.me)
    total = torch.ones(3)
    node.links.all_reduce([total]).wait()
    node.links.broadcast([total], node.me).wait()
    node.report(total.tolist())


def test_collectives_of_a_single_worker_do_not_wait():
    with Rehearsal(grid(1, 1), alone) as play:
        assert play.reports(1)[0][1] == [1.0] * 3


def test_an_old_generation_and_an_invalid_tag_are_rejected():
    with Rehearsal(grid(2, 1), refuse) as play:
        assert [report for _, report in play.reports(2)] == ["refused"] * 2


def refuse(node: Node) -> None:
    node.links.rebuild(5, node.members, node.me)
    with pytest.raises(LinkBroken, match="superseded by generation 5"):
        node.links.rebuild(5, node.members, node.me)
    with pytest.raises(ValueError, match="tag 33554432"):
        node.links.send(torch.ones(1), neighbours(node, node.members)[0], 1 << 25)
    node.report("refused")
    node.receive()
