"""Connections of a pair of workers, without the routing above them."""

import threading

import torch

from recycle_pp.comm.gloo.mesh import Mesh
from recycle_pp.comm.waiting import Pool


def test_two_threads_that_wait_for_one_message_both_go_on():
    """One sends and waits; the reaper of old sends may wait for the same one."""
    pool = Pool()
    here, there = (Mesh(rank, 2, "127.0.0.1", 30.0, pool) for rank in range(2))
    here.link({1: there.address})
    there.link({0: here.address})
    here.linked(1).wait()
    there.linked(0).wait()

    message = here.send(torch.ones(4), 1, slot=5)
    waiters = [threading.Thread(target=message.wait, daemon=True) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    buffer = torch.zeros(4)
    there.receive(buffer, 0, slot=5).wait()
    for waiter in waiters:
        waiter.join(10)
    assert not any(waiter.is_alive() for waiter in waiters)
    assert buffer.tolist() == [1, 1, 1, 1]
    here.close()
    there.close()
