"""The project's own Transformer, with weights of the Llama family, agrees with transformers in any layout."""

import json
from pathlib import Path

import pytest
import torch

from recycle_pp.config.compose import compose
from recycle_pp.config.llama import llama_sizes
from recycle_pp.data.batches import Batches
from recycle_pp.model.llama_names import to_llama
from tests.recycle_pp.in_process import backward, pipeline, sums, train
from tests.recycle_pp.model.general import models

transformers = pytest.importorskip("transformers")
TEXT = Path(json.__file__).with_name("decoder.py")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILY = {
    "Llama": ("llama", {}),
    "Llama 3.1": ("llama", {"rope_parameters": LLAMA3}),
    "linear RoPE": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "SmolLM": ("llama", {"tie_word_embeddings": True, "head_dim": None}),
    "Mistral": ("mistral", {"head_dim": 16}),  # heads wider than the hidden size, as in Mistral Nemo
    "Qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "Qwen3, untied": ("qwen3", {"tie_word_embeddings": False}),
}
QUICK = ("Llama 3.1", "SmolLM", "Qwen3")  # scaled RoPE, tied, normalised heads; the others run with --full
family = pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILY]
)


def folder(kind, at):
    """A small model, saved in a folder. Biases and norms are random, too."""
    model_type, more = FAMILY[kind]
    config = transformers.AutoConfig.for_model(model_type, **{**models.SIZES, **more})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(at)
    return model.eval()


def of(at, stages=1, *more):
    return compose([
        "model=llama", f"model.path={at}", "model.sequence=16", f"data.path={TEXT}", "data.tokenizer=bytes",
        "parallel.pipelines=1", f"parallel.stages={stages}", "parallel.microbatches=4", "run.steps=4",
        "numerics=reproducible", "optimizer.warmup=1", *more,
    ])  # fmt: skip


@family
@pytest.mark.parametrize("stages", [1, 3])
def test_logits_loss_and_gradients_agree_with_transformers(kind, stages, tmp_path):
    model, batch = folder(kind, tmp_path), models.batch()
    own = pipeline(of(tmp_path, stages))
    seen, head = [], own[-1].module.module.head
    own[-1].module.module.norm.register_forward_hook(lambda module, given, output: seen.append(output[0]))
    boundary = []
    for stage in own:
        boundary = stage.forward(0, 0, batch, boundary)
    backward(own, 0, split=True)
    given = {"input_ids": batch.inputs, "labels": batch.labels, "shift_labels": batch.labels}
    expected = model(**given, num_items_in_batch=torch.tensor(32))
    torch.testing.assert_close(
        (seen[0] @ head.weight.T).view_as(expected.logits), expected.logits, rtol=1e-4, atol=1e-5
    )
    assert boundary[0].item() == pytest.approx(expected.loss.item(), rel=1e-5)
    (expected.loss / 4).backward()
    total = {}
    for stage in own:
        for index, name in enumerate(stage.names):
            grad = torch.empty(stage.parameters[name].shape)
            stage.gradients.restore(index, sums(stage)[name], grad)
            total[name] = total.get(name, 0.0) + grad
    assert total.keys() == to_llama(own[0].settings.model).keys()
    for name, parts in to_llama(own[0].settings.model).items():
        theirs = torch.cat([model.get_parameter(part).grad for part, _ in parts])
        assert (total[name] - theirs).norm() < 1e-4 * theirs.norm(), name


@family
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_does_not_depend_on_the_layout_or_the_order(kind, precision, tmp_path):
    folder(kind, tmp_path)
    more = (f"numerics.precision={precision}", "optimizer.clip=0.5", "optimizer.lr=1e-3")
    history, weights = train(of(tmp_path, 1, *more), 3)
    for stages, order in ((2, (2, 0, 3, 1)), (3, None)):
        others, found = train(of(tmp_path, stages, *more, "model.recompute=true"), 3, order)
        assert others == history
        assert weights.keys() == found.keys() and all(torch.equal(weights[name], found[name]) for name in weights)
    assert history[-1][0] < history[0][0]


def test_a_tied_matrix_is_one_parameter_in_two_stages(tmp_path):
    folder("Qwen3", tmp_path)
    first, middle, last = pipeline(of(tmp_path, 3))
    assert first.names[-1] == last.names[-1] == "embedding.weight" and not middle.module.shared
    assert first.module.shared == last.module.shared == {"embedding.weight": [0, 2]}
    assert [stage.borrows("embedding.weight") for stage in (first, last)] == [False, True]
    (alone,) = pipeline(of(tmp_path, 1))
    assert alone.names.count("embedding.weight") == 1 and "head.weight" not in alone.names
    batch = Batches(of(tmp_path)).batch(0, 0)
    assert alone.forward(0, 0, batch)[0].isfinite()


@pytest.mark.parametrize(
    ("kind", "more", "sentence"),
    [
        ("gemma2", {}, "model=llama does not support model_type gemma2, which .*config.json requires; use model=hf"),
        ("llama", {"attention_bias": True}, "model=llama does not support attention_bias"),
        ("mistral", {"sliding_window": 8}, "model=llama does not support sliding_window"),
        ("llama", {"attention_dropout": 0.1}, "model=llama does not support attention_dropout"),
        ("llama", {"hidden_act": "gelu"}, "model=llama does not support hidden_act gelu"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type dynamic"),
    ],
)
def test_unsupported_features_are_rejected_by_name(kind, more, sentence, tmp_path):
    models.folder(kind, tmp_path, **more)
    with pytest.raises(ValueError, match=sentence):
        of(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_key_value_heads": 4},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ],
    ids=str,
)
def test_a_missing_key_has_the_default_of_transformers(kind, more, tmp_path):
    sizes = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "num_attention_heads": 32, **sizes, **more}))
    found, config = llama_sizes(tmp_path, 64), transformers.AutoConfig.from_pretrained(tmp_path)
    rope = config.rope_parameters
    assert found["kv_heads"] == config.num_key_value_heads and found["norm_eps"] == config.rms_norm_eps
    assert found["head_dim"] == getattr(config, "head_dim", 2) and found["tied"] == config.tie_word_embeddings
    assert found["rope_theta"] == rope["rope_theta"] and (found["rope_scaling"] == [2.0]) == ("factor" in rope)


def test_a_missing_sliding_window_is_that_of_transformers(tmp_path):
    models.folder("mistral", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    window = transformers.AutoConfig.from_pretrained(tmp_path).sliding_window
    assert llama_sizes(tmp_path, window)
    with pytest.raises(ValueError, match="model=llama does not support sliding_window"):
        llama_sizes(tmp_path, window + 1)


def test_a_missing_size_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}')
    with pytest.raises(ValueError, match=r"config\.json has no num_hidden_layers, which model=llama needs"):
        of(tmp_path)


def test_a_sliding_window_as_long_as_a_sample_is_accepted(tmp_path):
    models.folder("mistral", tmp_path, sliding_window=16)
    assert of(tmp_path).model.layers == 3
