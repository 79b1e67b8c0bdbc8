"""Conversion of other machines' times to this machine's clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.linux.processes import boot_id
from recycle_pp.timing.clocks import KEPT, Clocks

DELAYS = st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=KEPT)


def test_processes_of_one_machine_share_their_clock():
    clocks = Clocks()
    clocks.observe("0.1", boot_id(), now=5.0, arrived=5.3)
    assert clocks.local("0.1", 7.0) == 7.0


@given(offset=st.floats(-1e6, 1e6), delays=DELAYS)
def test_the_error_of_another_machines_clock_is_the_shortest_delay(offset, delays):
    clocks = Clocks()
    for k, delay in enumerate(delays):
        clocks.observe("0.1", "another", now=k + offset, arrived=k + delay)
    assert clocks.local("0.1", 3.0 + offset) == pytest.approx(3.0 + min(delays), abs=1e-6)


def test_the_offset_follows_a_drifting_clock():
    clocks = Clocks()
    for k in range(10_000):
        clocks.observe("0.1", "another", now=k * 1.00005, arrived=k + 0.001)
    assert clocks.local("0.1", 9_999 * 1.00005) == pytest.approx(9_999, abs=0.005)


@pytest.mark.parametrize("offset", [-1e6, 1e6])
def test_a_worker_that_moves_to_another_machine_has_the_clock_of_that_machine(offset):
    clocks = Clocks()
    for k in range(KEPT):
        clocks.observe("0.1", "another", now=k, arrived=k + 0.001)
    clocks.observe("0.1", "third", now=100.0 + offset, arrived=100.001)
    assert clocks.local("0.1", 101.0 + offset) == pytest.approx(101.0, abs=0.01)
