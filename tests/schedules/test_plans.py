"""Plan and trace files."""

from recycle_schedules import OpArrays, Plan, Problem, Trace, load, plan

WORKED = Problem(pipelines=3, stages=4, microbatches=6, memory_limit={"base": "1f1b", "extra": 2})


def test_plans_and_traces_round_trip_through_files(tmp_path):
    best = plan(WORKED)
    best.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json")
    assert type(again) is Plan and list(again.ops) == list(best.ops) and again.period == best.period
    trace = Trace(WORKED, OpArrays.of(WORKED, best.ops), generation=3, phases={"detected": 1.5}, layout=(9, 9, 5, 9))
    trace.save(tmp_path / "trace.json")
    again = load(tmp_path / "trace.json")
    assert type(again) is Trace and again.generation == 3 and again.phases == {"detected": 1.5}
    assert again.layout == (9, 9, 5, 9)
