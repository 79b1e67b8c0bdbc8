"""Configurations that would not train the whole model are rejected, with a sentence that states the reason."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from recycle_pp.config.compose import compose
from recycle_pp.model.general.initial_values import Folder
from recycle_pp.model.general.source import source_of
from tests.recycle_pp.in_process import pipeline

from . import models


@pytest.mark.parametrize(
    ("build", "stages", "sentence"),
    [
        ("Skips", 2, r"blocks\.2: the part after blocks\.2 uses an earlier tensor .*; use parallel\.stages=1"),
        ("Inputs", 3, r"blocks\.1: .* not among its arguments"),
        ("SkipsTwo", 4, r"no stage may start with blocks\.1: .*; possible first layers: 2, 3 \(model\.split\)"),
        ("Normed", 1, r"forward changes the buffer blocks\.1\.norm\.1\.running_mean: its value would differ"),
        ("Counting", 1, "forward changes the buffer calls"),
        ("Frozen", 1, r"embedding\.weight is frozen, so checkpoints lack it: model\.path must name"),
        ("Unused", 1, r"no gradient would reach spare\.weight"),
        ("Backwards", 1, r"blocks\.2 is called out of turn"),
        ("Looking", 1, "cannot run on tensors without values, so its Python code depends on values"),
        ("Half", 1, r"head\.weight is float16; with this numerics\.precision parameters must be float32"),
        ("Plain", 4, r"the model has 3 layers, too few for parallel\.stages = 4"),
        ("Logits", 1, r"the loss must be a scalar tensor, not \(2, 16, 256\); model\.loss can name a function"),
        ("RoughLoss", 1, r"the loss is bfloat16 and must be float32"),
        ("nothing_of_this_name", 1, "has no nothing_of_this_name"),
        ("settings", 1, "settings"),
    ],
)
def test_a_custom_module_that_cannot_be_split_is_rejected(build, stages, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        pipeline(models.of_function(build, stages))


def test_a_skip_connection_within_a_stage_is_accepted():
    assert len(pipeline(models.of_function("SkipsTwo", 3, model__split=[2, 1, 1]))) == 3
    assert len(pipeline(models.of_function("Skips", 1))) == 1


def test_the_error_about_an_invalid_list_of_layers_names_the_valid_ones():
    with pytest.raises(ValueError, match=r"model\.layers: 'head' is not a list of layers.*; its lists are blocks"):
        pipeline(models.of_function("Plain", layers="head"))


def test_a_loss_that_ignores_the_labels_is_rejected():
    with pytest.raises(ValueError, match="its loss does not depend on the labels"):
        pipeline(models.of_function("Logits", model__loss=f"{models.__name__}:forgets_the_labels"))


def test_a_loss_that_needs_the_routers_of_all_layers_is_accepted_only_in_one_stage(tmp_path):
    models.folder("mixtral", tmp_path, output_router_logits=True)
    assert len(pipeline(models.of_folder(tmp_path, 1))) == 1, "in one stage it trains unchanged"
    with pytest.raises(ValueError, match=r"no stage may start with model\.layers\.1: .*; use parallel\.stages=1"):
        pipeline(models.of_folder(tmp_path, 3))


def test_an_encoder_decoder_is_rejected(tmp_path):
    models.folder("t5", tmp_path)
    with pytest.raises(ValueError, match="is an encoder-decoder; only decoders can be trained"):
        pipeline(models.of_folder(tmp_path))


def test_a_folder_with_an_unknown_configuration_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    with pytest.raises(ValueError, match="no configuration that transformers knows"):
        pipeline(models.of_folder(tmp_path))


def test_the_list_of_layers_must_be_named_if_several_have_its_length(tmp_path, monkeypatch):
    from transformers import GPT2LMHeadModel

    models.folder("gpt2", tmp_path)
    init = GPT2LMHeadModel.__init__

    def with_lists(self, config):
        init(self, config)
        for block in self.transformer.h:
            block.experts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))
        self.more = torch.nn.ModuleList(torch.nn.Identity() for _ in range(others))

    monkeypatch.setattr(GPT2LMHeadModel, "__init__", with_lists)
    others = 2
    assert source_of(models.of_folder(tmp_path)).layers == "transformer.h", "lists within layers do not count"
    others = 3
    with pytest.raises(ValueError, match=r"model\.layers must name .*: transformer\.h and more have 3 modules"):
        source_of(models.of_folder(tmp_path))
    assert source_of(models.of_folder(tmp_path, model__layers="transformer.h")).layers == "transformer.h"


def test_files_whose_tensors_transformers_would_convert_are_rejected(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    models.folder("mixtral", tmp_path)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    assert Folder(tmp_path).find("model.layers.0.mlp.experts.gate_up_proj") is None
    with pytest.raises(ValueError, match=r"contains model\.layers\..*: either transformers converts such files"):
        pipeline(models.of_folder(tmp_path, model__init="weights"))


@pytest.mark.parametrize("kind", ["hf", "llama"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_weights_that_need_scales_are_rejected(kind, dtype, tmp_path):
    weights = changed(tmp_path, lambda name, of: of.to(dtype) if name.endswith("o_proj.weight") else of)
    assert any(of.dtype == dtype for of in weights.values())
    with pytest.raises(
        ValueError, match=r"(wo|wqkv|o_proj)\.weight is (float8_e4m3fn|int8) in the file, so it is quantised"
    ):
        pipeline(of_kind(kind, tmp_path))


@pytest.mark.parametrize("kind", ["hf", "llama"])
def test_a_configuration_with_quantised_weights_is_rejected(kind, tmp_path):
    models.with_weights("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match=r"contains quantised weights \(fp8\), which cannot be trained"):
        pipeline(of_kind(kind, tmp_path))


@pytest.mark.parametrize("kind", ["hf", "llama"])
@pytest.mark.parametrize("name", ["self_attn.q_proj.weight_scale_inv", "self_attn.q_proj.bias"])
def test_a_tensor_that_the_model_does_not_have_is_rejected(kind, name, tmp_path):
    changed(tmp_path, more={f"model.layers.1.{name}": torch.ones(2)})
    with pytest.raises(ValueError, match=rf"contains model\.layers\.1\.{re.escape(name)}, but the model has no such"):
        pipeline(of_kind(kind, tmp_path))


@pytest.mark.parametrize("kind", ["hf", "llama"])
def test_tensors_that_transformers_ignores_are_accepted(kind, tmp_path):
    more = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(256, 32)}
    changed(tmp_path, more=more, tie_word_embeddings=True)
    assert len(pipeline(of_kind(kind, tmp_path))) == 2


def test_patterns_of_names_to_ignore_are_those_of_the_architecture(tmp_path):
    save_file({"a.weight": torch.ones(2), "mtp.layer.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    Folder(tmp_path).refuse_others(["a.weight"], [r"^mtp.*"])
    with pytest.raises(ValueError, match=r"contains mtp\.layer\.weight, but the model has no such tensor"):
        Folder(tmp_path).refuse_others(["a.weight"])
    models.folder("qwen3_next", tmp_path)
    assert source_of(models.of_folder(tmp_path)).ignored == {"^mtp.*"}


def changed(at, change=lambda name, of: of, more=None, **sizes):
    """Writes a model file with `change(name, tensor)` for every tensor, and `more`. Returns its content."""
    models.with_weights("llama", at, **sizes)
    file = at / "model.safetensors"
    weights = {name: change(name, of) for name, of in load_file(file).items()} | (more or {})
    save_file(weights, file, metadata={"format": "pt"})
    return weights


def of_kind(kind, at):
    if kind == "hf":
        return models.of_folder(at, 2, model__init="weights")
    return compose([
        "model=llama", f"model.path={at}", "model.sequence=16", f"data.path={json.decoder.__file__}",
        "data.tokenizer=bytes", "parallel=1x2", "numerics=reproducible",
    ])  # fmt: skip
