"""Settings that may change while a job runs."""

import pytest

from recycle_pp.config.live import LIVE, checked
from recycle_pp.config.settings import Settings


def test_these_keys_may_change_while_a_job_runs():
    """A key may be listed if the coordinator reads it at each decision, or if all workers receive the new value."""
    assert LIVE == [
        "schedule.rebalance", "optimizer.most_skipped", "checkpoint.every", "checkpoint.minutes", "run.respawns",
    ]  # fmt: skip


def test_values_get_the_types_of_their_settings():
    values = checked(Settings(), {"checkpoint.minutes": 5, "checkpoint.every": 10, "schedule.rebalance": "auto"})
    assert values == {"checkpoint.minutes": 5.0, "checkpoint.every": 10, "schedule.rebalance": "auto"}
    assert type(values["checkpoint.minutes"]) is float


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("optimizer.lr", 0.1, f"optimizer.lr cannot change while the job runs; these keys can: {', '.join(LIVE)}"),
        ("checkpoint.evry", 5, "checkpoint.evry is not a configuration key; did you mean checkpoint.every?"),
        ("checkpoint.every.steps", 50, "checkpoint.every must be a whole number, not {'steps': 50}"),
        ("checkpoint.every", -1, "checkpoint.every must be at least 0, not -1"),
        ("checkpoint.every", 0.5, "checkpoint.every must be a whole number, not 0.5"),
        ("schedule.rebalance", "often", "schedule.rebalance must be one of auto, always, never, not often"),
    ],
)
def test_a_refusal_is_explained_in_one_sentence(key, value, sentence):
    with pytest.raises(ValueError) as error:
        checked(Settings(), {key: value})
    assert str(error.value) == sentence


def test_a_value_that_does_not_fit_the_other_settings_is_refused():
    settings = Settings().with_values({"schedule.profile_steps": 0})
    with pytest.raises(ValueError, match="needs schedule"):
        checked(settings, {"schedule.rebalance": "auto"})
