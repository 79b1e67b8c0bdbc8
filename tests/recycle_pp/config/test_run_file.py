"""The settings of a run in one file."""

import dataclasses

import pytest
import yaml

from recycle_pp.config.compose import chosen, compose
from recycle_pp.config.node_settings import NodeSettings
from recycle_pp.config.resume import take_up
from recycle_pp.config.run_file import commented, read_run_file
from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.run_folder import RunFolder, _yaml


def written(folder, text):
    path = folder / "run.yaml"
    path.write_text(text)
    return str(path)


def config_of(folder, *words):
    """The path of a run's config.yaml, with the settings of a command line."""
    settings = compose([*words, "run.dir=runs/first"])
    return written(folder, yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False)), settings


def test_the_config_of_a_run_composes_to_its_settings(tmp_path):
    path, settings = config_of(
        tmp_path, "model=tiny", "parallel=2x2", "model.split=[3,1]", "+fail_at=20:1.2", "optimizer.lr=3e-4",
        "optimizer.groups=[embedding.*:0.1:0]", "run.standby=on", "data.separator='007'",
    )  # fmt: skip
    assert compose([path]) == settings
    assert compose([path, "run.dir=runs/second"]) == settings.with_values({"run.dir": "runs/second"})


def test_a_commented_file_composes_to_its_settings(tmp_path):
    settings = compose(["model=gpt124m", "parallel=5x3", "data.path=[a,'b, c']", "fail_at=[20:1.2]", "run.dir=x"])
    assert compose([written(tmp_path, commented(settings, ["for 15 workers"]))]) == settings


@pytest.mark.parametrize("text", ["1e5", "1e-5", ".5", "on", "0x10", "12:30", "null", "a${b}", r"a\${b}", "yes: no #"])
def test_a_text_in_a_commented_file_or_a_config_is_read_back_as_the_same_text(text, tmp_path):
    settings = Settings().with_values({"data.column": text, "run.dir": "x"})
    assert compose([written(tmp_path, commented(settings, []))]).data.column == text
    if "$" not in text:  # the config.yaml of a run holds what a resume reads, without escapes
        RunFolder.write_text(tmp_path / "config.yaml", _yaml(dataclasses.asdict(settings)))
        assert compose([str(tmp_path / "config.yaml")]).data.column == text


@pytest.mark.parametrize("command", ["echo ${HOME}", "echo ${X:-3} > '${Y}'", "echo $X", "${A}${B} ${#C}"])
def test_a_command_leaves_the_variables_of_the_shell_to_it(command, tmp_path):
    settings = compose([f"run.on_event={command}", f"run.evaluate={command}", "run.dir=x"])
    assert settings.run.on_event == settings.run.evaluate == command
    assert compose([written(tmp_path, commented(settings, []))]) == settings
    path = written(tmp_path, yaml.safe_dump({"run": {"on_event": command}}))
    assert compose([path]).run.on_event == command
    assert compose(["run.steps=7", "run.on_event=x ${run.steps} ${oc.env:NO,y}"]).run.on_event == "x 7 y"
    assert compose(["run.dir=d", "run.on_event=x ${.dir} ${ run.dir } ${..run.dir}"]).run.on_event == "x d d d"


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    path = written(tmp_path, "model: {width: 32, layers: 6}\noptimizer: {lr: 3e-4}\nparallel: {stages: 2}\n")
    settings = compose([path, "model.layers=5", "parallel=3x2"])
    assert (settings.model.width, settings.model.layers, settings.optimizer.lr) == (32, 5, 3e-4)
    assert (settings.parallel.pipelines, settings.parallel.stages) == (3, 2)
    assert settings.optimizer.warmup == Settings().optimizer.warmup


def test_a_group_on_the_command_line_replaces_the_files_keys_of_this_group(tmp_path):
    path = written(tmp_path, "model: {width: 32}\noptimizer: {lr: 1, beta1: 0.5}\nrun: {dir: runs/mine}\n")
    settings = compose([path, "model=gpt124m"])
    assert settings.model == compose(["model=gpt124m"]).model
    assert settings.optimizer.lr == compose(["model=gpt124m"]).optimizer.lr, "the group's file sets it"
    assert (settings.optimizer.beta1, settings.run.dir) == (0.5, "runs/mine")


def test_a_group_on_the_command_line_also_replaces_values_by_defaults(tmp_path):
    path = written(tmp_path, "control: {coordinator: etcd, endpoints: ['10.0.0.9:2379'], suspicion: 17}\n")
    settings = compose([path, "coordinator=embedded"])
    assert (settings.control.coordinator, settings.control.suspicion) == ("embedded", 17)
    assert "control.coordinator" in chosen(["coordinator=embedded"]) and "optimizer.lr" not in chosen(["model=tiny"])


def test_a_split_for_another_number_of_stages_is_measured_again(tmp_path):
    path = written(tmp_path, "parallel: {stages: 2}\nmodel: {split: [3, 5]}\n")
    assert compose([path]).model.split == compose([path, "parallel=4x2"]).model.split == [3, 5]
    assert compose([path, "parallel=2x4"]).model.split == "auto"


def test_texts_and_numbers_are_parsed_as_in_yaml_1_2(tmp_path):
    text = "fail_at: 20:1.2\nrun: {standby: on, seed: 12}\ncheckpoint: {minutes: .5}\nmodel: {norm_eps: 1e-6}\n"
    settings = compose([written(tmp_path, text)])
    assert (settings.fail_at, settings.run.standby, settings.run.seed) == (["20:1.2"], "on", 12)
    assert (settings.checkpoint.minutes, settings.model.norm_eps) == (0.5, 1e-6)


def test_interpolations_are_replaced_and_nodes_compare_them_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("JOB", "7")
    path = written(tmp_path, "run: {dir: 'runs/${oc.env:JOB}'}\n")
    settings = compose([path])
    assert settings.run.dir == "runs/7"
    assert NodeSettings.of(settings, [path]).shared["run.dir"] == "runs/${oc.env:JOB}"
    assert NodeSettings.of(settings, [path, "run.dir=x"]).shared["run.dir"] == "x"


MISTAKES = {
    "unknown key": ("run:\n  stepz: 3\n", ", line 2: run.stepz is not a configuration key; did you mean run.steps?"),
    "unknown group": ("model: {}\nrunn: {}\n", ", line 2: runn is not a configuration key; did you mean run?"),
    "a group's name": ("model: tiny\n", ", line 1: model is a group (kind, "),
    "type": ("run:\n\n  steps: many\n", ", line 3: run.steps must be a whole number, not 'many'"),
    "range": ("optimizer:\n  lr: -1\n", ", line 2: optimizer.lr must be above 0, not -1"),
    "twice": ("run: {seed: 1}\nmodel: {}\nrun: {steps: 1}\n", ", line 3: run is given twice, first in line 1"),
    "number as key": ("run:\n  5: 3\n", ", line 2: run.5 is not a configuration key"),
    "not YAML": ("run:\n  steps: 3: 4\n", ", line 2: it is not YAML (mapping values are not allowed here)"),
    "a list": ("- run\n", ": it has no settings"),
    "empty": ("# nothing\n", ": it has no settings"),
    "a dot": ("model: {}\nrun.steps: 5\n", ", line 2: in a file, run.steps is written run: {steps: 5}"),
    "two dots": ("model.lora.rank: 8\n", ", line 1: in a file, model.lora.rank is written model: {lora: {rank: 8}}"),
    "an alias in itself": ("run: &a\n  steps: 3\n  x: *a\n", " cannot be read: it is nested too deeply, or an alias "),
    "a list in itself": ("fail_at: &a [*a]\n", " cannot be read: it is nested too deeply, or an alias "),
    "wrong tag": ("run:\n  steps: !!int 'x'\n", ", line 2: it is not YAML (x is not a valid int)"),
    "long number": (f"run:\n  steps: {'9' * 5000}\n", ", line 2: it is not YAML (99999999999999999... is not a valid"),
    "interpolation": ("run: {dir: '${nosuch}'}\n", ": Interpolation key 'nosuch' not found"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_file_is_reported_in_one_sentence_with_the_line(name, tmp_path):
    text, sentence = MISTAKES[name]
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:
        compose([path])
    assert str(error.value).startswith(path + sentence)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^no/such\.yaml: there is no such file; recycle init no/such\.yaml writes"):
        compose(["no/such.yaml"])
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ValueError, match=r"folder\.yaml cannot be read: Is a directory"):
        compose([str(tmp_path / "folder.yaml")])
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"bytes\.yaml cannot be read: it is not text"):
        compose([str(tmp_path / "bytes.yaml")])
    with pytest.raises(ValueError, match=r"^only one settings file is allowed, not a\.yaml and b\.yml"):
        compose(["a.yaml", "b.yml"])


def test_a_path_may_contain_an_equals_sign_and_the_value_of_a_setting_may_end_in_yaml(tmp_path):
    folder = tmp_path / "lr=3"
    folder.mkdir()
    assert compose([written(folder, "run: {steps: 7}\n")]).run.steps == 7
    assert compose(["data.path=corpus.yaml"]).data.path == "corpus.yaml"


def test_a_resume_treats_the_keys_of_a_file_like_those_of_the_command_line(tmp_path):
    path, settings = config_of(tmp_path, "model=tiny", "parallel=2x2", "parallel.microbatches=6")
    before = dataclasses.asdict(settings)
    again, said = take_up([path, "run.resume=true"], before)
    assert (again, said) == (settings.with_values({"run.resume": True}), [])
    again, said = take_up([path, "run.resume=true", "parallel=3x2", "optimizer.lr=1"], before)
    assert (again.parallel.pipelines, again.parallel.microbatches, again.optimizer.lr) == (3, 4, 1.0)
    with pytest.raises(ValueError, match=r"model.width must stay 16 when run\.dir=runs/first is resumed, not 32"):
        take_up([written(tmp_path, "run: {dir: runs/first}\nmodel: {width: 32}\n"), "run.resume=true"], before)
    with pytest.raises(ValueError, match=r"microbatches must stay 12 "):
        take_up([written(tmp_path, "run: {dir: runs/first}\nparallel: {microbatches: 8}\n"), "run.resume=true"], before)


def test_a_file_sets_only_the_keys_that_it_names(tmp_path):
    assert read_run_file(written(tmp_path, "run: {steps: 7}\nfail_at: []\n")) == {"run.steps": 7, "fail_at": []}
