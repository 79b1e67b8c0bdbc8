"""Adapters train like a plain loop of transformers and peft, and frozen parameters have no sums and no state."""

import pytest
import torch

from recycle_pp.data.batches import Batches
from recycle_pp.model.measured_memory import measured_memory
from recycle_pp.model.safetensors_folder import Folder, folder_digest
from recycle_pp.numerics.hyperparameters import learning_rate
from recycle_pp.testing.reference_trainer import adamw
from tests.recycle_pp.in_process import pipeline, train
from tests.recycle_pp.moving import MOVES, Pipeline, moves

from . import models

LORA = {"model__lora__rank": 4, "model__lora__targets": ["q_proj", "v_proj"], "model__init": "weights"}
STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Qwen2 with weights, and a text that it learns within a few steps."""
    at = models.with_weights("qwen2", tmp_path_factory.mktemp("lora"), initializer_range=0.2, tie_word_embeddings=True)
    (at / "text").write_text("the cat sat on the mat. " * 400)
    return at


def of(folder, stages=1, **changes):
    defaults = {"data__path": str(folder / "text"), "run__steps": STEPS, "optimizer__lr": 1e-2}
    return models.of_folder(folder, stages, **LORA | defaults | changes)


def plain(settings):
    """(losses, initial adapters, trained adapters) of an ordinary loop over the same samples."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float32)
    torch.manual_seed(settings.run.seed)
    lora = settings.model.lora
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets)
    model = peft.get_peft_model(base, config).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer, batches = adamw(settings, list(trained.values())), Batches(settings)
    count, losses = settings.parallel.microbatches, []
    for step in range(STEPS):
        total = 0.0
        for g in range(count):
            batch = batches.batch(step, g)
            samples = torch.cat([batch.inputs, batch.labels[:, -1:]], 1)
            loss = model(input_ids=samples, labels=samples).loss / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(list(trained.values()), settings.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings.optimizer, step, settings.run.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, before, {name: p.detach() for name, p in trained.items()}


@pytest.mark.parametrize("stages", [1, 3])
def test_losses_and_adapters_equal_those_of_a_plain_loop(stages, folder):
    settings = of(folder, stages)
    history, weights = train(settings, STEPS)
    losses, before, after = plain(settings)
    moved = losses[0] - losses[-1]
    assert moved > 1
    assert [loss for loss, _ in history] == pytest.approx(losses, abs=1e-5 * moved)
    ours = {f"base_model.model.{name}": value for name, value in weights.items()}
    assert ours.keys() == after.keys()
    for name, value in after.items():
        assert (ours[name] - value).norm() <= 1e-5 * (value - before[name]).norm(), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_does_not_depend_on_the_layout_or_the_order(precision, folder):
    """The adapters are in every linear module, and have dropout on their inputs."""
    changes = {"numerics__reproducible": True, "numerics__precision": precision, "model__lora__dropout": 0.2}
    changes["model__lora__targets"] = "all-linear"
    history, weights = train(of(folder, **changes), 3)
    other_history, others = train(of(folder, 3, **changes, model__recompute=True), 3, order=(2, 0, 3, 1))
    assert history == other_history and history[-1][0] < history[0][0]
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_a_stage_has_sums_and_state_of_adapters_only(folder):
    settings = of(folder, 2)
    for stage in pipeline(settings):
        assert all(".lora_A." in name or ".lora_B." in name for name in stage.names)
        model = stage.module.model
        real = {name: p for name, p in model.named_parameters() if p.device.type != "meta"}
        frozen = {name: p for name, p in real.items() if not p.requires_grad}
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        assert {tied.get(name, name) for name in frozen} == set(stage.module.frozen)
        assert set(real) - set(frozen) == set(stage.names)
        assert all(p.data_ptr() % 256 == 0 for p in frozen.values())
        assert stage.module.deferred == set(stage.names)
        (memory,) = measured_memory(stage)
        sizes = [sum(p.numel() for p in of.values()) for of in (stage.parameters, frozen)]
        assert 0 <= memory.state - 2 * 4 * sizes[0] < 4 * 128 * 2 * len(stage.names)
        assert memory.weights - 4 * sizes[1] == memory.gradient


def test_layers_move_with_their_frozen_parameters(folder, tmp_path):
    five = models.with_weights("qwen2", tmp_path, num_hidden_layers=5)
    changes = {"numerics__reproducible": True, "parallel__microbatches": 2, "data__path": str(folder / "text")}
    config = models.of_folder(five, **LORA, **changes)
    moves(Pipeline(config, [2, 2, 1]), Pipeline(config, [1, 2, 2]), MOVES[::3])


def test_the_digest_of_a_folder_changes_with_its_weights(folder, tmp_path, monkeypatch):
    assert all(stage.module.origin == folder_digest(folder) for stage in pipeline(of(folder, 2)))
    assert pipeline(models.of_folder(folder))[0].module.origin == ""
    other = models.with_weights("qwen2", tmp_path, initializer_range=0.2, tie_word_embeddings=True)
    for whole in (True, False):
        monkeypatch.setattr("recycle_pp.model.safetensors_folder.PIECES", 256 if whole else 2)
        monkeypatch.setattr("recycle_pp.model.safetensors_folder.PIECE", 1 << 16 if whole else 100)
        before = folder_digest(other)
        assert before == folder_digest(folder)
        file = other / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert folder_digest(other) != before
        data[-1] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"targets": ["q_proj", "proj_v"]}, "no module of Qwen2ForCausalLM is called proj_v"),
        ({"targets": ["embed_tokens"]}, "model.embed_tokens is not a linear module"),
        ({"targets": ["lm_head"]}, "lm_head shares its weights with the embedding"),
        ({"targets": ".*layers.0.*_proj"}, "stage 1 has nothing to train: all parameters of model.layers.2 to"),
        ({"targets": ".*nothing"}, "Target modules .*nothing not found in the base model"),
    ],
)
def test_adapters_that_cannot_be_trained_are_refused(changes, sentence, folder):
    changes = {f"model__lora__{key}": value for key, value in changes.items()}
    with pytest.raises(ValueError, match=f"(model.lora.targets: .*)?{sentence}"):
        pipeline(of(folder, 2, **changes))


def test_frozen_parameters_of_a_custom_module_are_read_from_its_folder(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(3)
    values = {name: p.detach() for name, p in models.Frozen().named_parameters()}
    save_file(values, tmp_path / "model.safetensors")
    settings = models.of_function("Frozen", 2, model__path=str(tmp_path))
    first, second = pipeline(settings)
    assert "embedding.weight" not in first.names and second.module.frozen == {}
    embedding = first.module.model.get_parameter("embedding.weight")
    assert torch.equal(embedding, Folder(tmp_path).read("embedding.weight"))
    history, _ = train(settings, 3)
    assert history[-1][0] < history[0][0]
