"""The mesh of connections shared by generations with the same base, and sums over it."""

import threading
import time

import pytest
import torch
from recycle_schedules import Worker

from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.tcp.transport import TcpTransport
from recycle_pp.comm.waiting import Generation, LinkBroken

A, B, C = range(3)
MEMBERS = {member: Worker(member, 0) for member in (A, B, C)}
SURVIVORS = {member: MEMBERS[member] for member in (B, C)}
BASE = 5


def test_a_death_may_end_a_generation_before_its_links_are_made():
    """A dies while it joins the first generation. B and C, the survivors, only connect in the next one."""
    older, newer = Generation(BASE), Generation(BASE + 1)

    def published(key, value):
        other.deliver(key, value)
        if not older.over:  # blocks B's first thread here
            older.end()
            c = threading.Thread(target=TcpTransport(other, "127.0.0.1", 3).join, args=(newer, SURVIVORS, C, BASE))
            c.start()
            transport.join(newer, SURVIVORS, B, BASE)
            c.join()

    other = ControlStore(lambda key, value: store.deliver(key, value))
    store = ControlStore(published)
    transport = TcpTransport(store, "127.0.0.1", 3)
    with pytest.raises(LinkBroken):
        transport.join(older, MEMBERS, B, BASE)
    transport.join(Generation(BASE + 2), SURVIVORS, B, BASE)


def test_a_sum_names_the_members_whose_parts_are_missing():
    """B and C have started the sum. B's part arrives at C, A's does not."""
    stores: list[ControlStore] = []

    def published(key, value):
        for store in stores:
            store.deliver(key, value)

    stores += [ControlStore(published) for _ in MEMBERS]
    transports = {member: TcpTransport(stores[member], "127.0.0.1", 3) for member in MEMBERS}
    generation = {member: Generation(BASE) for member in MEMBERS}
    joins = [
        threading.Thread(target=transports[member].join, args=(generation[member], MEMBERS, member, BASE))
        for member in MEMBERS
    ]
    for thread in joins:
        thread.start()
    for thread in joins:
        thread.join()
    sums = {member: transports[member].all_reduce(generation[member], [torch.ones(3)]) for member in (B, C)}
    deadline = time.monotonic() + 10
    while any(pending.lacks() != [A] for pending in sums.values()):
        assert time.monotonic() < deadline, [pending.lacks() for pending in sums.values()]
        time.sleep(0.01)
    last = transports[A].all_reduce(generation[A], [torch.ones(3)])
    for pending in (last, *sums.values()):
        pending.wait()
        assert pending.lacks() == []
    for transport in transports.values():
        transport.close(1.0)
