"""A command line composes to typed settings."""

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

from recycle_pp.config.checks import validate
from recycle_pp.config.compose import beyond_positions, compose
from recycle_pp.config.loading import load
from recycle_pp.config.settings import Settings
from recycle_pp.numerics.hyperparameters import learning_rate


def test_the_files_under_configs_hold_the_defaults_of_the_dataclasses():
    # run.dir always differs, because it contains the time.
    assert compose([]).with_values({"run.dir": Settings().run.dir}) == Settings()


def test_settings_survive_a_round_trip_through_plain_data():
    settings = compose(["model=tiny", "model.split=[1,1,1,1]", "+fail_at=[20:1.2,31:0.1@vote]"])
    assert load(json.loads(json.dumps(dataclasses.asdict(settings)))) == settings


def test_every_file_of_every_group_composes_to_a_valid_run(tmp_path):
    from recycle_pp.config.compose import _MORE_GROUPS, _groups, options

    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 8)
    (tmp_path / "config.json").write_text(
        json.dumps(sizes | {"model_type": "llama", "vocab_size": 300, "hidden_size": 64})
    )
    needed = {
        "model=llama": [f"model.path={tmp_path}", "model.init=random"],
        "model=custom": ["model.build=my_package:build", "model.layers=blocks"],
        "model=hf": [f"model.path={tmp_path}", "model.init=random"],
    }
    for group in (*_groups(), *_MORE_GROUPS):
        for name in options(group):
            fitting = ["model=gpt124m"] if name.startswith("llama") and group != "model" else []
            more = needed.get(f"{group}={name}", [])
            validate(compose([*fitting, f"{group}={name}", *more]))


def test_the_vocabulary_size_of_a_model_folder_comes_from_its_configuration(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    assert compose(["model=hf", f"model.path={tmp_path}"]).model.vocabulary == 300
    assert compose(["model=hf", f"model.path={tmp_path}", "model.vocabulary=320"]).model.vocabulary == 320
    assert compose(["model=hf", "model.path=/no/such/folder"]).model.vocabulary == 0


def test_samples_longer_than_the_positions_of_a_folder_are_reported(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 64}')
    model = compose(["model=hf", f"model.path={tmp_path}", "model.sequence=64"]).model
    assert beyond_positions(model) is None
    longer = dataclasses.replace(model, sequence=65)
    assert re.match(r"model\.sequence=65 is longer than the 64 positions", beyond_positions(longer) or "")
    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    assert beyond_positions(longer) is beyond_positions(compose([]).model) is None


def test_groups_and_keys_and_faults_are_taken_from_the_command_line():
    settings = compose(["model=tiny", "optimizer.lr=1", "parallel=2x2", "fail_at=20:1.2@backward", "emulate=sleep"])
    assert settings.model.width == 16
    assert settings.optimizer.lr == 1.0
    assert (settings.parallel.pipelines, settings.parallel.stages) == (2, 2)
    assert settings.fail_at == ["20:1.2@backward"]
    assert settings.emulate.mode == "sleep"


@pytest.mark.parametrize("D, P", [(5, 3), (1, 7), (64, 16)])
def test_any_shape_works_without_a_file(D, P):
    expected = dataclasses.replace(compose([]).parallel, pipelines=D, stages=P)
    assert compose([f"parallel={D}x{P}"]).parallel == expected
    assert compose(["parallel.microbatches=4", f"parallel={D}x{P}"]).parallel.microbatches == 4
    assert compose([f"+parallel={D}x{P}", "parallel.stages=2"]).parallel.stages == 2, "a key overrides the shape"
    assert compose(["parallel.stages=2", f"+parallel={D}x{P}"]).parallel.stages == 2, "in any order"


@pytest.mark.parametrize("first", ["1x1", "2x4", "5x3"])
@pytest.mark.parametrize("last", ["1x1", "2x4", "5x3", "2x1"])
def test_the_last_of_several_shapes_counts(first, last):
    assert compose([f"parallel={first}", f"parallel={last}"]).parallel == compose([f"parallel={last}"]).parallel


def test_a_file_named_like_a_shape_is_used(tmp_path):
    (tmp_path / "parallel").mkdir()
    (tmp_path / "parallel" / "5x3.yaml").write_text("defaults: [3x4]\npipelines: 5\nstages: 3\nmicrobatches: 2\n")
    assert compose(["--config-dir", str(tmp_path), "parallel=5x3"]).parallel.microbatches == 2
    assert compose(["parallel=2x4"]).parallel.microbatches == 8


@pytest.mark.parametrize("name", ["5x", "0x3", "5x3x2", "x"])
def test_an_invalid_shape_is_named(name):
    with pytest.raises(ValueError, match=rf"^parallel={name}: there is no such file .*or DxP for D pipelines"):
        compose([f"parallel={name}"])


def test_a_tilde_is_expanded_to_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/mine")
    settings = compose(["run.dir=~/runs/first", "data.path=~/book.txt"])
    assert settings.run.dir == "/home/of/mine/runs/first"
    assert settings.data.path == "/home/of/mine/book.txt"


@pytest.mark.parametrize("path", ["a=b", "it's [mine] {really}, (1)", "back\\slash", "a,b", "'quoted'", "${now:%Y}"])
def test_a_path_may_contain_any_character(path):
    expected = {"'quoted'": "quoted", "${now:%Y}": time.strftime("%Y")}.get(path, path)
    assert compose([f"data.path={path}"]).data.path == expected


def test_users_may_add_their_own_files(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [small]\nlayers: 12\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text('# @package _global_\nfail_at: ["20:1.2", "30:0.0"]\n')
    settings = compose(["--config-dir", str(tmp_path), "model=mine", "experiment=mine"])
    assert settings.model.layers == 12
    assert settings.model.width == 64
    assert settings.fail_at == ["20:1.2", "30:0.0"]


def test_an_unquoted_fault_in_yaml_is_recognised(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nfail_at: 20:1.2\n")
    with pytest.raises(ValueError, match=r'base-60 number; put it in quotes, fail_at: "20:1.2"'):
        compose(["--config-dir", str(tmp_path), "experiment=mine"])


def test_large_models_set_a_suitable_learning_rate_that_the_command_line_overrides():
    rates = {
        name: compose([f"model={name}"]).optimizer.lr for name in ("tiny", "small", "gpt124m", "llama1b", "llama70b")
    }
    assert rates == {"tiny": 3e-3, "small": 3e-3, "gpt124m": 6e-4, "llama1b": 3e-4, "llama70b": 1.5e-4}
    assert compose(["model=llama1b", "optimizer.lr=1e-3"]).optimizer.lr == 1e-3
    assert compose(["model=llama1b", "optimizer=staggered"]).optimizer.lr == 3e-4
    small, large = compose([]).model, compose(["model=llama1b"]).model
    assert (large.vocabulary, large.norm_eps, large.kernels) == (128256, small.norm_eps, small.kernels)


def test_a_smaller_learning_rate_needs_no_other_change():
    settings = compose(["optimizer.lr=1e-4"])
    validate(settings)
    assert learning_rate(settings.optimizer, settings.run.steps, settings.run.steps) == pytest.approx(1e-5)


def test_a_command_of_an_evaluation_may_contain_any_character():
    documented = "lm_eval --model hf --model_args pretrained=$1 --tasks hellaswag"
    assert f"run.evaluate='{documented}'" in (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    assert compose([f"run.evaluate={documented}"]).run.evaluate == documented
