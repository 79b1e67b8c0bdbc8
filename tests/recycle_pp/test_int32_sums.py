"""`numerics.sums=int32` in real jobs: half of the bytes, the same bits after deaths, and repeated attempts at steps."""

import json

import pytest

from recycle_pp.testing.local_cluster import Zygote
from tests.recycle_pp.test_models import ALONE, COMMON, DOCUMENTED, STEPS, TWO

pytestmark = pytest.mark.timeout(600)

INT32 = ("numerics.sums=int32",)
DEATHS = ("+fail_at=[0:1.0@vote,2:0.1@backward]", "+rejoin_at=3:0.1")
TOO_FINE = """
from recycle_pp.numerics.gradients import Gradients

follow = Gradients.follow

def finer(self, reduced):
    follow(self, reduced)
    self.exponents = (self.exponents + 12).clamp_(max=126)

Gradients.follow = finer
"""


@pytest.fixture(scope="module")
def careless(tmp_path_factory):
    """A zygote whose jobs expect far too small gradients in every step after the first."""
    preload = tmp_path_factory.mktemp("careless") / "too_fine.py"
    preload.write_text(TOO_FINE)
    with Zygote(preload=preload) as process:
        yield process


def trained(zygote, *overrides, deaths=0):
    """(SHA-256 of the weights, losses, [(repeated step, attempt)])."""
    with zygote.run([*COMMON, *INT32, *overrides]) as job:
        assert job.wait(300) == 0, job.output
        summary = json.loads(job.run.summary.read_text())
        losses = [line["loss"] for line in job.run.lines(job.run.metrics)]
        again = [(e["step"], e["attempt"]) for e in job.run.lines(job.run.events) if e["event"] == "repeated"]
    assert summary["deaths"] == deaths and len(losses) == STEPS
    return summary["weights_sha256"], losses, again


@pytest.mark.parametrize(
    "model",
    [("model=tiny", "numerics.precision=bf16"), pytest.param(DOCUMENTED, marks=pytest.mark.slow)],
    ids=["own, bf16", "custom"],
)
def test_with_deaths_the_bits_equal_those_of_one_worker_and_the_first_step_is_repeated(zygote, model):
    alone, faulty = trained(zygote, *model, *ALONE), trained(zygote, *model, *TWO, *DEATHS, deaths=2)
    assert faulty == alone
    assert alone[2] == [(0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "staggered"])
def test_steps_that_overflow_are_repeated_with_the_same_samples_and_never_skipped(careless, optimizer):
    """The exponents leave 8 bits of headroom and are 12 too fine, so every step needs one more attempt."""
    model = ("model=tiny", f"optimizer={optimizer}", "run.sample_log=true")
    alone, faulty = trained(careless, *model, *ALONE), trained(careless, *model, *TWO, *DEATHS, deaths=2)
    assert faulty == alone
    assert {step for step, _ in alone[2]} == set(range(STEPS))
    assert alone[1][-1] < alone[1][0]


@pytest.mark.slow
def test_the_losses_agree_with_those_of_int64_sums(zygote):
    small, large = (trained(zygote, "model=tiny", *TWO, f"numerics.sums={sums}")[1] for sums in ("int32", "int64"))
    assert small == pytest.approx(large, rel=1e-5)
