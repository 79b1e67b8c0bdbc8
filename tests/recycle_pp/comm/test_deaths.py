"""Real SIGKILLs at bad moments, and many of them."""

import os
import random
import signal
import threading
import time

import psutil
import pytest
import torch

from recycle_pp.comm.tcp.mesh import Mesh
from recycle_pp.comm.waiting import LinkBroken
from recycle_pp.testing.rehearsal import Node, Rehearsal, grid

pytestmark = pytest.mark.timeout(180)


def build(node: Node, generation: int, members, base: int) -> str:
    """Builds the generation, then sums over the stage and around the ring."""
    try:
        node.links.rebuild(generation, members, node.me, base)
        ring = sorted(members)
        here = ring.index(node.me)
        buffer = torch.empty(10)
        receiving = node.links.receive(buffer, ring[here - 1], 7)
        node.links.send(torch.full((10,), float(generation)), ring[(here + 1) % len(ring)], 7)
        total = torch.ones(1000)
        node.links.all_reduce([total]).wait()
        receiving.wait()
        assert buffer.tolist() == [float(generation)] * 10
        assert total[0].item() == sum(worker.stage == node.worker.stage for worker in members.values())
    except LinkBroken as error:
        return "aborted" if error.aborted else "broken"
    return "built"


def obey(node: Node) -> None:
    while True:
        word, *rest = node.receive()
        if word == "build":
            node.report((rest[0], build(node, *rest)))


def test_a_returning_worker_is_linked_again():
    members = grid(2, 2)
    with Rehearsal(members, obey) as play:
        play.send("build", 0, members, 0)
        play.reports(4)
        play.kill(2)
        live = {member: worker for member, worker in members.items() if member != 2}
        play.send("build", 1, live, 0, to=live)
        assert [report for _, report in play.reports(3)] == [(1, "built")] * 3
        play.start(2)
        play.send("build", 2, members, 2)
        assert [report for _, report in play.reports(4)] == [(2, "built")] * 4


def die_while_linking(node: Node) -> None:
    """The second worker of each pipeline publishes its address and dies before it connects."""
    if node.worker.stage == 1:
        Mesh.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    obey_in_threads(node)


def obey_in_threads(node: Node) -> None:
    while True:
        word, *rest = node.receive()
        if word == "build":

            def run(rest=rest):
                node.report((rest[0], build(node, *rest)))

            threading.Thread(target=run, daemon=True).start()


def test_members_that_die_while_connecting_do_not_delay_survivors():
    """Some survivors wait for a connection from a dead worker, others are refused. The next generation is built."""
    members = grid(3, 2)
    with Rehearsal(members, die_while_linking) as play:
        play.send("build", 0, members, 0)
        live = {member: worker for member, worker in members.items() if worker.stage == 0}
        for doomed in members.keys() - live:
            assert play.wait_for_exit(doomed) == -signal.SIGKILL
        time.sleep(0.2)
        start = time.monotonic()
        play.send("abort", to=live)
        play.send("build", 1, live, 0, to=live)
        reports = [report for _, report in play.reports(6)]
        assert time.monotonic() - start < 5
        assert [report for report in reports if report[0] == 1] == [(1, "built")] * 3
        assert all(outcome in ("aborted", "broken") for generation, outcome in reports if generation == 0)


def abort_while_building(node: Node) -> None:
    """The first worker builds links with a peer that never connects. Its control thread aborts."""
    if node.me == 0:
        start = time.monotonic()
        threading.Timer(0.2, node.links.abort).start()
        with pytest.raises(LinkBroken):
            node.links.rebuild(0, node.members, node.me)
        node.report(time.monotonic() - start)
        with pytest.raises(LinkBroken, match="not yet rebuilt"):
            node.links.all_reduce([torch.ones(1)])
        node.links.rebuild(1, {node.me: node.worker}, node.me)
        node.report("alone and well")
    node.receive()


def test_an_abort_ends_a_rebuild():
    with Rehearsal(grid(2, 1), abort_while_building) as play:
        (_, seconds), (_, word) = play.reports(2)
        assert 0.1 < seconds < 3 and word == "alone and well"


def large_message(node: Node) -> None:
    """The first worker is receiving a large message from the second."""
    node.links.rebuild(0, node.members, node.me, 0)
    data = torch.zeros(60_000_000)  # 240 MB
    if node.me == 1:
        node.links.send(data, 0, 1)
        node.report("sending")
        node.receive()
    pending = node.links.receive(data, 1, 1)
    node.report("receiving")
    try:
        pending.wait()
        node.report("too fast")
    except LinkBroken:
        node.report("woken")
    node.receive()


def test_an_abort_ends_the_wait_for_the_rest_of_a_large_message_from_a_dead_worker():
    """Gloo does not fail an operation whose data was just arriving, so only the abort ends this wait."""
    members = grid(2, 1)
    with Rehearsal(members, large_message) as play:
        play.reports(2)
        time.sleep(0.02)
        play.kill(1)
        play.send("abort", to=[0])
        assert play.reports(1, timeout=10)[0][1] in ("woken", "too fast")


def hundred_generations(node: Node) -> None:
    """In each generation, abandons a thread in a wait, drops a receive and a send, and checks a sum."""
    process = psutil.Process()
    other = next(member for member in node.members if member != node.me)

    def wait_in_vain() -> None:
        with pytest.raises(LinkBroken):
            node.links.receive(torch.empty(1000), other, 1).wait()

    def usage() -> tuple[int, int, int]:
        return process.num_threads(), process.num_fds(), process.memory_info().rss

    def generation(number: int, base: int) -> None:
        node.links.rebuild(number, node.members, node.me, base)
        total = torch.ones(100_000)
        node.links.all_reduce([total]).wait()
        assert total[0] == 2
        node.links.receive(torch.empty(100_000), other, 2)
        node.links.send(torch.empty(100_000), other, 3)
        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        node.meet()
        node.links.abort()
        waiting.join(5)
        assert not waiting.is_alive()

    kept = node.receive()[1]
    for number in range(0, 40):
        generation(number, 0 if kept else number)
    before = usage()
    for number in range(40, 140):
        generation(number, 0 if kept else number)
    time.sleep(0.5)
    node.report((before, usage()))
    node.links.rebuild(200, node.members, node.me, 200)
    node.meet()
    deadline = time.monotonic() + 10
    while process.num_threads() > 10 and time.monotonic() < deadline:
        time.sleep(0.05)
    node.report(process.num_threads())
    node.receive()


@pytest.mark.parametrize("kept", [True, False], ids=["connections kept", "new connections"])
def test_a_hundred_generations_leak_no_threads_files_or_memory(kept):
    """An abandoned wait keeps its thread and buffers until the mesh is renewed."""
    with Rehearsal(grid(2, 1), hundred_generations) as play:
        play.send("kept", kept)
        reports = [report for _, report in play.reports(4)]
        for before, after in (report for report in reports if isinstance(report, tuple)):
            assert after[0] <= before[0] + 40 and after[1] <= before[1] + 20
            assert after[2] - before[2] < 60e6
        assert all(report <= 10 for report in reports if isinstance(report, int))


def test_after_random_deaths_and_returns_the_last_generation_is_built():
    """Each announcement supersedes the one before, even if its links are not built yet."""
    chance = random.Random(5)
    members = grid(3, 2)
    with Rehearsal(members, obey_in_threads) as play:
        live, base, generation = dict(members), 0, 0
        play.send("build", 0, members, 0)
        for _ in range(25):
            time.sleep(chance.choice([0.0, 0.002, 0.02, 0.1]))
            generation += 1
            dead = [member for member in members if member not in live]
            if dead and chance.random() < 0.5:
                play.start(dead[0])
                live, base = live | {dead[0]: members[dead[0]]}, generation
            elif len(live) > 2:
                victim = chance.choice(sorted(live))
                play.kill(victim)
                live = {member: worker for member, worker in live.items() if member != victim}
            play.send("abort", to=live)
            play.send("build", generation, live, base, to=live)
        standing: set = set()
        while len(standing) < len(live):
            ((member, (number, outcome)),) = play.reports(1, timeout=30)
            assert outcome == "built" or number < generation
            if number == generation:
                standing.add(member)
        assert standing == set(live)
