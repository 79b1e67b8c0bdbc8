"""Instruction tuning in real jobs. The mean over a step's labels has the same bits wherever its micro-batches run."""

import json

import pytest

from tests.recycle_pp.data.chat import chats
from tests.recycle_pp.model.general import models

pytestmark = pytest.mark.timeout(300)
ALONE = ("parallel=1x1", "parallel.microbatches=12")
TWO = ("parallel=2x2", "parallel.microbatches=6")
HF = ("model=hf",)
OWN = ("model=tiny", "model.vocabulary=264")


@pytest.fixture(scope="module")
def trained(zygote_of_transformers, tmp_path_factory):
    """trained(overrides): (SHA-256 of the weights, losses, validation losses, output) of a job; equal jobs run once."""
    folder, known = tmp_path_factory.mktemp("chat"), {}
    models.with_weights("qwen2", folder, vocab_size=264, initializer_range=0.2)
    chats.tokenizer(folder)
    chats.many(folder / "chats.jsonl", 200)
    common = [
        "data.format=chat", f"data.path={folder / 'chats.jsonl'}", f"data.tokenizer={folder}", "model.sequence=160",
        "data.validation_share=0.2", "run.steps=6", "run.validate_every=3", "run.validate_samples=6",
        "numerics=reproducible", "optimizer.lr=1e-2",
    ]  # fmt: skip

    def run(*overrides, deaths=0):
        if overrides not in known:
            more = [f"model.path={folder}"] if "model=hf" in overrides else []
            with zygote_of_transformers.run(
                [*common, *overrides, *more], environment={"XDG_CACHE_HOME": str(folder)}
            ) as job:
                assert job.wait(250) == 0, job.output
                summary, lines = json.loads(job.run.summary.read_text()), job.run.lines(job.run.metrics)
                assert summary["deaths"] == deaths, job.output
                losses = [line["loss"] for line in lines]
                held_out = [line["val_loss"] for line in lines if "val_loss" in line]
                known[overrides] = (summary["weights_sha256"], losses, held_out), job.output
        return known[overrides]

    return run


@pytest.mark.parametrize(
    ("model", "overrides", "deaths"),
    [
        (HF, ("+fail_at=[2:0.1@backward,5:1.0@validation]", "+rejoin_at=3:0.1"), 2),
        (OWN, ("parallel.sharded=true", "optimizer.stagger=true", "+fail_at=3:1.1@allreduce"), 1),
    ],
    ids=["hf", "own-sharded"],
)
def test_a_death_changes_no_bit_of_weights_and_losses(trained, model, overrides, deaths):
    found, output = trained(*model, *TWO, *overrides, deaths=deaths)
    expected, _ = trained(*model, *ALONE)
    (weights, losses, held_out) = found
    assert weights and found == expected
    assert losses[-1] < losses[0] and len(held_out) == 2 and held_out[1] < held_out[0]
    assert "200 conversations in" in output and "samples of 160 tokens, of which" in output
    assert "conversations were longer and lost" in output


def test_a_missing_chat_template_is_reported_in_one_sentence(zygote_of_transformers, tmp_path):
    folder = chats.tokenizer(tmp_path / "t", template="")
    overrides = ["data.format=chat", f"data.path={chats.many(tmp_path / 'a.jsonl')}", f"data.tokenizer={folder}"]
    with zygote_of_transformers.run([*OWN, *TWO, *overrides], environment={"XDG_CACHE_HOME": str(tmp_path)}) as job:
        assert job.wait(100) == 2, job.output
        assert f"data.tokenizer={folder} has no chat template" in job.output
