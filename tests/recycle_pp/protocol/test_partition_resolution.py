"""Who goes when the network is broken between some workers and not between others."""

from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.protocol.partition_resolution import give_up

WORKERS = [Worker(d, s) for d in range(3) for s in range(2)]
COMPLAINTS = st.dictionaries(st.sampled_from(WORKERS), st.lists(st.sampled_from(WORKERS)))


def test_of_two_nodes_that_cannot_reach_each_other_the_higher_goes_whoever_says_so():
    one, two = ([Worker(d, s) for s in range(2)] for d in (1, 2))
    says_one, says_two = dict.fromkeys(one, two), dict.fromkeys(two, one)
    assert give_up(says_one) == give_up(says_two) == give_up(says_one | says_two) == set(two)


def test_who_reaches_nobody_goes_and_nobody_else():
    alone = Worker(0, 1)
    others = [worker for worker in WORKERS if worker != alone]
    assert give_up({worker: [alone] for worker in others}) == {alone}
    assert give_up({alone: others}) == {alone}
    assert give_up({}) == set()


@given(COMPLAINTS)
def test_afterwards_everybody_reaches_everybody(complaints):
    complaints = {worker: [o for o in others if o != worker] for worker, others in complaints.items()}
    lost = give_up(complaints)
    assert all(worker in lost or other in lost for worker, others in complaints.items() for other in others)
    assert lost <= {w for worker, others in complaints.items() for w in (worker, *others) if others}
