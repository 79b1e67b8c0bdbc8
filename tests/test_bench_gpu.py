"""bench/gpu.py: time limits of items, results after each item, continuation in a second call."""

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
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("gpu_items", None)


def item(gpu, name, script, seconds=20.0, needs=(), judge=lambda result, results: ""):
    return gpu.Item(name, "claim", seconds, lambda results: ([sys.executable, "-c", script], {}), judge, needs, 0.0)


def run(gpu, todo, out, seconds=60.0):
    state = json.loads(out.read_text()) if out.exists() else {}
    gpu.run_all(todo, state, out, time.monotonic() + seconds)
    return json.loads(out.read_text())


def test_results_are_written_after_each_item_and_a_second_call_repeats_none(gpu, tmp_path):
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


def test_a_negative_judgement_makes_an_item_fail(gpu, tmp_path):
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
