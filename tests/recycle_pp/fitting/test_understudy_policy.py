"""Which jobs keep understudies, and what the start says about the others."""

import pytest

from recycle_pp.config.compose import compose
from recycle_pp.fitting.understudy_policy import bytes_needed, kept, why_none

AUTO = "state.understudy=auto"


def test_stages_get_understudies_if_the_setting_is_auto():
    assert kept(compose([AUTO, "parallel=2x2"])) and why_none(compose([AUTO, "parallel=2x2"])) is None
    never = compose(["state.understudy=never", "parallel=1x2"])
    assert not kept(never) and why_none(never) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel=1x2"], "with one pipeline no stage has a worker to spare"),
        (["parallel=2x1"], "there is no other stage"),
        (["parallel=2x2", "parallel.sharded=true"], "only whole state"),
        (["parallel=2x2", "parallel.memory=8GB"], "parallel.memory"),
    ],
)
def test_the_start_says_why_no_stage_can_have_an_understudy(overrides, said):
    settings = compose([AUTO, *overrides])
    assert not kept(settings) and said in why_none(settings)


def test_a_copy_needs_the_masters_the_moments_the_sums_and_two_gradients():
    assert bytes_needed(compose([]), 10) == 10 * (4 * 3 + 4 + 2 * 4)
    assert bytes_needed(compose(["numerics=reproducible"]), 10) == 10 * (4 * 3 + 8 + 2 * 4)
