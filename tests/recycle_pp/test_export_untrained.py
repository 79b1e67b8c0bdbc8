"""Exports contain the tensors that no checkpoint contains: persistent buffers and frozen parameters."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"

from recycle_pp import export, generate
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state import checkpoint, hf_folder
from recycle_pp.telemetry.run_folder import RunFolder
from tests.recycle_pp.in_process import CPU
from tests.recycle_pp.model.general import models
from tests.recycle_pp.model.general.models import Frozen, Plain

transformers = pytest.importorskip("transformers")
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
TOKENS = torch.randint(3, 256, (2, 16), generator=torch.Generator().manual_seed(0))


class Scaled(Plain):
    """A module with a persistent buffer of random values, one of integers, and a buffer outside state_dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(16))
        self.register_buffer("shift", torch.arange(16))
        self.register_buffer("computed", torch.ones(16), persistent=False)

    def run(self, x):
        return super().run(x * self.scale + self.shift) * self.computed


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    """A mixture of experts whose router has a bias that no gradient reaches."""
    at = tmp_path_factory.mktemp("router")
    config = models.folder("glm4_moe", at, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
                           moe_intermediate_size=16, first_k_dense_replace=1)  # fmt: skip
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "e_score" in name:
                buffer.normal_()
    model.save_pretrained(at, save_original_format=False)
    return at


def run_of(settings, at):
    """A run folder with the checkpoint of an untrained model."""
    settings = settings.with_values({"run.dir": str(at), "data.tokenizer": "bytes"})
    run = RunFolder.create(settings)
    state = StageOptimizer(settings, Stage(settings, 0, CPU, run.path)).state()
    saver = checkpoint.Saver(run.checkpoints)
    saver.save(1, 0, state)
    checkpoint.finish(run.checkpoints, 1, [saver.wait()], {})
    return run.path


def of_folder(path, **changes):
    return models.of_folder(path, **{"model__init": "weights", "run__steps": 1} | changes)


@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "merged"])
def test_persistent_buffers_of_a_folder_are_exported_and_loaded_by_generate(router, tmp_path, rank):
    more = {"model__lora__rank": rank, "model__lora__targets": ["q_proj"]} if rank else {}
    run, out = run_of(of_folder(router, **more), tmp_path / "run"), tmp_path / "out"
    assert export.main([str(run), str(out), *["--merge"] * bool(rank)]) == 0
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(at).eval() for at in (router, out))
    sampled, _ = generate.load(hf_folder.of_run(run, None, torch.float32, merge=True)[0])
    with torch.no_grad():
        for model in (after, sampled):
            assert torch.equal(model.get_buffer(BIAS), before.get_buffer(BIAS))
            assert torch.equal(model(TOKENS).logits, before(TOKENS).logits)


def test_generate_refuses_weights_without_a_persistent_buffer(router, tmp_path):
    model, _ = hf_folder.of_run(run_of(of_folder(router), tmp_path / "run"), None, torch.float32)
    del model.parts[BIAS]
    with pytest.raises(ValueError, match=f"config.json and the checkpoint do not match: {BIAS}"):
        generate.load(model)


@pytest.mark.parametrize("kept", [True, False])
def test_buffers_of_a_users_model_are_exported_with_or_without_the_file_of_initial_values(tmp_path, monkeypatch, kept):
    monkeypatch.setattr(models, "Scaled", Scaled, raising=False)
    run = run_of(models.of_function("Scaled"), tmp_path / "run")
    seed = torch.load(run / "seed.pt", weights_only=True)
    if not kept:
        (run / "seed.pt").unlink()
    assert export.main([str(run), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held.keys() == Scaled().state_dict().keys()
    assert all(torch.equal(held[name], seed[name]) for name in ("scale", "shift")), "buffers keep their dtype"
    assert held["head.weight"].dtype == torch.bfloat16


def test_a_users_model_without_such_tensors_is_exported_without_its_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(models, "Mine", type("Mine", (Plain,), {}), raising=False)
    run = run_of(models.of_function("Mine"), tmp_path / "run")
    monkeypatch.delattr(models, "Mine")
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    (run / "seed.pt").unlink()
    assert export.main([str(run), str(tmp_path / "again")]) == 2
    assert "has no Mine; this command needs the model's code" in capsys.readouterr().err


class TiedHead(Frozen):
    """The frozen embedding and the trained head have a second name each."""

    def __init__(self):
        super().__init__()
        self.again, self.output = self.embedding, nn.Linear(16, 256, bias=False)
        self.output.weight = self.head.weight


@pytest.mark.parametrize("build", [Frozen, TiedHead])
def test_frozen_parameters_of_a_users_model_are_exported(tmp_path, monkeypatch, build):
    monkeypatch.setattr(models, "Built", build, raising=False)
    torch.manual_seed(3)
    first = {name: p.detach().clone() for name, p in build().named_parameters()}
    (tmp_path / "in").mkdir()
    save_file(first | {"stray": torch.ones(1)}, tmp_path / "in" / "model.safetensors")
    run = run_of(models.of_function("Built", model__path=str(tmp_path / "in")), tmp_path / "run")
    assert export.main([str(run), str(tmp_path / "out")]) == 0
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert held.keys() == first.keys() and all(torch.equal(held[name], first[name]) for name in first)
