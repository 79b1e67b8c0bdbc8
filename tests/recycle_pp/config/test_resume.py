"""A resumed run keeps its configuration, except for keys that the command line may change."""

import re
from dataclasses import asdict
from functools import cache

import pytest

from recycle_pp.config.compose import compose
from recycle_pp.config.resume import take_up


@cache
def settings_of(*arguments):
    return compose([*arguments, "run.dir=runs/mine"])


def before(*arguments):
    return asdict(settings_of(*arguments))


def test_keys_that_the_command_line_does_not_set_are_unchanged():
    old = before("parallel=2x2", "model=tiny", "optimizer.lr=0.001", "+fail_at=20:1.1")
    settings, said = take_up(["run.dir=runs/mine", "run.resume=true"], old)
    assert (settings.parallel.stages, settings.optimizer.lr, settings.fail_at) == (2, 0.001, [])
    assert said == []


def test_keys_of_a_group_within_a_group_are_unchanged():
    old = before("model.lora.rank=8", "model.lora.targets=[q_proj]")
    old["model"]["lora"]["gone"] = 1
    settings, said = take_up(["run.dir=runs/mine", "run.resume=true"], old)
    assert (settings.model.lora.rank, settings.model.lora.targets) == (8, ["q_proj"])
    assert said == ["model.lora.gone is no longer a key and was ignored"]


def test_keys_that_the_command_line_sets_are_listed_even_if_they_have_the_default():
    old = before("parallel=2x2", "optimizer.lr=0.001", "run.steps=10")
    settings, said = take_up(["run.resume=auto", "optimizer.lr=0.003", "run.steps=60"], old)
    assert said == ["optimizer.lr 0.001 -> 0.003", "run.steps 10 -> 60"]
    assert settings.run.steps == 60


def test_a_group_on_the_command_line_replaces_the_whole_group():
    settings, said = take_up(["run.resume=true", "schedule=coupled"], before("schedule.memory_extra=7"))
    assert settings.schedule == compose(["schedule=coupled"]).schedule
    assert "schedule.memory_extra 7 -> 2" in said


@pytest.mark.parametrize("change", ["parallel=3x5", "parallel=6x1", "parallel=9x9", "parallel.pipelines=1"])
def test_with_another_number_of_pipelines_a_step_keeps_its_micro_batches(change):
    old = before("parallel=2x4", "parallel.microbatches=9", "parallel.microbatch_size=8", "parallel.sharded=true")
    settings, said = take_up(["run.resume=true", "model.layers=9", change], old | {"model": {"layers": 9}})
    assert settings.parallel.pipelines * settings.parallel.microbatches == 18
    assert (settings.parallel.microbatch_size, settings.parallel.sharded) == (8, True), "only the shape changes"
    assert f"parallel.microbatches 9 -> {settings.parallel.microbatches}" in said


@pytest.mark.parametrize("change", ["parallel=4x2", "parallel.pipelines=5", "parallel=36x1"])
def test_pipelines_that_cannot_share_a_step_are_refused_with_those_that_can(change):
    with pytest.raises(ValueError, match=r"must divide the 18 micro-batches .* allowed: 1, 2, 3, 6, 9, 18$"):
        take_up(["run.resume=true", "run.dir=runs/mine", change], before())


@pytest.mark.parametrize(
    "change",
    [
        "parallel.microbatches=5",
        "parallel.microbatch_size=4",
        "data.validation_share=0.2",
        "run.seed=1",
        "model.width=128",
        "model.lora.rank=8",
        "data.path=other",
        "numerics.precision=bf16",
        "numerics.reproducible=true",
        "optimizer.moments=bf16",
    ],
)
def test_changes_that_would_alter_the_computation_are_rejected(change):
    with pytest.raises(ValueError, match=r"must stay .* when run\.dir"):
        take_up(["run.resume=true", "run.dir=runs/mine", change], before())


def test_bf16_of_an_older_version_remains_autocast():
    old = before("numerics.precision=bf16")
    assert take_up(["run.resume=true"], old)[0].numerics.precision == "bf16"
    del old["numerics"]["sums"]
    assert take_up(["run.resume=true"], old)[0].numerics.precision == "bf16-autocast"
    with pytest.raises(ValueError, match=r"numerics\.precision must stay bf16-autocast"):
        take_up(["run.resume=true", "numerics.precision=bf16"], old)


def test_keys_that_were_added_or_removed_since_the_first_start_cause_no_error():
    old = before("optimizer.lr=0.001")
    del old["checkpoint"]["minutes"], old["log"]
    old["model"]["fish"], old["pond"] = 3, {"depth": 2}
    settings, said = take_up(["run.resume=true"], old)
    assert (settings.optimizer.lr, settings.checkpoint.minutes) == (0.001, 10.0)
    assert said == ["model.fish is no longer a key and was ignored", "pond.depth is no longer a key and was ignored"]
    old["run"]["steps"] = "many"
    with pytest.raises(ValueError, match=r"run\.steps must be a whole number"):
        take_up(["run.resume=true"], old)


def test_a_run_of_an_older_version_gets_the_default_validation_samples():
    old = before()
    del old["run"]["validate_samples"]
    old["run"]["validate_microbatches"] = 1
    settings, _ = take_up(["run.resume=true"], old)
    assert settings.validation_microbatches == 16
    assert take_up(["run.resume=true", "run.validate_microbatches=2"], old)[0].validation_microbatches == 6


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"model": 3}, "model is a group"),
        ({"parallel": {"stages": "four"}}, "parallel.stages must be a whole number, not 'four'"),
        ({"parallel": {"stages": -4}}, "parallel.stages must be at least 1, not -4"),
    ],
)
def test_a_damaged_value_is_named_with_its_file(damage, says):
    with pytest.raises(ValueError, match=f"^runs/mine/config.yaml cannot be read: {re.escape(says)}"):
        take_up(["run.dir=runs/mine", "run.resume=true"], before() | damage)


def test_the_command_line_replaces_a_damaged_value():
    settings, _ = take_up(["run.resume=true", "optimizer.lr=0.001"], before() | {"optimizer": {"lr": "fast"}})
    assert settings.optimizer.lr == 0.001
