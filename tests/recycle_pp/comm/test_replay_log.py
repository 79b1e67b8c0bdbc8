"""The log of tensors sent in uncommitted steps."""

import pytest
import torch

from recycle_pp.comm.replay_log import ReplayLog

ACTIVATION = ("F", (0, 3), 1)


def test_sent_tensors_are_kept_until_the_step_is_committed():
    log = ReplayLog()
    tensors = [torch.zeros(4, 8), torch.ones(2)]
    log.keep(7, ACTIVATION, tensors)
    assert log.get(7, ACTIVATION)[0] is tensors[0] and (7, ACTIVATION) in log and (8, ACTIVATION) not in log
    log.drop(7)
    assert (7, ACTIVATION) not in log and not log.steps()
    with pytest.raises(KeyError):
        log.get(7, ACTIVATION)


def test_tensors_offloaded_to_the_host_come_back_unchanged():
    log, first, second = ReplayLog(on_host=True), torch.rand(4, 8), torch.rand(2)
    log.keep(7, ACTIVATION, [first])
    assert log.get(7, ACTIVATION)[0] is first, "the tensor is sent right after it is made"
    log.keep(7, ("B", (0, 3), 1), [second])
    (again,) = log.get(7, ACTIVATION)
    assert again is not first and torch.equal(again, first)
    again.zero_()
    assert torch.equal(log.get(7, ACTIVATION)[0], first), "a tensor can be read a second time"


@pytest.mark.parametrize("on_host", [False, True])
def test_the_log_counts_its_bytes(on_host):
    log = ReplayLog(on_host)
    log.keep(7, ACTIVATION, [torch.zeros(3, 8), torch.zeros(8)])
    log.keep(7, ("B", (0, 3), 1), [torch.zeros(4, 8, dtype=torch.bfloat16)])
    log.keep(8, ACTIVATION, [torch.zeros(2)])
    assert log.bytes == 128 + 64 + 8
    log.keep(7, ACTIVATION, [torch.zeros(1)])  # a redone op replaces the first tensor
    assert log.bytes == 4 + 64 + 8
    log.drop(7)
    log.drop(7)
    assert log.bytes == 8 and log.peak == 200
