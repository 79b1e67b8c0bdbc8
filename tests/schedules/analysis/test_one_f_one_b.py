"""Our 1F1B has the same actions as torch.distributed.pipelining's."""

from unittest.mock import MagicMock

import pytest
from recycle_schedules import KINDS, Problem, Worker
from recycle_schedules.analysis.one_f_one_b import one_f_one_b
from recycle_schedules.validate import validate


@pytest.fixture
def schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torch_actions(schedules, stages, stage, microbatches):
    """The forwards and backwards that Schedule1F1B calls on a stage, recorded without processes or tensors."""
    ran = []

    stage_ = MagicMock(stage_index=stage)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage_, name).return_value = []
    stage_.forward_one_chunk.side_effect = lambda index, *_, **__: ran.append(f"{stage}F{index}")
    stage_.backward_one_chunk.side_effect = lambda index, **_: ran.append(f"{stage}B{index}")
    schedule = MagicMock(_n_microbatches=microbatches, _num_stages=stages, _stage=stage_)
    schedule._check_inputs.return_value = [()] * microbatches, [{}] * microbatches
    schedules.Schedule1F1B._step_microbatches(schedule)
    return ran


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (4, 6), (4, 16), (8, 8), (4, 2)])
def test_1f1b_equals_that_of_torch(stages, microbatches, schedules):
    ours = one_f_one_b(Problem(pipelines=1, stages=stages, microbatches=microbatches, durations={"F": 1, "B": 2}))
    for stage in range(stages):
        mine = [f"{stage}{op.kind}{op.microbatch[1]}" for op in ours.of(Worker(0, stage)) if op.kind != "O"]
        assert mine == torch_actions(schedules, stages, stage, microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 6), (8, 8)])
def test_1f1b_equals_torchs_pipeline_order(stages, microbatches, schedules):
    """torch's pipeline order counts the last stage's micro-batches from 1, so the test skips that stage."""

    class Shape:  # the attributes that _get_pipeline_order reads
        _num_stages, _n_microbatches = stages, microbatches

    theirs = schedules.Schedule1F1B._get_pipeline_order(Shape())
    ours = one_f_one_b(Problem(pipelines=1, stages=stages, microbatches=microbatches))
    for stage in range(stages - 1):
        compute = [str(a) for a in theirs[stage] if a is not None and a.computation_type.value in KINDS]
        mine = [f"{stage}{op.kind}{op.microbatch[1]}" for op in ours.of(Worker(0, stage)) if op.kind != "O"]
        assert mine == compute


def test_1f1b_takes_three_slots_times_microbatches_plus_stages_minus_one():
    plan = one_f_one_b(Problem(pipelines=2, stages=4, microbatches=6, backward="coupled", optimizer="none"))
    assert plan.makespan == 3 * (6 + 4 - 1)
    assert validate(plan) == []


def test_1f1b_is_rejected_for_pipelines_with_dead_workers():
    with pytest.raises(ValueError, match="fault-free"):
        one_f_one_b(Problem(pipelines=2, stages=2, microbatches=2, failed=[(0, 0)]))
