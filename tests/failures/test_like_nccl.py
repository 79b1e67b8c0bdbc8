"""Deaths among workers that communicate as over NCCL: ordered messages without tags, over groups built per plan."""

import json
from pathlib import Path

import pytest

from recycle_pp.testing.local_cluster import Zygote

from . import matrix
from .harness import Case, explain, fails, rejoins
from .test_exactness import some
from .test_sharded import TOURS

CASES = [
    Case("two stages in one step", "3x4", fails("3:0.1@backward", "3:1.2@forward"), stagger=True, deaths=2),
    Case("and returns", "3x2", fails("3:0.1@send") + rejoins("6:0.1"), stagger=True, steps=40),
    Case("validates and saves", "3x2", ("run.validate_every=2", "checkpoint.every=4", *fails("5:1.0@validation"))),
    Case("two stages in one step", "3x4", fails("3:0.1@backward", "3:1.2@forward"), deaths=2),
    Case("no worker dies", "3x4", deaths=0),
    Case("no worker dies", "3x4", stagger=True, deaths=0),
]

TWO, AHEAD = ("parallel.sharded=true",), ("parallel.sharded=true", "optimizer.clip=null")
SHARDED = [
    Case("both holders, one after the other", "3x2", (*TWO, *fails("3:0.0@spread", "5:1.0@optimizer")), deaths=2),
    Case(
        "while copies of a dead worker's units are made",
        "4x2",
        (*TWO, "parallel.optimizer_copies=3", *fails("2:0.1@backward", "2:2.1@heal"), *rejoins("5:0.1")),
        deaths=2,
        steps=40,
    ),
    Case(
        "when it has updated early", "3x2", (*AHEAD, *fails("2:0.1@optimizer", "4:1.0@spread")), stagger=True, deaths=2
    ),
    Case("validates and saves", "3x2", (*TWO, "run.validate_every=2", "checkpoint.every=4", *fails("5:1.0@vote"))),
]


@pytest.fixture(scope="module")
def like_nccl(runs):
    with Zygote(preload=Path(__file__).with_name("like_nccl.py")) as zygote:
        yield runs.forked_from(zygote)


@pytest.mark.slow  # quick counterparts: the next two tests, which have deaths, too
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_death_among_workers_with_one_ordered_stream_changes_no_bit(case, like_nccl):
    like_nccl.check_exact(like_nccl.of(case, "like NCCL"))


@pytest.mark.parametrize("case", some(SHARDED, quick=1))
def test_sharded_state_uses_only_sums_and_broadcasts(case, like_nccl):
    like_nccl.check_exact(like_nccl.of(case, "like NCCL, sharded"))


@pytest.mark.parametrize(
    ("during", "more", "deaths"),
    [
        ("receive", (), 1),
        pytest.param("connect", fails("6:0.0@backward") + rejoins("9:0.0"), 2, marks=pytest.mark.slow),
    ],
)
def test_a_failed_gpu_kills_only_its_own_worker(during, more, deaths, like_nccl, tmp_path):
    case = Case(f"a GPU fails during {during}", "3x2", more, deaths=deaths, steps=16)
    plan = json.dumps({"during": during, "after": 20, "once": str(tmp_path / "flag")})
    outcome = like_nccl.of(case, "like NCCL", {"RECYCLE_GPU_FAILURE": plan})
    (death,) = [event for event in outcome.all("death_detected") if event["cause"] == "gpu"]
    assert "CUDA error: an illegal memory access was encountered" in death["detail"], explain(outcome)
    assert "its GPU failed: " in outcome.output
    assert [event["worker"] for event in outcome.all("respawned")] == [death["worker"]], explain(outcome)
    like_nccl.check_exact(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("case", TOURS, ids=str)
def test_a_death_at_any_moment_with_sharded_state_changes_no_bit(case, like_nccl):
    like_nccl.check_exact(like_nccl.of(case, "like NCCL, sharded"))


@pytest.mark.slow
@pytest.mark.parametrize("case", list(matrix.tours()), ids=str)
def test_a_death_at_any_moment_changes_no_bit(case, like_nccl):
    like_nccl.check_exact(like_nccl.of(case, "like NCCL"))
