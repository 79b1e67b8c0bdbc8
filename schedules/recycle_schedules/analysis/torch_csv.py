"""Plans in the CSV notation of torch.distributed.pipelining: one row per stage, actions like 2F0, 2I0, 2W0, 2B0.

    Path("plan.csv").write_text(torch_csv(plan))     # read it with _PipelineScheduleRuntime._load_csv

The CSV contains compute actions only. torch adds the communication. If the plan has several pipelines, the CSV shows
one of them.
"""

from __future__ import annotations

from ..ops import Worker
from ..plans import Plan


def torch_csv(plan: Plan, pipeline: int = 0) -> str:
    """The CSV of one pipeline. Raises ValueError if the pipeline is re-routed, which torch's notation cannot
    express."""
    rows = []
    for stage in range(plan.problem.stages):
        ops = [op for op in plan.of(Worker(pipeline, stage)) if op.microbatch is not None]
        if Worker(pipeline, stage) in plan.problem.dead or any(op.microbatch[0] != pipeline for op in ops):  # type: ignore[index]
            raise ValueError(
                f"pipeline {pipeline} is re-routed at stage {stage}: only a fault-free plan has a torch CSV"
            )
        rows.append(",".join(f"{stage}{op.kind}{op.microbatch[1]}" for op in ops))  # type: ignore[index]
    return "\n".join(rows) + "\n"
