"""The chart, from which all pictures are drawn."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import KINDS, Trace, Worker, plan

from recycle_pp.drawing.chart import CUT, LOST, REDONE, REROUTED, Chart, shown_pipelines, shown_rows
from recycle_pp.drawing.measures import Measures, overhead

from .examples import DEAD, one_f_one_b, recovered, shape

JUDGE = Path(__file__).parents[4] / "shared" / "tools"


def names(chart: Chart, bit: int) -> list[tuple[str, str]]:
    return [(str(chart.workers[chart.row[i]]), chart.name(int(i))) for i in np.flatnonzero(chart.marks & bit)]


def test_only_ops_that_leave_their_pipeline_are_marked_rerouted() -> None:
    chart = Chart.of(one_f_one_b(shape((DEAD,))))
    moved = names(chart, REROUTED)
    assert {worker for worker, _ in moved} == {"2.2"}
    assert {op for _, op in moved} == {f"2{kind}{g}" for kind in "FIW" for g in range(6, 12)}
    assert not Chart.of(one_f_one_b(shape())).marks.any()


def test_with_known_hosts_rows_are_named_after_them_and_tensors_between_them_are_counted() -> None:
    hosts = [["a", "a", "b", "b"], ["a", "a", "b", "b"], ["c", "c", "c", "c"]]
    problem = shape()
    linked = problem.replace(links={"hosts": hosts, "between_hosts": {"latency": 0.1}})
    chart = Chart.of(plan(linked))
    assert chart.names[:3] == ["0.0 a", "0.1 a", "0.2 b"] and chart.names[-1] == "2.3 c"
    there_and_back = 2 * (linked.counts[0] + linked.counts[1])
    assert Measures.of(chart).between_hosts == there_and_back
    assert Chart.of(plan(problem)).names[0] == "0.0" and Measures.of(Chart.of(plan(problem))).between_hosts is None


def test_a_trace_shows_cut_lost_and_redone_ops_and_their_workers() -> None:
    chart = Chart.of(recovered())
    lost, redone = names(chart, LOST), names(chart, REDONE)
    assert names(chart, CUT) == [("1.2", "2W7")]
    assert {w for w, _ in lost} == {"1.2"} and {w for w, _ in redone} == {"0.2", "2.2"}
    assert sorted(op for _, op in lost) == sorted(op for _, op in redone) != []


def test_the_death_and_every_phase_are_on_the_time_axis_of_the_ops() -> None:
    chart = Chart.of(recovered(death=213.0, stall=40.0))
    r = chart.recovery
    assert r and r.workers == (DEAD,) and r.died == 213.0 and r.stall == pytest.approx(40.0)
    assert [name for name, _, _ in r.spans()] == [
        *("detected", "announced", "unblocked", "regrouped", "planned", "resumed")
    ]
    assert r.spans()[0][1] == 213.0 and r.spans()[-1][2] == 253.0
    assert chart.dead_from == {6: 213.0}


def test_a_death_of_unknown_time_is_drawn_at_the_end_of_the_dead_workers_last_op() -> None:
    trace = recovered(death=213.0)
    phases = {k: t for k, t in trace.phases.items() if k != "died"}
    again = Trace(trace.problem, trace.arrays, 0.0, "ms", generation=1, status=trace.status, phases=phases)
    r = Chart.of(again).recovery
    assert r and r.died == 213.0


def test_only_deaths_in_this_step_are_marked() -> None:
    """This also holds if the worker had run no op yet in this step, but workers that had died before had run some."""
    trace = recovered(death=213.0)
    both = trace.problem.replace(failed=[Worker(1, 2), Worker(0, 1)])
    died = Trace(
        both, trace.arrays, 0.0, "ms", generation=1, status=trace.status, phases=trace.phases, died=(Worker(0, 1),)
    )
    again = Trace.from_json(died.to_json())
    assert again.died == (Worker(0, 1),)
    assert Chart.of(again).recovery.workers == (Worker(0, 1),)


def test_seconds_are_shown_as_milliseconds_in_every_figure() -> None:
    slots = one_f_one_b(shape())
    a = slots.arrays
    seconds = type(a)(a.kind, a.microbatch, a.stage, a.pipeline, 7 + a.start * 0.02, 7 + a.end * 0.02)
    chart = Chart.of(Trace(shape(scale=0.02), seconds, 0.5, "s"))
    assert chart.unit == "ms" and chart.start.min() == 0
    assert chart.span == pytest.approx(20 * slots.makespan) == pytest.approx(chart.plan.makespan)
    assert chart.plan.lower_bound == 500 and chart.problem.per_stage("F")[0] == 20


def test_every_boundary_tensor_is_a_link_from_an_earlier_op_of_a_neighbouring_stage() -> None:
    chart = Chart.of(one_f_one_b(shape((DEAD,))))
    sender, receiver = chart.links
    assert len(sender) == 2 * 18 * 3  # F and I of 18 micro-batches over 3 boundaries
    assert (chart.microbatch[sender] == chart.microbatch[receiver]).all()
    way = np.where(chart.kind[receiver] == 0, 1, -1)
    assert (chart.row[receiver] % 4 - chart.row[sender] % 4 == way).all()


def test_a_link_starts_at_the_op_run_before_its_consumer() -> None:
    chart = Chart.of(recovered())
    sender, receiver = chart.links
    for a, b in zip(sender, receiver, strict=True):
        if chart.marks[b] & REDONE and KINDS[chart.kind[b]] == "F":
            assert chart.workers[chart.row[a]] == Worker(1, 1)
    lost = [a for a in sender if chart.marks[a] & LOST]
    assert lost, "tensors that the dead worker had sent are used"


def test_equal_pipelines_are_drawn_once_with_a_note() -> None:
    chart = Chart.of(one_f_one_b(shape((Worker(4, 1),), (64, 4, 8))))
    assert sorted(map(len, chart.alike())) == [1, 1, 62]
    shown, notes = shown_pipelines(chart, 12)
    assert shown == [0, 4, 5] and notes == ["pipeline 0 represents 62 equal pipelines (0-3, 6-63)"]
    shown, notes = shown_pipelines(chart, 4)
    assert shown == [4] and notes == ["63 of 64 pipelines are not shown (0-3, 5-63)"]
    assert shown_pipelines(chart, 64 * 4) == (list(range(64)), [])


def test_the_figures_of_1f1b_agree_with_the_formula() -> None:
    m = Measures.of(Chart.of(one_f_one_b(shape())))
    assert m.makespan == 3 * (6 + 4 - 1)
    assert m.bubble == pytest.approx((1 / 3,) * 4) and m.peak == (4, 3, 2, 1)


def test_an_overhead_compares_periods_or_makespans_but_never_mixes_them() -> None:
    fast, slow = one_f_one_b(shape()), one_f_one_b(shape((DEAD,)))
    assert overhead(slow, fast) == pytest.approx(slow.makespan / fast.makespan - 1)
    trace = recovered()
    assert overhead(trace, trace) == 0


@pytest.mark.skipif(not JUDGE.is_dir(), reason="the schedule judge is not next to this repository")
@pytest.mark.parametrize("failed", [(), (DEAD,), (Worker(0, 0), Worker(2, 3))])
def test_bubbles_and_peaks_agree_with_the_independent_judge(failed: tuple[Worker, ...]) -> None:
    sys.path.insert(0, str(JUDGE))
    from validate_schedule import validate  # type: ignore[import-not-found]

    made = plan(shape(failed).replace(memory_limit={"base": "1f1b", "extra": 2}, i_release=0.25))
    m, data = Measures.of(Chart.of(made)), made.to_json()
    judged = validate(json.loads(json.dumps(data["problem"])), data["ops"])
    assert judged["ok"], judged["errors"]
    assert list(m.peak) == pytest.approx(judged["metrics"]["peak_by_stage"])
    assert m.period == pytest.approx(judged["metrics"]["period"])
    live = [len(p) for p in made.problem.live]
    busy = 1 - np.average(m.bubble, weights=live) - sum(3 * n for n in live) / (m.period or 0) / sum(live)
    assert 1 - busy == pytest.approx(judged["metrics"]["bubble_ratio_period"])  # the judge counts O as idle


@given(
    pipelines=st.integers(2, 40), stages=st.integers(1, 12), most=st.integers(4, 64), dead=st.sets(st.integers(0, 400))
)
def test_shown_rows_start_with_stages_with_deaths_and_every_row_is_drawn_or_counted(
    pipelines: int, stages: int, most: int, dead: set[int]
) -> None:
    rows = {row % (pipelines * stages) for row in dead} if len(dead) < pipelines // 2 else set()
    failed = tuple(Worker(*divmod(row, stages)) for row in sorted(rows))
    chart = Chart.of(one_f_one_b(shape(failed, (pipelines, stages, 2))))
    groups, notes = shown_rows(chart, most)
    shown = [row for group in groups for row in group]
    assert len(set(shown)) == len(shown) and all(groups)
    if pipelines * stages <= most:
        assert shown == list(range(pipelines * stages)) and notes == []
    elif rows:
        hit = {row % stages for row in rows}
        assert groups[0][0] % stages in hit and rows & set(groups[0])
        assert len(shown) <= max(most, 2 + len(hit))
        others = [row for row in shown if row % stages not in hit]
        folded = re.search(r"(\d+) workers are folded", notes[-1])
        assert (int(folded[1]) if folded else 0) == pipelines * (stages - len(hit)) - len(others)
