"""Plans in torch's CSV notation."""

import pytest
from recycle_schedules import Problem, plan
from recycle_schedules.analysis.torch_csv import torch_csv

WORKED = Problem(pipelines=3, stages=4, microbatches=6, memory_limit={"base": "1f1b", "extra": 2})


def test_torch_reads_our_csv():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    problem = Problem(pipelines=1, stages=4, microbatches=6, backward="decoupled")
    rows = [[schedules._Action.from_str(a) for a in row.split(",")] for row in torch_csv(plan(problem)).splitlines()]
    orders = dict(enumerate(rows))
    schedules._validate_schedule(orders, pp_group_size=4, num_stages=4, num_microbatches=6)
    with pytest.raises(ValueError, match="fault-free"):
        torch_csv(plan(WORKED.replace(failed=[(1, 2)])), pipeline=1)
