"""When a rank starts its standby process."""

import sys

import pytest

from recycle_pp.config.settings import Run, Settings
from recycle_pp.supervisor import standby
from recycle_pp.supervisor.standby import BEATS, Standby
from recycle_pp.wire.launch import Launch
from recycle_pp.wire.messages.activity import Activity
from recycle_pp.wire.messages.supervisors import Signs


@pytest.fixture(autouse=True)
def light(monkeypatch):
    """Simulates a supervisor, which never imports torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def of(local_rank, wanted="on"):
    launch = Launch(rank=local_rank, world=4, local_rank=local_rank, local_world=4)
    return Standby(launch, Settings(run=Run(standby=wanted)))


def beats(standby, incarnation, steps):
    """Indices of the heartbeats at which the standby process is due. steps: the worker's step at each heartbeat."""
    signs = [Signs(incarnation, 1, Activity("works", "F", step), 0.0, 0.0) for step in steps]
    return [number for number, sign in enumerate(signs) if standby.due(sign)]


@pytest.mark.parametrize("local_rank", range(4))
def test_at_the_start_the_ranks_of_a_machine_take_turns_after_their_first_step(local_rank):
    assert beats(of(local_rank), 0, [-1, 0, 0, *range(1, 40)]) == [3 + BEATS * local_rank]


@pytest.mark.parametrize("local_rank", range(4))
def test_after_a_replacement_the_next_standby_process_starts_after_one_step(local_rank):
    ours = of(local_rank)
    beats(ours, 0, range(40))
    assert beats(ours, 1, [-1, 40, 40, 41, 42, 43]) == [3]
    assert beats(ours, 2, [50, 51, 52]) == [1]


def test_no_standby_process_is_started_if_memory_is_short_or_the_user_disables_it(monkeypatch):
    assert beats(of(0, "off"), 0, range(40)) == []
    monkeypatch.setattr(standby, "free_memory", lambda: 0.0)
    assert beats(of(0, "auto"), 0, range(40)) == [] and beats(of(0, "on"), 0, range(40)) == [1]
