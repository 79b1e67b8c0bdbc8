"""model.split=auto: when layers are measured, the resulting layout, and resumes."""

import json
import subprocess

import pytest
import yaml

from recycle_pp.config.compose import compose
from recycle_pp.config.resume import take_up
from recycle_pp.fitting import balance
from recycle_pp.fitting.balance import balanced, by_weights, layout_of
from recycle_pp.train import prepare
from recycle_pp.wire.launch import Launch

BIG_HEAD = ["model=tiny", "model.layers=6", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.ffn=32",
            "model.vocabulary=8192", "model.sequence=32", "parallel.pipelines=1",
            "parallel.stages=2", "parallel.microbatches=4"]  # fmt: skip


@pytest.fixture
def unmeasured(monkeypatch):
    def run(*command, **rest):
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("arguments", [["parallel=2x4"], ["parallel=1x1"], [*BIG_HEAD, "emulate=sleep"]])
def test_small_heads_one_stage_and_emulated_compute_stay_even_unmeasured(arguments, unmeasured):
    assert balanced(compose(arguments)) is None


def test_a_big_head_is_alone_with_the_last_layer():
    settings = compose(["model=gpt124m", "parallel=2x4"])
    weights = by_weights(settings)
    assert weights[0] == weights[1] < weights[-1]
    found = layout_of(settings, {"layers": dict.fromkeys("FIW", weights), "capacity_bytes": None})
    assert found[-1] == 1 and sorted(found[:-1]) == [3, 4, 4]


def test_layers_that_are_measured_equal_stay_even():
    settings = compose(["parallel=2x4"])
    assert layout_of(settings, {"layers": dict.fromkeys("FIW", [1.0] * 8), "capacity_bytes": None}) is None


def test_memory_moves_boundaries_too(capsys):
    settings = compose(["parallel=2x2", "schedule.memory_extra=0"])
    layers = dict.fromkeys("FIW", [1.0] * 8) | {"bytes": [1.0] * 6 + [2.0] * 2, "activation_bytes": [0.1] * 8}
    assert layout_of(settings, {"layers": layers, "capacity_bytes": 5.7}) == [5, 3]
    assert layout_of(settings, {"layers": layers, "capacity_bytes": 3.0}) is None
    assert "no layout leaves every stage room" in capsys.readouterr().err


def test_a_model_that_cannot_be_measured_is_split_evenly(monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr(balance.subprocess, "run", lambda *command, **rest: failed)
    assert balanced(compose(BIG_HEAD)) is None
    assert "could not be measured" in capsys.readouterr().err


def test_config_yaml_has_the_measured_split_and_a_resume_keeps_it(tmp_path):
    arguments = [*BIG_HEAD, f"run.dir={tmp_path / 'run'}"]
    settings, run, *_ = prepare(Launch(world=2, local_world=2), arguments)
    split = settings.model.split
    assert split in ([5, 1], [4, 2]), "the head is with fewer layers; how many, the machine's load may change"
    written = yaml.safe_load(run.config.read_text())
    assert written["model"]["split"] == split
    again, said = take_up([*arguments, "run.resume=true"], written)
    assert again.model.split == split and said == []


def test_a_resume_with_other_stages_measures_again():
    before = json.loads(json.dumps({"model": {"split": [5, 1]}, "parallel": {"stages": 2, "microbatches": 4}}))
    now, said = take_up(["parallel.stages=3"], before)
    assert now.model.split == "auto" and "model.split [5, 1] -> auto" in said
