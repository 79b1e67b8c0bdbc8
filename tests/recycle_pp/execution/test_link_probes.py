"""Links are measured in pairs over the real transport. A death ends the measurement."""

import time

import pytest
import torch

from recycle_pp.comm.gloo.group import GlooGroup
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.waiting import LinkBroken
from recycle_pp.execution.link_probes import measure
from recycle_pp.testing.rehearsal import Rehearsal, grid

CPU = torch.device("cpu")
MEMBERS = grid(3, 2)


def everybody_with_everybody(node):
    """Measures the links between each worker and all workers of the other stage, as if each had its own host."""
    if node.receive() == ("gloo",):
        node.links._transport = GroupTransport(node.store, CPU, 1800.0, GlooGroup)
    node.links.rebuild(0, node.members, node.me)
    partners = {f"host of {m}": m for m, w in reversed(node.members.items()) if w.stage != node.worker.stage}
    begun = time.perf_counter()
    found = measure(node.links, node.me, partners, CPU)
    node.report((time.perf_counter() - begun, found))


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_all_links_are_measured_in_any_order_of_partners(backend):
    with Rehearsal(MEMBERS, everybody_with_everybody) as play:
        play.send(backend)
        reports = dict(play.reports(len(MEMBERS)))
    for member, (seconds, found) in reports.items():
        others = [f"host of {m}" for m, w in MEMBERS.items() if w.stage == 1] if MEMBERS[member].stage == 0 else []
        assert sorted(found) == sorted(others)
        for latency, bandwidth in found.values():
            assert 0 < latency < 0.1 and bandwidth > 1e6
        assert seconds < 5


def until_it_is_over(node):
    node.links.rebuild(0, node.members, node.me)
    node.report("built")
    if node.me == 1:
        node.receive()  # the other waits for this member
    try:
        measure(node.links, node.me, {"there": 1 - node.me}, CPU)
    except LinkBroken:
        node.report("broken")


def test_the_death_of_a_partner_ends_the_measurement():
    with Rehearsal(grid(1, 2), until_it_is_over) as play:
        play.reports(2)
        play.kill(1)
        assert play.reports(1) == [(0, "broken")]
