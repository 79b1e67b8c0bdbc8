"""The mesh of connections shared by generations with the same base."""

import threading

import pytest
from recycle_schedules import Worker

from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.tcp.transport import TcpTransport
from recycle_pp.comm.waiting import Generation, LinkBroken

A, B, C = range(3)
MEMBERS = {member: Worker(member, 0) for member in (A, B, C)}
SURVIVORS = {member: MEMBERS[member] for member in (B, C)}
BASE = 5


def test_a_death_may_end_a_generation_before_its_links_are_made():
    """A joins in this generation and dies. The next generation, without A, makes the links of both."""
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
