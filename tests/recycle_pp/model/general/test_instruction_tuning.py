"""Instruction tuning trains like a plain loop of transformers over the same conversations."""

import pytest
import torch

from recycle_pp.data.batch import IGNORED
from recycle_pp.data.batches import Batches
from recycle_pp.numerics.hyperparameters import learning_rate
from recycle_pp.testing.reference_trainer import adamw
from tests.recycle_pp.data.chat import chats
from tests.recycle_pp.in_process import train

from . import models

STEPS = 8
T = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen2 with weights, a chat template and conversations."""
    at = models.with_weights("qwen2", tmp_path_factory.mktemp("chat"), vocab_size=264, initializer_range=0.2)
    chats.tokenizer(at)
    chats.many(at / "chats.jsonl", 120)
    return at


@pytest.fixture(autouse=True)
def cache(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))


def of(folder, stages=1, **changes):
    defaults = {
        "data__path": str(folder / "chats.jsonl"), "data__format": "chat", "data__tokenizer": str(folder),
        "model__sequence": T, "model__vocabulary": 264, "model__init": "weights", "run__steps": STEPS,
        "optimizer__lr": 1e-2,
    }  # fmt: skip
    return models.of_folder(folder, stages, **defaults | changes)


def plain(settings):
    """(losses, initial weights, trained weights) of a plain loop.

    It runs every conversation alone, without padding, and divides the sum of a step's losses by its number of labels.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float32).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, batches = adamw(settings, list(model.parameters())), Batches(settings)
    losses = []
    for step in range(STEPS):
        micro = [batches.batch(step, g) for g in range(settings.parallel.microbatches)]
        count, total = sum(int((batch.labels != IGNORED).sum()) for batch in micro), 0.0
        for batch in micro:
            for inputs, labels, ids in zip(batch.inputs, batch.labels, batch.more["document_ids"], strict=True):
                for number in ids.unique():
                    tokens, targets = inputs[ids == number], labels[ids == number]
                    if (targets == IGNORED).all():
                        continue  # the padding
                    logits = model(input_ids=tokens[None]).logits[0]
                    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / count
                    loss.backward()
                    total += loss.item()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), settings.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, step, settings.run.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, before, dict(model.named_parameters())


@pytest.mark.parametrize("stages", [1, 3])
def test_losses_and_weights_equal_those_of_a_plain_loop(stages, folder):
    settings = of(folder, stages)
    history, weights = train(settings, STEPS)
    losses, before, after = plain(settings)
    moved = losses[0] - losses[-1]
    assert moved > 1
    assert [loss for loss, _ in history] == pytest.approx(losses, abs=1e-5 * moved)
    assert weights.keys() == after.keys()
    for name, value in after.items():
        # The gradient of a key's bias is a sum that nearly cancels, so rounding is a larger part of it.
        room = 1e-4 if name.endswith("k_proj.bias") else 1e-5
        assert (weights[name] - value).norm() <= room * (value - before[name]).norm(), name


@pytest.mark.parametrize("kind", ["hf", "llama"])
def test_training_does_not_depend_on_the_layout_or_the_order(kind, folder):
    """The micro-batches have few or many labels. The two runs differ in their order and in the stages."""
    changes = {"numerics__reproducible": True}
    if kind == "llama":
        changes |= {
            "model__kind": "transformer", "model__path": None, "model__layers": 3, "model__width": 24,
            "model__ffn": 40,
        }  # fmt: skip
    history, weights = train(of(folder, **changes), 3)
    other_history, others = train(of(folder, 3, **changes), 3, order=(2, 0, 3, 1))
    assert history == other_history and history[-1][0] < history[0][0]
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
