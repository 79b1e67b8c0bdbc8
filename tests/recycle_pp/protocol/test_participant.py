"""Repeated and lost messages."""

from recycle_schedules import Worker

from recycle_pp.protocol.participant import Participant
from recycle_pp.wire.messages.generations import Announce, Shares
from recycle_pp.wire.messages.steps import Commit


def test_a_commit_received_twice_is_applied_once():
    """After a reset the coordinator repeats the newest commit, which may have arrived by the new connection already."""
    me = Participant(0, Worker(0, 0))
    me.holdings.adopt(Shares([(0, 0, 1)], [(1, [0])], together=True, copies=[], knows=None))
    for _ in range(2):
        me.commit(Commit(0, 0, scale=1.0, norm=1.0, loss=2.0))
    assert me.committed == 0 and len(me.commits) == 1


def test_a_commit_that_arrives_after_the_next_generation_is_applied():
    """The commit was lost in a reset, and another member that has reconnected caused a new generation meanwhile."""
    me = Participant(0, Worker(0, 0))
    me.announce(Announce(0, {0: Worker(0, 0)}, committed=-1, base=0))
    me.holdings.adopt(Shares([(0, 0, 1)], [(1, [0])], together=True, copies=[], knows=None))
    me.announce(Announce(1, {0: Worker(0, 0)}, committed=0, base=1))
    me.commit(Commit(0, 0, scale=1.0, norm=1.0, loss=2.0))
    assert me.committed == 0 and len(me.commits) == 1
