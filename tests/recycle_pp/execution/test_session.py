"""The session passes the coordinator's messages to the executor."""

import queue
import threading
from types import SimpleNamespace

from recycle_schedules import Worker

from recycle_pp.execution.session import Session
from recycle_pp.protocol.participant import Participant
from recycle_pp.wire.messages.generations import Shares
from recycle_pp.wire.messages.steps import Commit


def test_a_step_that_counts_as_committed_has_a_pending_commit():
    """Otherwise the executor could skip the commit of the last step, and wait forever for another one."""
    half_stored, proceed = threading.Event(), threading.Event()

    class Records(dict):
        def pop(self, *arguments):
            half_stored.set()
            proceed.wait(10)
            return super().pop(*arguments)

    received = queue.Queue()
    participant = Participant(0, Worker(0, 0), records=Records())
    participant.holdings.adopt(Shares([], [], True, [], None))
    session = Session(SimpleNamespace(recv=received.get), participant, links=None, store=None)
    session.start()
    received.put(Commit(0, 0, scale=1.0, norm=1.0, loss=1.0))
    assert half_stored.wait(10) and participant.committed == 0
    threading.Timer(0.1, proceed.set).start()
    assert session.pending()
