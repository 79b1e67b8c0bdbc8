"""Nodes behind a cut link return by themselves or with +join, but only when the link works again."""

import re
import time

import pytest

from . import network, nodes
from .harness import Case, explain

_missing = network.missing()
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(_missing is not None, reason=str(_missing))]
slow = pytest.mark.slow
QUICK = ("control.suspicion=2",)
SECONDS = 0.02  # one-way delay, which slows the steps down so that the job outlasts the cut


def check_full_strength(job, newcomer, runs):
    """Checks the weights, losses and samples, and that both workers of node 2 died once and returned once."""
    job.wait_for_event("rejoined", 60, nth=2)
    outcome = job.outcome()
    assert newcomer.agent.wait(30) == 0, job.output
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    for event in ("death_detected", "rejoined"):
        assert sorted(e["worker"] for e in outcome.all(event)) == ["2.0", "2.1"], explain(outcome)


@slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("seconds", [8, 60])
def test_a_node_that_left_because_of_a_cut_link_returns_when_the_link_works_again(seconds, zygote, runs, tmp_path):
    case = Case(f"a link is cut for {seconds} s", "3x2", QUICK, steps=60 + 8 * seconds, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.network.weather(delay=SECONDS)
        job.wait_for_step(5)
        job.network.cut(job.nodes[1].machine, job.nodes[2].machine)
        begun = time.monotonic()
        job.wait_for_event("death_detected", nth=2)
        newcomer = job.join()  # rejected during the cut, with the reason
        assert newcomer.agent.wait(60) == 2, job.output
        assert re.search("no node of the job is lost: node[12] cannot reach node[12]", newcomer.agent.output), (
            job.output
        )
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        assert not job.events("link_restored") and not job.events("finished")
        job.network.heal()
        job.wait_for_event("rejoined", 60, nth=2)
        outcome = job.outcome()
        assert job.nodes[2].agent.wait(30) == 0, job.output
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    left = sorted(e["worker"] for e in outcome.all("death_detected"))
    assert left == sorted(e["worker"] for e in outcome.all("link_restored")), explain(outcome)
    assert left == sorted(e["worker"] for e in outcome.all("rejoined")), explain(outcome)


@slow
def test_a_node_that_joins_while_its_link_is_cut_takes_part_when_the_link_works_again(zygote, runs, tmp_path):
    case = Case("a node joins while a link is cut", "3x2", QUICK, steps=700, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.network.weather(delay=SECONDS)
        job.wait_for_step(5)
        job.nodes[2].machine.kill()
        job.wait_for_event("death_detected", nth=2)
        machine = job.network.machine("node3")
        job.network.cut(job.nodes[1].machine, machine)
        newcomer = job.join(machine)
        begun = time.monotonic()
        while "this node cannot reach node1 (" not in newcomer.agent.output:
            assert time.monotonic() < begun + 60, job.output
            time.sleep(0.1)
        time.sleep(max(0.0, begun + 60 - time.monotonic()))
        assert not job.events("node_joined") and not job.events("finished")
        job.network.heal()
        check_full_strength(job, newcomer, runs)


@slow
def test_a_node_that_was_cut_off_for_a_minute_can_join_again(zygote, runs, tmp_path):
    case = Case("a node is cut off for 60 s", "3x2", QUICK, steps=700, deaths=2)
    with nodes.start(case, tmp_path, zygote) as job:
        job.network.weather(delay=SECONDS)
        job.wait_for_step(5)
        job.network.cut(job.nodes[2].machine)
        begun = time.monotonic()
        assert job.nodes[2].agent.wait(60) == 1, job.output
        time.sleep(max(0.0, begun + 60 - time.monotonic()))
        job.network.heal()
        check_full_strength(job, job.join(job.nodes[2].machine), runs)


@slow
def test_a_cut_that_is_healed_within_suspicion_costs_no_worker(zygote, runs, tmp_path):
    case = Case("a link is cut for 3 s", "3x2", ("control.suspicion=6",), steps=60, deaths=0)
    with nodes.start(case, tmp_path, zygote) as job:
        job.wait_for_step(5)
        job.network.cut(job.nodes[1].machine, job.nodes[2].machine)
        time.sleep(3)
        job.network.heal()
        outcome = job.outcome()
    assert outcome.code == 0, explain(outcome)
    runs.check_exact(outcome)
    assert not outcome.all("death_detected"), explain(outcome)
