"""bench/gpu.py limits the time of each item, writes the results after each item, and continues in a second call."""

import dataclasses
import importlib.util
import json
import sys
import time
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("gpu", BENCH / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)  # dataclasses looks modules up there
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("gpu_items", None)


def item(gpu, name, script, seconds=20.0, needs=(), judge=lambda result, results: ""):
    return gpu.Item(name, "claim", seconds, lambda results: ([sys.executable, "-c", script], {}), judge, needs, 0.0)


def run(gpu, todo, out, seconds=60.0):
    state = json.loads(out.read_text()) if out.exists() else {}
    gpu.run_all(todo, state, out, time.monotonic() + seconds)
    return json.loads(out.read_text())


def test_results_are_written_after_each_item_and_a_second_call_repeats_no_item(gpu, tmp_path):
    ran = tmp_path / "ran"
    script = f"open({str(ran)!r}, 'a').write('x'); print('{{\"figure\": 3}}')"
    todo = [item(gpu, "one", script), item(gpu, "two", "raise SystemExit('no such kernel')")]
    state = run(gpu, todo, tmp_path / "gpu.json")
    assert state["one"]["status"] == "passed" and state["one"]["result"] == {"figure": 3}
    assert state["two"]["status"] == "failed" and "no such kernel" in state["two"]["log"]
    assert run(gpu, todo, tmp_path / "gpu.json") == state and ran.read_text() == "x"


def test_an_item_over_its_limit_fails_and_one_cut_by_the_end_of_the_call_is_repeated(gpu, tmp_path):
    out, slow = tmp_path / "gpu.json", "import time; time.sleep(60)"
    state = run(gpu, [item(gpu, "quick", "pass"), item(gpu, "slow", slow, seconds=1.0)], out)
    assert state["slow"]["status"] == "over 1 s"
    began = time.monotonic()
    state = run(gpu, [item(gpu, "cut", slow, seconds=90.0)], out, seconds=6.0)
    assert "cut" not in state and time.monotonic() - began < 15
    assert run(gpu, [item(gpu, "cut", "pass", seconds=90.0)], out)["cut"]["status"] == "passed"


def test_an_item_is_not_run_if_a_required_item_has_not_passed(gpu, tmp_path):
    state = run(
        gpu, [item(gpu, "base", "raise SystemExit(1)"), item(gpu, "above", "pass", needs=("base",))], tmp_path / "o"
    )
    assert state["above"] == {"status": "failed", "seconds": 0.0, "result": {}, "log": "needs base"}


def test_an_item_fails_if_its_judge_objects(gpu, tmp_path):
    todo = [
        item(gpu, "first", 'print(\'{"sha256": "a"}\')'),
        item(
            gpu,
            "second",
            'print(\'{"sha256": "b"}\')',
            needs=("first",),
            judge=lambda result, results: f"{result['sha256']} is not {results['first']['sha256']}",
        ),
    ]
    state = run(gpu, todo, tmp_path / "gpu.json")
    assert state["second"]["status"] == "failed" and state["second"]["log"].endswith("b is not a")


def test_lanes_run_items_in_parallel_but_an_item_that_measures_speed_runs_alone(gpu, tmp_path):
    span = "import json, time; t = time.time(); time.sleep(0.5); print(json.dumps({'span': [t, time.time()]}))"
    todo = [item(gpu, "one", span), item(gpu, "two", span), item(gpu, "speed", span)]
    todo[2] = dataclasses.replace(todo[2], alone=True)
    gpu.run_all(todo, state := {}, tmp_path / "gpu.json", time.monotonic() + 60, lanes=3)
    one, two, speed = (state[name]["result"]["span"] for name in ("one", "two", "speed"))
    assert one[0] < two[1] and two[0] < one[1]
    assert speed[0] > max(one[1], two[1])


def test_the_only_option_selects_the_named_items_and_those_that_they_need(gpu, tmp_path):
    todo = [item(gpu, "base", ""), item(gpu, "above", "", needs=("base",)), item(gpu, "other", "")]
    assert gpu.needed(["above"], todo) == {"base", "above"}
