"""A worker without progress is stuck; a worker that waits, or runs on a busy machine, is not."""

from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.protocol.hangs import COORDINATOR, PROFILED, Patience, Sign, judge, read_limit
from recycle_pp.wire.messages.activity import BUSY, Activity

PATIENCE = Patience(suspicion=10.0, lease=600.0)
A, B, C, D = Worker(0, 0), Worker(0, 1), Worker(1, 0), Worker(1, 1)
WORKERS = [Worker(d, s) for d in range(3) for s in range(3)]
LONG = 10.5  # longer than the suspicion

times = st.floats(0, 5000)
works = st.builds(
    Activity, st.just("works"), st.sampled_from(["F", "I", "W", "B", "O", "R", "V", "data", "checkpoint"]),
    st.integers(0, 3), st.just((0, 0)),
)  # fmt: skip
waits = st.builds(
    lambda what, step, peer: Activity("waits", what, step, peer=peer if what == "tensor" else None),
    st.sampled_from(["tensor", "sum", "copy", "commit", "orders", "plan", "links"]),
    st.integers(0, 3),
    st.sampled_from(WORKERS),
)


def frozen(what="F", step=3, seconds=LONG):
    """The sign of a worker whose main thread makes no progress in an op."""
    return Sign(Activity("works", what, step, (0, 0)), seconds, quiet=seconds)


def waiter(what, step=3, peer=None, seconds=LONG):
    return Sign(Activity("waits", what, step, peer=peer), seconds, quiet=seconds)


@st.composite
def jobs(draw, of=works | waits):
    """Signs of nine workers with random activities, consistent or not. All answer, and no message has arrived."""
    return {
        w: Sign(draw(of), draw(times), quiet=draw(times), expected=draw(st.sampled_from([None, 0.02, 4.0])))
        for w in WORKERS
    }


@given(jobs())
def test_a_waiting_worker_is_not_stuck_before_its_message_has_arrived(signs):
    assert all(signs[w].activity.kind != "waits" for w in judge(signs, PATIENCE).stuck)


@given(jobs(), st.data())
def test_the_culprit_is_found_wherever_the_others_wait(signs, data):
    culprit = data.draw(st.sampled_from(WORKERS))
    signs = {w: s for w, s in signs.items() if s.activity.kind == "waits"}
    assert set(judge({**signs, culprit: frozen()}, PATIENCE).stuck) == {culprit}


@given(jobs(), st.data())
def test_on_a_busy_machine_no_worker_is_stuck(signs, data):
    """Threads run or are ready to run. An op may take up to ten times the limit of an idle thread."""
    for worker, sign in signs.items():
        limit = max(PATIENCE.suspicion, PROFILED * (sign.expected or 0.0))
        signs[worker] = replace(
            sign,
            seconds=data.draw(st.floats(0, 0.999)) * BUSY * limit,
            quiet=data.draw(st.floats(0, PATIENCE.suspicion)),
            silent=data.draw(st.floats(0, BUSY * PATIENCE.suspicion)),
            delivered=data.draw(st.none() | st.floats(0, BUSY * PATIENCE.suspicion)),
            unanswered=data.draw(st.none() | st.floats(0, BUSY * PATIENCE.suspicion)),
        )
    assert not judge(signs, PATIENCE).stuck


def test_a_connecting_worker_waits_for_all_workers_that_may_not_have_connected():
    busy = Sign(Activity("works", "F", 3, (0, 0), first=True), 60.0, quiet=60.0)  # it compiles
    assert not judge({A: waiter("links"), B: waiter("links"), C: busy}, PATIENCE).deadlock
    assert judge({A: waiter("links"), B: waiter("links"), C: frozen()}, PATIENCE).stuck.keys() == {C}
    assert judge({A: waiter("links"), B: waiter("links")}, PATIENCE).deadlock == [A, B]


@given(jobs())
def test_a_deadlock_contains_only_workers_that_reach_no_working_one(signs):
    verdict = judge(signs, PATIENCE)
    for worker in verdict.deadlock:
        reached = {worker, *nx.descendants(verdict.graph, worker)}
        assert all(signs[w].activity.kind == "waits" and signs[w].seconds > PATIENCE.suspicion for w in reached)
        assert not verdict.stuck


@given(jobs(of=waits))
def test_all_workers_waiting_for_too_long_are_a_deadlock(signs):
    signs = {
        w: replace(s, seconds=max(LONG, 1.05 * PROFILED * (s.expected or 0.0)) + s.seconds) for w, s in signs.items()
    }
    assert set(judge(signs, PATIENCE).deadlock) == set(WORKERS)


@pytest.mark.parametrize(("link", "deadlock"), [(None, True), (0.5, True), (4.0, False)])
def test_a_message_on_a_slow_link_is_lost_after_ten_times_the_links_time(link, deadlock):
    signs = {A: replace(waiter("tensor", peer=B), expected=link), B: replace(waiter("tensor", peer=A), expected=link)}
    assert judge(signs, PATIENCE).deadlock == ([A, B] if deadlock else [])
    assert not judge(signs, PATIENCE).stuck


def test_a_chain_of_waits_leads_to_its_root():
    signs = {A: waiter("commit"), B: waiter("tensor", peer=A), C: frozen("W"), D: waiter("commit")}
    verdict = judge(signs, PATIENCE)
    assert verdict.stuck == {C: ("W of micro-batch 0.0 in step 3", LONG)}
    assert set(verdict.graph.edges) == {(A, B), (A, C), (D, B), (D, C), (B, A)}


def test_a_worker_that_ignores_an_arrived_message_is_stuck_and_not_its_sender():
    signs = {A: waiter("commit"), B: replace(waiter("tensor", peer=A, seconds=30.0), delivered=LONG)}
    (found,) = judge(signs, PATIENCE).stuck.items()
    assert found == (B, ("the wait for the tensor in step 3 from 0.0, although it has arrived", LONG))


def test_an_unfinished_all_reduce_is_a_deadlock_without_a_culprit():
    signs = {A: waiter("sum"), C: waiter("sum"), B: waiter("commit"), D: waiter("commit")}
    verdict = judge(signs, PATIENCE)
    assert not verdict.stuck and set(verdict.deadlock) == {A, B, C, D}


def test_workers_in_a_sum_wait_for_a_peer_that_has_not_begun_it():
    signs = {A: waiter("sum"), C: frozen("B"), B: waiter("commit"), D: waiter("commit")}
    assert set(judge(signs, PATIENCE).stuck) == {C}


def test_a_worker_that_does_not_answer_a_new_generation_is_stuck_in_any_activity():
    silent_line = replace(waiter("tensor", peer=B), unanswered=LONG)
    signs = {A: silent_line, B: replace(frozen(seconds=2.0), quiet=0.0), C: waiter("orders"), D: waiter("orders")}
    assert set(judge(signs, PATIENCE).stuck) == {A}


def test_a_stopped_process_is_stuck_even_in_a_wait():
    stopped = replace(waiter("tensor", peer=A), silent=LONG)
    assert set(judge({A: waiter("commit"), B: stopped}, PATIENCE).stuck) == {B}


def test_there_is_no_deadlock_while_the_coordinator_plans():
    signs = {w: waiter("plan") for w in (A, B, C, D)}
    assert judge(signs, PATIENCE).deadlock
    verdict = judge(signs, PATIENCE, coordinator_works=True)
    assert not verdict.deadlock and (A, COORDINATOR) in verdict.graph.edges


@pytest.mark.parametrize(
    ("sign", "limit"),
    [
        (Sign(Activity(), 0.0), PATIENCE.lease),
        (Sign(Activity(), 0.0, suspended=True), PATIENCE.suspicion),
        (Sign(Activity("works", "F", 0, (0, 0), first=True), 0.0), PATIENCE.lease),
        (Sign(Activity("works", "F", 7, (0, 0)), 0.0, expected=0.02), PATIENCE.suspicion),
        (Sign(Activity("works", "F", 7, (0, 0)), 0.0, expected=4.0), 40.0),
        (Sign(Activity("device", "F", 7, (0, 0)), 0.0, expected=4.0), 40.0),
    ],
)
def test_the_limit_is_the_lease_the_suspicion_or_ten_times_the_profile(sign, limit):
    def is_stuck(seconds, quiet):
        return bool(judge({A: replace(sign, seconds=seconds, quiet=quiet)}, PATIENCE).stuck)

    assert not is_stuck(limit, limit) and is_stuck(limit + 1, limit + 1)
    spins = sign.activity.kind == "device"
    assert is_stuck(limit + 1, 0.0) == spins, "processor time spent waiting for the device is not progress"
    assert not is_stuck(BUSY * limit, 0.0) or spins
    assert is_stuck(BUSY * limit + 1, 0.0), "an endless loop takes processor time, too"


def test_a_waiting_joiner_delays_no_worker():
    joiner = replace(waiter("orders", seconds=100.0), member=False)
    verdict = judge({A: frozen(seconds=1.0), B: waiter("tensor", peer=A), C: joiner}, PATIENCE)
    assert not verdict.stuck and not verdict.deadlock


def reader(seconds, needs=True):
    """The sign of a worker with a slow read. It needs the data, or it waits for a commit and only probes its disk."""
    sign = Sign(Activity("works", "data", 3, (0, 0)), seconds, quiet=seconds) if needs else waiter("commit")
    return replace(sign, reading=seconds)


def test_no_reader_is_stuck_while_the_disks_of_all_are_silent():
    signs = {A: reader(LONG), C: reader(5.0, needs=False), B: waiter("commit"), D: waiter("commit")}
    verdict = judge(signs, PATIENCE)
    assert not verdict.stuck and not verdict.deadlock and verdict.no_disk == [A, C]


def test_a_reader_is_stuck_if_only_its_disk_is_silent():
    verdict = judge({A: reader(LONG), C: reader(0.01, needs=False)}, PATIENCE)
    assert verdict.stuck == {A: ("reading the data of micro-batch 0.0 in step 3", LONG)} and verdict.no_disk == []


def test_a_silent_disk_excuses_no_other_hang():
    signs = {A: reader(LONG), C: replace(frozen("F"), reading=LONG)}
    assert set(judge(signs, PATIENCE).stuck) == {C}


def test_a_reader_in_a_job_that_reads_no_files_is_stuck():
    assert set(judge({A: frozen("data"), C: waiter("commit")}, PATIENCE).stuck) == {A}


@pytest.mark.parametrize("suspicion", [0.1, 1.0, 10.0, 600.0])
def test_all_disks_have_been_tried_before_the_first_reader_would_be_stuck(suspicion):
    """A probe starts within the read limit, so at half of the suspicion it has waited for longer than the limit."""
    assert 0 < 2 * read_limit(suspicion) <= suspicion / 2
