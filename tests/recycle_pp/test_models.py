"""Third-party models in real jobs: after any deaths the weights equal those of a single worker, bit for bit."""

import json
from pathlib import Path

import pytest

from recycle_pp.testing.local_cluster import Zygote
from tests.recycle_pp.model.general import models

pytestmark = pytest.mark.timeout(600)

TEXT = Path(json.__file__).with_name("decoder.py")
STEPS = 6
COMMON = (
    f"data.path={TEXT}", "numerics=reproducible", "model.sequence=16", f"run.steps={STEPS}",
    "run.validate_every=3", "checkpoint.every=3", "optimizer.clip=null",
)  # fmt: skip
HERE = models.__name__
DOCUMENTED = ("model=custom", f"model.build={HERE}:documented", "model.layers=blocks")
ALONE = ("parallel=1x1", "parallel.microbatches=12")
TWO = ("parallel=2x2", "parallel.microbatches=6")
THREE = ("parallel.pipelines=3", "parallel.stages=3", "parallel.microbatches=4")
MOMENTS = ("backward", "weight", "allreduce", "vote", "optimizer", "commit", "checkpoint")
full = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(zygote):
    """trained(overrides): (SHA-256 of the weights, steps, profile.json) of a job; equal jobs run once.

    steps: the loss and the gradient's norm of each step"""
    known = {}

    def run(*overrides, deaths=0, ends=0):
        if overrides not in known:
            with zygote.run([*COMMON, *overrides]) as job:
                assert job.wait(500) == ends, job.output
                if ends:
                    return job.output
                summary = json.loads(job.run.summary.read_text())
                steps = [(line["loss"], line["grad_norm"]) for line in job.run.lines(job.run.metrics)]
                profile = json.loads(job.run.profile.read_text()) if job.run.profile.exists() else {}
                assert summary["deaths"] == deaths and summary["weights_sha256"], job.output
                assert (job.run.checkpoints / f"step-{STEPS:06}" / ".metadata").exists(), job.output
            known[overrides] = summary["weights_sha256"], steps, profile
        return known[overrides]

    return run


def same(trained, model, *overrides, deaths=1):
    """Asserts that weights, losses and norms of the job equal those of a single worker."""
    (weights, steps, _), alone = trained(*model, *overrides, deaths=deaths), trained(*model, *ALONE)
    assert (weights, steps) == alone[:2]
    assert steps[-1][0] < steps[0][0]


def test_the_documented_module_continues_after_a_death(trained):
    same(trained, DOCUMENTED, *TWO, "+fail_at=2:0.1@backward", "+rejoin_at=3:0.1")
    profile = trained(*DOCUMENTED, *TWO, "+fail_at=2:0.1@backward", "+rejoin_at=3:0.1", deaths=1)[2]
    assert profile["boundary_bytes"] == [2 * 4 * 2 * 16 * 32], "two float32 tensors of 2 x 16 x 32"
    assert 0 < profile["deferred_share"][0] < profile["deferred_share"][1] < 1


@pytest.mark.slow
def test_the_documented_module_recomputes_if_its_measured_memory_does_not_fit(trained):
    scarce = ("parallel.memory=1MB", "model.recompute=auto")
    same(trained, DOCUMENTED, *TWO, *scarce, "+fail_at=2:0.1@backward")
    profile = trained(*DOCUMENTED, *TWO, *scarce, "+fail_at=2:0.1@backward", deaths=1)[2]
    for kept, again in profile["memory"]:
        assert kept["flight"] > again["flight"] > 0


@full
@pytest.mark.parametrize("kind", ["own", "custom"])
def test_in_bf16_a_death_changes_no_bit_and_boundary_tensors_have_half_the_bytes(trained, kind):
    model = (*(DOCUMENTED if kind == "custom" else ("model=tiny",)), "numerics.precision=bf16")
    overrides = (*TWO, "+fail_at=[2:0.1@backward,4:1.0@allreduce]", "+rejoin_at=3:0.1")
    same(trained, model, *overrides, deaths=2)
    profile = trained(*model, *overrides, deaths=2)[2]
    assert profile["boundary_bytes"] == ([2 * (2 * 2 * 16 * 32)] if kind == "custom" else [2 * 2 * 16 * 16])


@full
@pytest.mark.parametrize("kind", ["own", "hf"])
def test_with_a_document_mask_a_death_changes_no_bit(trained, kind, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("documents")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    own, hf = ("model=tiny",), ("model=hf", f"model.path={models.folder('gpt2', folder / 'gpt2')}", "model.init=random")
    texts = [f"data.path=[{TEXT},{TEXT.with_name('encoder.py')}]", "data.tokenizer=bytes", "data.document_mask=true"]
    model = (*(own if kind == "own" else hf), *texts)
    same(trained, model, *TWO, "+fail_at=[2:0.1@backward,4:1.0@allreduce]", "+rejoin_at=3:0.1", deaths=2)


@full
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "olmoe"])
def test_in_bf16_an_architecture_continues_after_a_death(trained, kind, tmp_path):
    model = ("model=hf", f"model.path={models.folder(kind, tmp_path)}", "model.init=random", "numerics.precision=bf16")
    same(trained, model, *THREE, "optimizer=staggered", "+fail_at=2:0.0@backward")


def test_a_model_that_cannot_be_split_ends_the_job_with_one_sentence_and_code_2(trained):
    skips = ("model=custom", f"model.build={HERE}:Skips", "model.layers=blocks")
    output = trained(*skips, *TWO, ends=2)
    assert "no stage may start with blocks.2: the part after blocks.2 uses an earlier tensor" in output


@full
@pytest.mark.parametrize("optimizer", ["adamw", "staggered"])
@pytest.mark.parametrize("victim", ["0.0", "0.2"])  # these workers also save
@pytest.mark.parametrize("moment", MOMENTS)
def test_tied_weights_survive_a_death_at_any_moment_on_either_stage(trained, moment, victim, optimizer):
    fault = f"+fail_at=2:{victim}@{moment}"
    same(trained, DOCUMENTED, *THREE, f"optimizer={optimizer}", fault)


@full  # quick counterpart: test_ties.py
def test_tied_gradients_are_summed_again_with_the_exponents_of_their_step(trained):
    """A worker dies before its vote, when other workers have updated early and have the exponents of the next step."""
    faults = "+fail_at=[1:0.0@vote,2:1.2@vote,4:0.2@vote]"
    model = (*DOCUMENTED, "numerics.sums=int32")
    same(trained, model, *THREE, "optimizer=staggered", faults, deaths=3)


@full
@pytest.mark.parametrize("state", [(), ("parallel.sharded=true",)], ids=["whole", "sharded"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_only_the_hung_worker_is_killed_while_a_stage_waits_for_its_part_of_a_tied_gradient(trained, moment, state):
    quick = ("control.heartbeat=0.1", "control.suspicion=1.5")
    same(trained, DOCUMENTED, *THREE, *quick, *state, f"+hang_at=2:0.0@{moment}")


@pytest.mark.parametrize(
    ("optimizer", "faults", "more"),
    [
        ("staggered", "2:0.0@vote,4:1.2@spread", ()),
        pytest.param("adamw", "1:1.0@allreduce,3:2.0@spread", (), marks=full),
        pytest.param("adamw", "1:1.2@commit,3:2.0@optimizer", ("numerics.sums=int32",), marks=full),
        pytest.param("staggered", "1:1.2@vote,3:2.0@optimizer", ("numerics.precision=bf16",), marks=full),
    ],
)
def test_tied_weights_survive_with_sharded_state(trained, optimizer, faults, more):
    model = (*DOCUMENTED, *more)
    sharded = ("parallel.sharded=true", f"optimizer={optimizer}", f"+fail_at=[{faults}]")
    same(trained, model, *THREE, *sharded, deaths=2)


@full
def test_tied_weights_survive_two_deaths_at_once_that_leave_unequal_stages(trained):
    faults = ("+fail_at=[1:0.0@forward,2:1.0@allreduce,2:2.2@vote,3:1.1@backward]", "+rejoin_at=4:0.0")
    same(trained, DOCUMENTED, *THREE, *faults, deaths=4)


@full
@pytest.mark.parametrize("state", [(), ("parallel.sharded=true",)], ids=["whole", "sharded"])
def test_tied_weights_work_over_ordered_streams_without_tags(trained, state):
    """The messages are like NCCL's (see tests/failures/like_nccl.py)."""
    with Zygote(preload=Path(__file__).parents[1] / "failures" / "like_nccl.py") as zygote:
        overrides = [*COMMON, *DOCUMENTED, *THREE, *state, "+fail_at=[2:0.0@allreduce,3:1.2@vote]"]
        overrides += ["+hang_at=4:1.0@allreduce", "control.heartbeat=0.1", "control.suspicion=1.5"]
        with zygote.run(overrides) as job:
            assert job.wait(300) == 0, job.output
            summary = json.loads(job.run.summary.read_text())
    assert (summary["weights_sha256"], summary["deaths"]) == (trained(*DOCUMENTED, *ALONE)[0], 3)


@full
@pytest.mark.parametrize("kind", models.ARCHITECTURES)
def test_an_architecture_continues_after_a_death(trained, kind, tmp_path):
    model = ("model=hf", f"model.path={models.folder(kind, tmp_path)}", "model.init=random")
    same(
        trained,
        model,
        "parallel.pipelines=2",
        "parallel.stages=3",
        "parallel.microbatches=6",
        "+fail_at=2:0.0@backward",
    )


@full
def test_a_job_resumes_from_a_checkpoint_in_another_layout(zygote, tmp_path):
    ends = []
    for shapes in ((ALONE, ALONE), (TWO, THREE), (THREE, ALONE)):
        place = tmp_path / str(len(ends))
        for steps, shape, more in zip((3, STEPS), shapes, ((), ("run.resume=true",)), strict=True):
            overrides = [*COMMON, *DOCUMENTED, *shape, f"run.dir={place}", *more, f"run.steps={steps}"]
            with zygote.run([*overrides, "optimizer.warmup=0", "optimizer.min_lr=3e-3"]) as job:
                assert job.wait(300) == 0, job.output
                summary = json.loads(job.run.summary.read_text())
        ends.append(summary["weights_sha256"])
    assert len(set(ends)) == 1
