"""model.split=auto: the layout that a job starts with, and that of a resumed run."""

import json
import subprocess

import pytest
import yaml

from recycle_pp.config.compose import compose
from recycle_pp.config.resume import take_up
from recycle_pp.fitting.first_layout import first_layout, with_first_layout, work
from recycle_pp.fitting.model_layers import ModelLayers
from recycle_pp.train import prepare
from recycle_pp.wire.launch import Launch

BIG_HEAD = ["model=tiny", "model.layers=6", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.ffn=32",
            "model.vocabulary=8192", "model.sequence=32", "parallel.pipelines=1",
            "parallel.stages=2", "parallel.microbatches=4"]  # fmt: skip
BIG_ENDS = ["model=gpt124m", "parallel=2x4"]


@pytest.mark.parametrize("arguments", [["parallel=2x4"], ["parallel=1x1"], [*BIG_HEAD, "emulate=sleep"]])
def test_the_layout_is_even_for_small_heads_one_stage_or_emulated_compute(arguments):
    assert first_layout(compose(arguments)) is None


def test_a_big_head_shares_its_stage_with_only_one_layer():
    settings = compose(BIG_ENDS)
    weights = work(settings)
    assert weights[0] == weights[1] < weights[-1]
    found = first_layout(settings)
    assert found[-1] == 1 and sorted(found[:-1]) == [3, 4, 4]


def test_a_big_embedding_matters_only_if_memory_is_limited():
    free, tight = (first_layout(compose([*BIG_ENDS, *more])) for more in ([], ["parallel.memory=1.6GB"]))
    assert tight[0] < free[0]


def test_if_no_layout_fits_the_layout_is_even_and_a_warning_is_printed(capsys):
    assert with_first_layout(compose([*BIG_ENDS, "parallel.memory=1GB"])).model.layout is None
    assert "no layout leaves every stage room" in capsys.readouterr().err


def test_config_yaml_has_the_chosen_layout_and_choosing_it_runs_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    arguments = [*BIG_HEAD, f"run.dir={tmp_path / 'run'}"]
    settings, run, *_ = prepare(Launch(world=2, local_world=2), arguments)
    assert settings.model.split == "auto" and settings.model.layout == [5, 1] == list(ModelLayers(settings).start)
    written = yaml.safe_load(run.config.read_text())
    assert written["model"]["auto_split"] == [5, 1]
    assert run.read_settings().model.layout == [5, 1]
    again, said = take_up([*arguments, "run.resume=true"], written)
    assert again.model.layout is None and said == [], "a resume chooses again"
    assert compose([str(run.config), "parallel.stages=3"]).model.layout is None, "so does a run with this file"


def test_a_split_that_the_user_sets_overrides_the_chosen_one():
    settings = compose([*BIG_HEAD, "model.split=[2,4]"]).with_values({"model.auto_split": [5, 1]})
    assert settings.model.layout == [2, 4]
    assert settings.with_values({"model.split": None}).model.layout is None


def test_a_split_for_another_number_of_stages_is_not_resumed():
    before = json.loads(json.dumps({"model": {"split": [5, 1]}, "parallel": {"stages": 2, "microbatches": 4}}))
    now, said = take_up(["parallel.stages=3"], before)
    assert now.model.split == "auto" and "model.split [5, 1] -> auto" in said
