"""Which workers leave if only some pairs of workers cannot reach each other."""

from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.protocol.partition_resolution import workers_to_evict

WORKERS = [Worker(d, s) for d in range(3) for s in range(2)]
MANY = [Worker(d, s) for d in range(9) for s in range(2)]
COMPLAINTS = st.dictionaries(st.sampled_from(WORKERS), st.lists(st.sampled_from(WORKERS)))


def test_of_two_nodes_that_cannot_reach_each_other_the_higher_one_leaves():
    one, two = ([Worker(d, s) for s in range(2)] for d in (1, 2))
    says_one, says_two = dict.fromkeys(one, two), dict.fromkeys(two, one)
    for complaints in (says_one, says_two, says_one | says_two):
        assert workers_to_evict(complaints, MANY) == set(two)


def test_only_the_worker_that_reaches_no_other_leaves():
    alone = Worker(0, 1)
    others = [worker for worker in WORKERS if worker != alone]
    assert workers_to_evict({worker: [alone] for worker in others}, MANY) == {alone}
    assert workers_to_evict({alone: others}, MANY) == {alone}
    assert workers_to_evict({}, MANY) == set()


@given(COMPLAINTS)
def test_the_remaining_workers_all_reach_each_other(complaints):
    complaints = {worker: [o for o in others if o != worker] for worker, others in complaints.items()}
    lost = workers_to_evict(complaints, MANY)
    assert all(worker in lost or other in lost for worker, others in complaints.items() for other in others)
    assert lost <= {w for worker, others in complaints.items() for w in (worker, *others) if others}


def test_the_fewest_workers_leave_regardless_of_rank():
    one, two = [Worker(1, s) for s in range(2)], [Worker(d, s) for d in (2, 3) for s in range(2)]
    assert workers_to_evict(dict.fromkeys(two, one), WORKERS + two) == set(one)


def test_the_last_worker_of_a_stage_never_leaves():
    cut = {Worker(0, 0): [Worker(1, 0)]}
    assert workers_to_evict(cut, [Worker(0, 0), Worker(1, 0), Worker(0, 1)]) == {Worker(1, 0)}
    lonely = {Worker(0, 0): [Worker(1, 1)]}
    assert workers_to_evict(lonely, [Worker(0, 0), Worker(0, 1), Worker(1, 1)]) == {Worker(1, 1)}
    assert workers_to_evict(lonely, [Worker(0, 0), Worker(1, 1)]) == set()


def test_two_large_nodes_that_cannot_reach_each_other_are_decided_at_once():
    one, two = ([Worker(d, s) for d in range(k, k + 8) for s in range(8)] for k in (0, 8))
    assert workers_to_evict(dict.fromkeys(one, two), one + two) == set(two)
