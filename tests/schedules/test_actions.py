"""Action lists do not deadlock, deliver every tensor in time, and keep the plan's order."""

from collections import defaultdict, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_problems import problems, relaxed, remainders
from recycle_schedules import Action, OpKind, Problem, Worker, actions, plan, unpack


def run(lists, holders, stages, done=()):
    """Executes all lists. Each worker has one strictly ordered channel for all of its messages, like a GPU with one
    stream for messages. A message is transferred when it is the oldest one at both ends. SEND and RECV are posted
    without waiting. An op waits for its inputs.

    Returns the ops that ran, by worker. Fails if a worker is stuck or an input never arrives.
    """
    has = defaultdict(set)
    for tensor, workers in holders.items():
        for w in workers:
            has[w].add(tensor)
    posted, at, ran = {w: deque() for w in lists}, dict.fromkeys(lists, 0), defaultdict(list)
    local = {(w, kind, mb) for kind, mb, w in done}
    moving = True
    while moving:
        moving = False
        for w, todo in lists.items():
            while at[w] < len(todo):
                action = todo[at[w]]
                if action.peer is not None:
                    posted[w].append(action)
                elif action.kind not in ("O", "REDUCE"):
                    if not ready(action, w, has, local, stages):
                        break
                    local.add((w, action.kind, action.microbatch))
                    made = {"F": "F", "I": "B", "B": "B"}.get(action.kind)
                    if made:
                        has[w].add((made, action.microbatch, action.stage))
                    ran[w].append((action.kind, action.microbatch))
                at[w] += 1
                moving = True
        for a, queue in posted.items():
            while queue and queue[0].kind.startswith("SEND"):
                mine, b = queue[0], queue[0].peer
                if not posted[b] or posted[b][0].peer != a or posted[b][0].kind.startswith("SEND"):
                    break
                other = posted[b][0]
                kind = mine.kind[-1]
                assert other.kind == "RECV_" + kind and other.microbatch == mine.microbatch, (mine, other)
                tensor = (kind, mine.microbatch, mine.stage)
                assert tensor in has[a], f"{a} sends {tensor}, which it does not have"
                has[b].add(tensor)
                queue.popleft()
                posted[b].popleft()
                moving = True
    stuck = {w: todo[at[w]] for w, todo in lists.items() if at[w] < len(todo)}
    assert not stuck, stuck
    assert not any(posted.values()), "a message was never matched"
    return ran


def ready(action, w, has, local, stages):
    kind, s, mb, _ = action
    if kind == "F":
        return s == 0 or ("F", mb, s - 1) in has[w]
    if kind == "W":
        return (w, "I", mb) in local
    return (w, "F", mb) in local and (s == stages - 1 or ("B", mb, s + 1) in has[w])


def begun(problem):
    return [(e.op, e.microbatch, e.worker) for e in problem.done or () if e.worker not in problem.dead]


@relaxed
@given(st.data())
def test_a_whole_step_runs_to_its_end(data):
    schedule = plan(data.draw(problems()))
    ran = run(actions(schedule), {}, schedule.problem.stages)
    for worker in schedule.problem.workers():
        assert ran[worker] == [(op.kind, op.microbatch) for op in schedule.of(worker) if op.kind != "O"]


@relaxed
@given(st.data())
def test_a_remainder_runs_to_its_end_from_the_tensors_of_live_workers(data):
    left, holders = data.draw(remainders(plan(data.draw(problems()))))
    schedule = plan(left)
    ran = run(actions(schedule, holders), holders, left.stages, begun(left))
    assert sum(map(len, ran.values())) == sum(op.kind != "O" for op in schedule.ops)


@relaxed
@given(problems())
def test_validation_runs_only_forwards(problem):
    schedule = plan(problem)
    for first in (1, max(problem.counts)):
        lists = actions(schedule, forwards=first)
        assert {a.kind for todo in lists.values() for a in todo} <= {"F", "SEND_F", "RECV_F"}
        ran = run(lists, {}, problem.stages)
        assert sum(map(len, ran.values())) == problem.stages * sum(min(first, m) for m in problem.counts)


@relaxed
@given(problems(optimizer="barrier"))
def test_every_worker_reduces_once_between_its_last_gradient_and_its_optimizer_step(problem):
    for todo in actions(plan(problem)).values():
        kinds = [a.kind for a in todo]
        assert kinds.count("REDUCE") == 1 and kinds[-1] == "O"
        assert not {"W", "B"} & set(kinds[kinds.index("REDUCE") :])


def test_sends_follow_their_producer_and_receives_come_one_op_early():
    todo = actions(plan(Problem(pipelines=1, stages=2, microbatches=4, backward="coupled")))[Worker(0, 1)]
    compute = [a for a in todo if a.peer is None]
    for k, action in enumerate(todo):
        if action.kind == "F" and action.microbatch[1] > 0:
            ahead = compute[compute.index(action) - 1]
            assert todo.index(("RECV_F", 1, action.microbatch, Worker(0, 0))) < todo.index(ahead)
        if action.kind == "B":
            assert todo[k + 1][:3] == ("SEND_B", 1, action.microbatch)


def test_a_tensor_that_its_consumer_already_holds_is_not_sent():
    problem = Problem(
        pipelines=2, stages=2, microbatches=1, failed=[(0, 0)],
        done=[{"op": "F", "microbatch": [0, 0], "stage": 0, "worker": [0, 0], "delivered": True}],
    )  # fmt: skip
    schedule = plan(problem)
    lists = actions(schedule, {("F", (0, 0), 0): [Worker(0, 1)]})
    assert not [a for a in lists[Worker(0, 1)] if a.kind == "RECV_F" and a.microbatch == (0, 0)]


def test_a_tensor_held_by_a_live_worker_is_sent_again_before_anything_else():
    problem = Problem(
        pipelines=2, stages=2, microbatches=1, failed=[(0, 1)],
        done=[{"op": "F", "microbatch": [0, 0], "stage": 0, "worker": [0, 0]}],
    )  # fmt: skip
    assert actions(plan(problem))[Worker(0, 0)][0] == Action(OpKind.SEND_ACTIVATION, 0, (0, 0), Worker(1, 1))


def test_action_lists_round_trip_through_bytes():
    lists = actions(plan(Problem(pipelines=2, stages=2, microbatches=2, failed=[(0, 1)])))
    for worker, todo in lists.items():
        assert unpack(lists.packed(worker)) == todo != []
    assert unpack(lists.packed(Worker(0, 1))) == [], "dead workers must have no actions"
    with pytest.raises(ValueError):
        unpack(b"no table")


def test_a_missing_tensor_is_named():
    problem = Problem(pipelines=1, stages=2, microbatches=1, committed=[0])
    with pytest.raises(ValueError, match=r"F of micro-batch \(0, 0\) on 0.1"):
        actions(plan(problem))
