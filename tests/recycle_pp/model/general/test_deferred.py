"""Which weight gradients are deferred to W, and where the initial values come from."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from recycle_pp.model.general.deferred import DeferredLinear
from recycle_pp.model.general.initial_values import Folder, initial_values, seeded
from recycle_pp.model.general.source import source_of
from recycle_pp.model.stage import Stage
from tests.recycle_pp.in_process import CPU, backward, forward, pipeline, sums

from . import models


class Sub(nn.Linear):
    """A subclass of nn.Linear, which is left to autograd."""


class Mixed(models.Plain):
    def __init__(self):
        super().__init__()
        self.blocks[0].up = Sub(16, 32)
        self.blocks[1].up = nn.utils.parametrizations.weight_norm(nn.Linear(16, 32))
        self.blocks[2].up = nn.Sequential(nn.Linear(16, 32))


models.Mixed = Mixed


def test_only_plain_linear_and_conv1d_weights_are_deferred_to_w(tmp_path):
    (stage,) = pipeline(models.of_function("Mixed"))
    waits = {name.rpartition(".")[0] for name in stage.module.deferred}
    assert waits == {"blocks.0.down", "blocks.1.down", "blocks.2.down", "blocks.2.up.0", "head"}
    models.folder("gpt2", tmp_path)
    first, last = pipeline(models.of_folder(tmp_path, 2))
    assert "transformer.h.0.attn.c_attn.bias" in first.module.deferred
    assert "transformer.wte.weight" in first.module.shared
    assert "transformer.wte.weight" not in first.module.deferred, "the gradient of an embedding is computed in I"
    assert "transformer.wte.weight" in last.module.deferred, "that of a head is deferred"


def test_i_omits_exactly_the_deferred_gradients_and_w_gives_the_same_bits_as_b():
    results = []
    for split in (False, True):
        (stage,) = stages = pipeline(models.of_function("Mixed"))
        batches = SimpleNamespace(batch=lambda *_: models.batch(), items=lambda _: None)
        forward(stages, batches, 0, 0)
        if split:
            stage.backward_input(0)
            assert set(stage.gradients.without) == stage.module.deferred
            stage.backward_weight(0)
        else:
            backward(stages, 0)
        results.append(sums(stage))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_a_deferred_module_is_still_a_linear_layer_with_its_names():
    (stage,) = pipeline(models.of_function("Plain"))
    head = stage.module.model.head
    assert isinstance(head, DeferredLinear) and isinstance(head, nn.Linear)
    assert "head.weight" in stage.parameters


def test_a_parameter_without_a_gradient_is_an_error_of_the_micro_batch():
    (stage,) = stages = pipeline(models.of_function("Plain"))
    batches = SimpleNamespace(batch=lambda *_: models.batch(), items=lambda _: None)
    stage.module.model.blocks[1].forward = lambda x: x  # changed after the dry run, which does not see it
    forward(stages, batches, 0, 0)
    with pytest.raises(RuntimeError, match=r"micro-batch 0 gave blocks\.1\.norm\.weight no gradient \(6 such"):
        backward(stages, 0)


def test_the_seed_checkpoint_is_the_model_as_built_and_is_built_once(tmp_path):
    settings = models.of_function("Plain", 3, run__seed=4)
    source = source_of(settings)
    stages = [Stage(settings, stage, CPU, tmp_path) for stage in range(3)]
    torch.manual_seed(4)
    expected = models.Plain()
    for stage in stages:
        for name, parameter in stage.parameters.items():
            assert torch.equal(parameter, expected.get_parameter(name))
    written = (tmp_path / "seed.pt").stat()
    assert torch.equal(initial_values(source, settings, tmp_path).read("head.weight"), expected.head.weight)
    assert (tmp_path / "seed.pt").stat() == written
    assert not torch.equal(seeded(source, 5)["head.weight"], expected.head.weight)


def _value(tmp_path):
    settings = models.of_function("Plain")
    return initial_values(source_of(settings), settings, tmp_path).read("head.weight").sum().item()


def test_concurrent_workers_read_the_same_values(tmp_path):
    with ThreadPoolExecutor(4) as workers:  # each opens the lock itself, like a process
        assert len(set(workers.map(_value, [tmp_path] * 8))) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed.lock", "seed.pt"]


@pytest.mark.parametrize("shards", ["10GB", "20KB"])
def test_the_tensors_of_a_folder_are_found_by_name(tmp_path, shards):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    models.folder("gpt2", tmp_path)
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    whole.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "20KB")
    for stage in pipeline(models.of_folder(tmp_path, 2, model__init="weights")):
        for name, parameter in stage.parameters.items():
            assert torch.equal(parameter, whole.get_parameter(name))
    bare = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path))
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    bare.save_pretrained(tmp_path)  # the names lack `transformer.`
    assert torch.equal(Folder(tmp_path, "transformer").read("transformer.wte.weight"), bare.wte.weight)
