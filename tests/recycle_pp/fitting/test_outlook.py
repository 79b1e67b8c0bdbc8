"""The outlook: whether a job fits into the memory of its workers, without and with deaths."""

from __future__ import annotations

import pytest

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.fitting.outlook import outlook

LARGE = ["model=llama8b", "parallel=2x4", "parallel.pipelines=4", "parallel.microbatch_size=1", "numerics=bf16"]


def job(*words: str) -> Settings:
    return compose([*LARGE, *words])


def test_stages_that_fit_stay_below_the_capacity_even_after_deaths():
    for capacity in (60e9, 80e9, 141e9):
        outcomes = outlook(job(), capacity, "cuda")
        assert [len(outcome.rows) for outcome in outcomes] == [4, 4, 4]
        assert all(row.bytes <= capacity for outcome in outcomes for row in outcome.rows if row.fits)
        assert all(1 <= row.in_flight <= row.wanted for outcome in outcomes for row in outcome.rows if row.fits)


def test_deaths_take_memory_and_time():
    whole, one, two = outlook(job(), 80e9, "cuda")
    log = [[row.parts["replay log"] for row in outcome.rows] for outcome in (whole, one, two)]
    assert all(a < b < c for a, b, c in zip(*log, strict=True))
    assert whole.period < one.period < two.period
    assert whole.hit is None and one.hit is not None


def test_the_share_of_sharded_state_grows_with_each_death():
    rows = [outcome.rows[1] for outcome in outlook(job("parallel.sharded=true"), 80e9, "cuda")]
    share = [row.parts["optimizer state"] for row in rows]
    assert share[1] == pytest.approx(share[0] * 4 / 3) and share[2] == pytest.approx(share[0] * 2)


def test_stages_without_room_run_whole_backwards_or_recompute_stage_by_stage():
    auto = job("model.recompute=auto", "parallel.memory=80GB")
    roomy = outlook(auto, 400e9, "cuda")[0]
    assert {(row.whole, row.recompute) for row in roomy.rows} == {(False, False)}
    tight = outlook(auto, 80e9, "cuda")[0]
    ways = {(row.whole, row.recompute) for row in tight.rows}
    assert (True, True) in ways and len(ways) > 1 and tight.fits
    assert tight.period > roomy.period


@pytest.mark.parametrize("capacity", [51e9, 60e9, 80e9])
def test_no_stage_is_assumed_to_recompute_if_the_settings_forbid_it(capacity):
    outcomes = outlook(job("model.recompute=false"), capacity, "cuda")
    assert not any(row.recompute or row.whole for outcome in outcomes for row in outcome.rows)
    assert outcomes[0].fits == (capacity > 51e9)


def test_two_pipelines_survive_only_one_death_in_a_stage():
    *_, two = outlook(job("parallel.pipelines=2"), 80e9, "cuda")
    assert [row.peers for row in two.rows] == [0, 0, 0, 0] and two.period is None


def test_communicators_of_nccl_take_memory_and_grow_with_deaths():
    nccl = outlook(job("parallel.backend=nccl"), 141e9, "cuda")
    assert [[row.parts["communicators"] / 200e6 for row in of.rows] for of in nccl] == [
        [2, 3, 3, 2], [3, 5, 5, 3], [4, 7, 7, 4],
    ]  # fmt: skip
    tcp = outlook(job(), 141e9, "cuda")
    assert all("communicators" not in row.parts for outcome in tcp for row in outcome.rows)


def test_with_communicators_a_worker_still_stays_below_its_capacity():
    tight = [outlook(job("parallel.backend=nccl"), size, "cuda")[0].rows[1].bytes for size in (60e9, 80e9)]
    assert tight[0] <= 60e9 and tight[1] <= 80e9
