"""A transformers folder is imported, trained through a death, and exported, on the fast and on the general path."""

import json

import pytest
import torch

from recycle_pp import export
from recycle_pp.testing.local_cluster import Zygote
from tests.recycle_pp.model.general import models
from tests.recycle_pp.model.test_llama import folder
from tests.recycle_pp.test_models import ALONE, COMMON, TWO

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(600)
DEATH = ("+fail_at=2:0.1@backward", "+rejoin_at=3:0.1")
LR = ("optimizer.lr=1e-3", "data.tokenizer=bytes")


def trained(zygote: Zygote, at, out, kind, *overrides):
    """(SHA-256 of the weights, losses) of a job that starts from folder `at` and exports its model to `out`."""
    with zygote.run([*COMMON, f"model={kind}", f"model.path={at}", *LR, *overrides]) as job:
        assert job.wait(300) == 0, job.output
        summary = json.loads(job.run.summary.read_text())
        losses = [line["loss"] for line in job.run.lines(job.run.metrics)]
        assert export.main([str(job.run.path), str(out)]) == 0
    return summary["weights_sha256"], losses


def loss_of(model):
    batch = models.batch()
    given = {"input_ids": batch.inputs, "labels": batch.labels, "shift_labels": batch.labels}
    with torch.no_grad():
        return model(**given, num_items_in_batch=torch.tensor(32)).loss.item()


def loaded(at):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(at, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.slow  # quick counterpart: the exported models in test_export.py
@pytest.mark.parametrize("kind", ["Qwen3", pytest.param("Llama 3.1", marks=pytest.mark.slow)])
def test_a_folder_is_imported_trained_and_exported_on_both_paths(zygote, kind, tmp_path):
    before = folder(kind, tmp_path / "in")
    fast = trained(zygote, tmp_path / "in", tmp_path / "fast", "llama", *TWO, *DEATH)
    assert fast == trained(zygote, tmp_path / "in", tmp_path / "alone", "llama", *ALONE), "with and without deaths"
    general = trained(zygote, tmp_path / "in", tmp_path / "general", "hf", *TWO)
    assert general[1] == pytest.approx(fast[1], rel=1e-4) and fast[1][-1] < fast[1][0]
    ours, theirs = loaded(tmp_path / "fast"), loaded(tmp_path / "general")
    assert type(ours) is type(theirs) is type(before)
    assert {name: p.shape for name, p in ours.named_parameters()} == {n: p.shape for n, p in before.named_parameters()}
    assert loss_of(ours) == pytest.approx(loss_of(theirs), rel=1e-3)
    assert abs(loss_of(ours) - loss_of(before)) > 0.01


@pytest.mark.slow
def test_bf16_masters_are_exported_in_float32_and_can_be_imported_again(zygote, tmp_path):
    folder("Qwen3", tmp_path / "in")
    bf16 = "numerics.precision=bf16"
    first = trained(zygote, tmp_path / "in", tmp_path / "once", "llama", bf16, *TWO, *DEATH)
    assert first == trained(zygote, tmp_path / "in", tmp_path / "alone", "llama", bf16, *ALONE)
    once = dict(loaded(tmp_path / "once").named_parameters())
    rounded = sum(torch.equal(p, p.bfloat16().float()) for p in once.values())
    assert all(p.dtype == torch.float32 for p in once.values()) and rounded < len(once) / 2
    again = trained(zygote, tmp_path / "once", tmp_path / "twice", "llama", bf16, *TWO)
    assert again[1][0] < first[1][0]
