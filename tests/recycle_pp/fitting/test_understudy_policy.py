"""Which jobs keep understudies, and why the others do not."""

import pytest

from recycle_pp.config.compose import compose
from recycle_pp.fitting.understudy_policy import bytes_per_element, why_none

AUTO = "state.understudy=auto"


def test_stages_get_understudies_if_the_setting_is_auto():
    auto, never = compose([AUTO, "parallel=2x2"]), compose(["state.understudy=never", "parallel=1x2"])
    assert bytes_per_element(auto) and not bytes_per_element(never)
    assert why_none(auto) is None and why_none(never) is None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["parallel=1x2"], "with one pipeline no stage has a worker to spare"),
        (["parallel=2x1"], "there is no other stage"),
    ],
)
def test_the_reason_why_no_stage_can_have_an_understudy_is_known(overrides, said):
    settings = compose([AUTO, *overrides])
    assert not bytes_per_element(settings) and said in why_none(settings)


def test_an_understudy_needs_memory_for_masters_moments_sums_and_two_gradients():
    auto = [AUTO, "parallel=2x2"]
    assert bytes_per_element(compose(auto)) == 4 * 3 + 4 + 2 * 4
    assert bytes_per_element(compose([*auto, "numerics=reproducible"])) == 4 * 3 + 8 + 2 * 4
