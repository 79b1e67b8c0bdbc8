"""When the workers get the plan for steps without a failure."""

from recycle_schedules import Problem, Worker, actions, plan, unpack

from recycle_pp.protocol.assignment import initial
from recycle_pp.protocol.steady_state_plan import Steady

PROBLEM = Problem(pipelines=2, stages=2, microbatches=2)
SLOWER = PROBLEM.replace(durations={"F": 2.0})


def begun():
    steady = Steady(plan, validation=1)
    steady.adopted(PROBLEM)
    return steady


def send(steady):
    return dict(steady.send(initial(2, 2), generation=0))


def followed():
    steady = begun()
    steady.made(steady.plan(PROBLEM), PROBLEM)
    send(steady)
    return steady


def test_a_generation_waits_for_its_plan_and_gets_it_once():
    steady = begun()
    assert steady.wanted and not steady.ready
    steady.made(steady.plan(PROBLEM), PROBLEM)
    assert steady.ready and not steady.wanted
    lists = send(steady)
    assert unpack(lists[1].steady) == actions(plan(PROBLEM))[Worker(0, 1)]
    assert {a.microbatch for a in unpack(lists[1].forward)} == {(0, 0)}
    assert not steady.ready and not steady.fresh


def test_the_same_members_need_no_new_plan():
    steady = followed()
    steady.adopted(PROBLEM)
    assert steady.ready and not steady.wanted


def test_a_plan_for_other_members_is_not_used():
    steady = followed()
    steady.adopted(SLOWER)
    steady.made(steady.plan(PROBLEM), SLOWER)
    assert steady.wanted and not steady.ready


def test_new_durations_delay_no_worker_before_their_plan_is_made():
    steady = followed()
    steady.wanted = True
    assert not steady.fresh and not steady.due
    steady.made(steady.plan(SLOWER), SLOWER)
    assert steady.fresh and not steady.ready, "the new plan waits for a commit"
    steady.due = True
    send(steady)
    assert not steady.fresh
