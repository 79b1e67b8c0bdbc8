"""The held-out micro-batches of a validation."""

from collections import Counter

import pytest
from recycle_schedules import Problem, Worker, actions, plan

from recycle_pp.protocol.validation import Validation, numbered, per_pass
from recycle_pp.wire.messages.steps import Evaluated


@pytest.mark.parametrize("total", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("dead", [[], [(0, 1)]])
@pytest.mark.parametrize("D, P, M", [(2, 2, 3), (3, 4, 6), (5, 3, 1), (1, 1, 4)])
def test_every_held_out_micro_batch_passes_every_stage_once_in_any_shape(D, P, M, dead, total):
    problem = Problem(pipelines=D, stages=P, microbatches=M, failed=[w for w in dead if D > 1 and w[1] < P])
    each = per_pass(total, D, M)
    lists = actions(plan(problem), forwards=each)
    ran: Counter[tuple[int, int]] = Counter()
    sent: Counter[tuple[int, int]] = Counter()
    for worker, todo in lists.items():
        for number, action in numbered(todo, D, each, total):
            if action.kind == "F":
                ran[number, worker.stage] += 1
            elif action.kind == "SEND_F":
                sent[number, action.stage] += 1
            else:
                sent[number, action.stage - 1] -= 1
    assert ran == {(number, stage): 1 for number in range(total) for stage in range(P)}
    assert not any(sent.values()), "every sent tensor is received"


def test_few_samples_are_dealt_to_all_pipelines():
    lists = actions(plan(Problem(pipelines=3, stages=1, microbatches=6)), forwards=per_pass(4, 3, 6))
    numbers = {worker: [n for n, _ in numbered(todo, 3, per_pass(4, 3, 6), 4)] for worker, todo in lists.items()}
    assert numbers == {Worker(0, 0): [0, 3], Worker(1, 0): [1], Worker(2, 0): [2]}


def test_the_mean_does_not_depend_on_the_order_or_repetition_of_reports():
    losses = {number: 1 / (number + 3) for number in range(7)}
    found = set()
    for order in ((range(7),), (range(5, 7), range(5)), ([6, 1], [1, 6], [0, 2, 3, 4, 5])):
        validation = Validation()
        validation.begin(9)
        *early, last = [validation.counted(Evaluated(9, {n: losses[n] for n in part}, 7)) for part in order]
        assert not any(early) and validation.step is None
        found.add(last)
    assert len(found) == 1 and found.pop().microbatches == 7
