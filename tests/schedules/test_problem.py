"""Problems: their keys, and one clear sentence for every mistake."""

import json

import pytest
from hypothesis import given, settings
from random_problems import problems
from recycle_schedules import Problem, Worker

SHAPE = {"pipelines": 3, "stages": 4, "microbatches": 6}

MISTAKES = [
    ({"stage": 4}, "unknown problem key 'stage'"),
    ({"pipelines": 0}, "pipelines: 0 is not a whole number of at least 1"),
    ({"stages": True}, "stages: True is not"),
    ({"microbatches": [6, 6]}, "microbatches: expected 3 numbers"),
    ({"failed": [[0, 1], [1, 1], [2, 1]]}, "failed: no live worker at stage 1"),
    ({"failed": [[7, 1]]}, "failed: worker 7.1 does not exist"),
    ({"durations": {"F": -1}}, "durations.F: -1 is negative"),
    ({"durations": {"X": 1}}, "durations: unknown op 'X'"),
    ({"durations": {"F": [1, 2]}}, "durations.F: expected 4 times"),
    ({"send": -0.5}, "send: -0.5 is negative"),
    ({"send": float("nan")}, "send: nan is not a finite number"),
    ({"durations": {"F": 1e300}}, "durations: all ops and messages together could take .* give the times in a larger"),
    ({"speed": {"1,1": 1e-300}}, "speed: all ops and messages"),
    ({"send": 1e20}, "send: all ops and messages"),
    ({"links": {"hosts": [["a"] * 4] * 3, "within_host": {"latency": 1e20}}}, "links: all ops and messages"),
    ({"failed": [[0, 1]], "send_rerouted": 1e20}, "send_rerouted: all ops and messages"),
    ({"allreduce": 1e20}, "allreduce: all ops and messages"),
    ({"busy_until": {"0,0": 1e20}}, "busy_until: all ops and messages"),
    ({"layers": {key: [1e20] * 4 for key in "FIW"}}, "layers: all ops and messages"),
    ({"backward": "both"}, "backward: 'both' is not one of decoupled, coupled, mixed"),
    ({"memory_limit": 0}, "memory_limit: worker 0.0 has no room for a micro-batch"),
    ({"memory_limit": {"base": "zb"}}, "memory_limit: base 'zb'"),
    ({"memory_limit": [1, 2]}, "memory_limit: expected 4 limits"),
    ({"memory_limit": {"per_worker": {"0,1": 2, "0.1": 3}}}, r"memory_limit.per_worker: worker 0\.1 is given twice"),
    ({"i_release": 2}, "i_release: 2 is not between 0 and 1"),
    ({"speed": {"0,1": 0}}, "speed: 0 of worker 0.1 is not above 0"),
    ({"speed": {"nobody": 1}}, "speed: a worker is written PIPELINE.STAGE"),
    ({"committed": [9]}, "committed: 9 is not one of the stages 0 to 3"),
    ({"done": [{"op": "F"}]}, "done: an entry has op, microbatch"),
    (
        {"done": [{"op": "W", "microbatch": [0, 0], "stage": 0, "worker": [0, 0]}]},
        r"done: micro-batch \(0, 0\) at stage 0 cannot have just W",
    ),
]


@pytest.mark.parametrize(("keys", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_a_mistake_is_reported_in_one_sentence_that_names_the_key(keys, sentence):
    with pytest.raises(ValueError, match=sentence):
        Problem.from_json(SHAPE | keys)


@settings(deadline=None)
@given(problems())
def test_problems_round_trip_through_json(problem):
    assert Problem.from_json(json.loads(json.dumps(problem.to_json()))) == problem


def test_workers_are_written_pipeline_dot_stage():
    assert str(Worker(1, 2)) == "1.2" and Worker.parse("1.2") == Worker(1, 2)
    with pytest.raises(ValueError, match=r"like 1\.2"):
        Worker.parse("1.2.3")


def test_a_memory_limit_may_be_that_of_1f1b_plus_a_constant():
    problem = Problem.from_json(SHAPE | {"memory_limit": {"base": "1f1b", "extra": 2}})
    assert [problem.limit(Worker(0, s)) for s in range(4)] == [6, 5, 4, 3]


@pytest.mark.parametrize("key", ["0,1", "0.1", "0, 1", " 0 , 1"])
def test_the_key_of_a_workers_memory_limit_may_be_written_in_several_ways(key):
    problem = Problem.from_json(SHAPE | {"memory_limit": {"per_worker": {key: 2}, "default": 5}})
    assert problem.limit(Worker(0, 1)) == 2 and problem.limit(Worker(0, 2)) == 5
    assert problem.to_json()["memory_limit"]["per_worker"] == {"0,1": 2}
