"""Planning ahead: what-if, Failure Normalization, the store of plans, and other views of a plan."""

from itertools import pairwise

import networkx as nx
import pytest
from recycle_schedules import OpArrays, Plan, Problem, Trace, Worker, load, plan
from recycle_schedules.graph import peers, route, stage_graph, without
from recycle_schedules.normalize import normalize
from recycle_schedules.simulate import simulate
from recycle_schedules.store import PlanStore
from recycle_schedules.torch_csv import torch_csv
from recycle_schedules.validate import validate
from recycle_schedules.what_if import what_if

WORKED = Problem(pipelines=3, stages=4, microbatches=6, memory_limit={"base": "1f1b", "extra": 2})


def test_what_if_has_a_row_for_every_worker_and_names_the_thinnest_stage():
    table = what_if(WORKED.replace(failed=[(0, 2)]))
    assert [row.worker for row in table.rows] == WORKED.replace(failed=[(0, 2)]).workers()
    assert (table.thinnest, table.left) == (2, 2)
    hurt = {row.worker: row.period for row in table.rows}
    assert hurt[Worker(1, 2)] > hurt[Worker(1, 1)] >= table.now.value
    for row in table.rows:
        assert row.peak <= row.limit and row.peer.stage == row.worker.stage


def test_what_if_says_where_nobody_would_be_left():
    table = what_if(Problem(pipelines=2, stages=2, microbatches=2, failed=[(0, 1)]))
    gone = [row for row in table.rows if row.period is None]
    assert [row.worker for row in gone] == [Worker(1, 1)] and not gone[0].fits


def test_what_if_plans_within_the_bytes_that_are_there():
    table = what_if(WORKED, microbatch_bytes=1e9, capacity=4e9)
    assert all(row.peak <= 4 and row.bytes <= 4e9 for row in table.rows)


def test_three_deaths_at_one_stage_are_spread():
    """96 slots with 3 of 4 dead at one stage, 33 spread over stages (the paper's technique, our arithmetic)."""
    problem = Problem(pipelines=4, stages=4, microbatches=8, failed=[(0, 1), (1, 1), (2, 1)])
    best = normalize(problem, horizon=100, move_cost=10.0)
    assert best.before == 96 and best.period == 33
    assert sorted(best.deaths) == [0, 1, 1, 1]
    moved = set(problem.dead) - {to for _, to in best.moves} | {who for who, _ in best.moves}
    assert all(who in problem.workers() and to in problem.dead for who, to in best.moves)
    assert validate(plan(problem.replace(failed=sorted(moved)))) == []


def test_moves_that_cost_more_than_they_save_are_not_made():
    problem = Problem(pipelines=4, stages=4, microbatches=8, failed=[(0, 1), (1, 1), (2, 1)])
    assert normalize(problem, horizon=1, move_cost=1000.0).moves == []


def test_the_store_finds_a_plan_for_every_single_death_again_after_a_restart(tmp_path):
    PlanStore(tmp_path, WORKED).fill(failures=2)
    store = PlanStore(tmp_path, WORKED)
    for worker in WORKED.workers():
        found = store.find({worker})
        assert found.problem.dead == {worker} and validate(found) == []
    assert store.find({Worker(0, 0), Worker(1, 0)}) is None


def test_a_plan_played_back_with_its_own_times_is_itself():
    best = plan(WORKED.replace(failed=[(1, 2)], optimizer="barrier"))
    assert simulate(best).makespan == best.makespan
    assert simulate(best, durations={"F": 2, "I": 2, "W": 2}).makespan == 2 * best.makespan
    assert simulate(best, send=0.5).makespan > best.makespan


def test_plans_and_traces_survive_their_files(tmp_path):
    best = plan(WORKED)
    best.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json")
    assert type(again) is Plan and list(again.ops) == list(best.ops) and again.period == best.period
    trace = Trace(WORKED, OpArrays.of(WORKED, best.ops), generation=3, phases={"detected": 1.5})
    trace.save(tmp_path / "trace.json")
    again = load(tmp_path / "trace.json")
    assert type(again) is Trace and again.generation == 3 and again.phases == {"detected": 1.5}


def test_torch_reads_our_csv():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    problem = Problem(pipelines=1, stages=4, microbatches=6, backward="decoupled")
    rows = [[schedules._Action.from_str(a) for a in row.split(",")] for row in torch_csv(plan(problem)).splitlines()]
    orders = dict(enumerate(rows))
    schedules._validate_schedule(orders, pp_group_size=4, num_stages=4, num_microbatches=6)
    with pytest.raises(ValueError, match="fault-free"):
        torch_csv(plan(WORKED.replace(failed=[(1, 2)])), pipeline=1)


def test_the_stage_graph_knows_peers_routes_and_deaths():
    problem = WORKED.replace(send=0.1, send_rerouted=0.4)
    graph = stage_graph(problem)
    assert len(graph) == 12 and nx.is_directed_acyclic_graph(graph)
    assert peers(without(graph, Worker(1, 2)), Worker(1, 2)) == [Worker(0, 2), Worker(2, 2)]
    path = route(graph, (1, 0), {2: Worker(0, 2)}, problem)
    assert [graph.edges[e]["latency"] for e in pairwise(path)] == [0.1, 0.4, 0.4]
    with pytest.raises(ValueError, match="no path"):
        route(without(graph, Worker(1, 2)), (1, 0), {}, problem)
