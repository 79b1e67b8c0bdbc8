"""The rules of single settings: what is allowed, and when it may change."""

import math
from dataclasses import FrozenInstanceError, asdict

import pytest

from recycle_pp.config.loading import flat
from recycle_pp.config.setting import Change, Rule, rules
from recycle_pp.config.settings import FAULTS, Settings

RULES = {key: rule for key, rule in rules(Settings).items() if key not in FAULTS}


def test_every_setting_has_a_rule_with_a_description():
    assert rules(Settings).keys() == flat(asdict(Settings())).keys()
    assert all(rule.text and not rule.text.endswith(".") for rule in rules(Settings).values())


@pytest.mark.parametrize("key", RULES)
def test_the_default_is_allowed(key):
    RULES[key].check(key, RULES[key].default)


def _refused(rule: Rule):
    """Values just outside the allowed range, or not among the choices."""
    if rule.at_least is not None:
        yield rule.at_least - 1
    if rule.above is not None:
        yield rule.above
    if rule.at_most is not None:
        yield rule.at_most + 1
    if rule.below is not None:
        yield rule.below
    if rule.choices:
        yield "a word that is not a choice"
    if isinstance(rule.default, float):
        yield math.nan


@pytest.mark.parametrize(
    "key, value", [(key, value) for key, rule in RULES.items() for value in _refused(rule)], ids=str
)
def test_the_error_for_an_invalid_value_names_the_allowed_ones(key, value):
    with pytest.raises(ValueError) as error:
        RULES[key].check(key, value)
    assert str(error.value).startswith(f"{key} must be ")
    assert RULES[key].allowed in str(error.value) or "finite" in str(error.value)


@pytest.mark.parametrize(
    "key, value, sentence",
    [
        ("data.weights", [1.0, 0.0], "data.weights must be above 0, not 0.0"),
        ("data.weights", [1.0, math.inf], "data.weights must be finite, not inf"),
        ("model.split", "even", "model.split must be auto, null or a list of whole numbers, not even"),
        ("control.endpoints", ["a:1", "b"], "control.endpoints must be HOST:PORT or http(s)://HOST:PORT, not 'b'"),
        ("log.prometheus", 70000, "log.prometheus must be at least 1 and at most 65535, not 70000"),
        ("run.dir", "", "run.dir must be the path of a folder, not ''"),
    ],
)
def test_the_error_names_the_wrong_element_of_a_list_or_the_expected_format(key, value, sentence):
    with pytest.raises(ValueError) as error:
        RULES[key].check(key, value)
    assert str(error.value) == sentence


def test_settings_are_immutable_and_with_values_returns_a_changed_copy():
    settings = Settings()
    with pytest.raises(FrozenInstanceError):
        settings.run.steps = 5
    with pytest.raises(FrozenInstanceError):
        settings.fail_at = ["3:0.0"]
    changed = settings.with_values({"run.steps": 5, "run.seed": 1, "fail_at": ["3:0.0"]})
    assert (changed.run.steps, changed.run.seed, changed.fail_at) == (5, 1, ["3:0.0"])
    assert settings == Settings() and changed.model is settings.model


def test_settings_that_define_the_computation_never_change():
    """With different values, a resumed run would compute different bits."""
    never = {key for key, rule in RULES.items() if rule.change is Change.NEVER}
    assert {"model.width", "data.path", "numerics.precision", "run.seed", "parallel.microbatch_size"} <= never
    assert not {"optimizer.lr", "run.steps", "model.split", "model.recompute", "parallel.stages"} & never
    per_start = {key for key, rule in rules(Settings).items() if rule.change is Change.START}
    assert per_start == {"run.resume", "run.dir", "control.address", "model.auto_split", "islands.part", *FAULTS}
    assert {key for key, rule in RULES.items() if rule.per_node} == {"control.address", "control.interface"}
