"""What the start says of parameters and memory, against what a stage really holds."""

from __future__ import annotations

import pytest
import torch

from recycle_pp.coordinator.footprint import activations, bytes_of, footprint, parameters
from recycle_pp.model.split import layers_of
from recycle_pp.model.stage import Stage
from recycle_pp.model.stage_module import Batch

from ..in_process import CPU, small

TIED = {"model__tied": True, "model__qk_norm": True, "model__qkv_bias": True, "model__head_dim": 8}
SHAPES = [
    {},
    TIED,
    TIED | {"parallel__stages": 1},
    {"model__kv_heads": 4},
    {"model__recompute": True},
    {"parallel__stages": 1},
]


@pytest.mark.parametrize("changes", SHAPES, ids=str)
def test_parameters_and_activations_are_those_of_the_stages(changes):
    settings = small(**changes)
    for number, layers in enumerate(layers_of(settings.model.layers, settings.parallel.stages)):
        stage = Stage(settings, number, CPU)
        assert parameters(settings.model, layers) == sum(p.numel() for p in stage.parameters.values())
        tokens = settings.parallel.microbatch_size * settings.model.sequence
        assert activations(settings.model, layers, tokens) == pytest.approx(_kept(stage), rel=0.02)


def _kept(stage: Stage) -> int:
    """Bytes of the tensors that autograd keeps, parameters apart."""
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in stage.parameters.values()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    model, size = stage.settings.model, stage.settings.parallel.microbatch_size
    tokens = torch.randint(0, model.vocabulary, (size, model.sequence))
    boundary = [] if stage.first else [torch.randn(size, model.sequence, model.width)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage.forward(0, 0, Batch(tokens, tokens), boundary)
    return sum(seen.values())


def test_settings_that_cost_memory_are_counted():
    plain = bytes_of(small(), 0)
    assert bytes_of(small(numerics__reproducible=True), 0)["gradients"] == 2 * plain["gradients"]
    small_sums = bytes_of(small(numerics__reproducible=True, numerics__sums="int32"), 0)
    assert small_sums["gradients"] == plain["gradients"]
    half = bytes_of(small(numerics__precision="bf16"), 0)
    assert all(2 * half[name] == plain[name] for name in ("activations", "replay log"))
    assert half["weights"] == 1.5 * plain["weights"]
    assert bytes_of(small(optimizer__stagger=True), 0)["optimizer state"] == 2.5 * plain["optimizer state"]
    assert bytes_of(small(schedule__memory_extra=0), 1)["activations"] * 3 == bytes_of(small(), 1)["activations"]
    assert bytes_of(small(parallel__stages=1), 0)["replay log"] == 0


def test_the_start_says_it_in_sentences(monkeypatch):
    monkeypatch.setattr("recycle_pp.coordinator.footprint._memory", lambda: 1e6)
    first, second, third = footprint(small(run__device="cpu"), workers_here=2)
    assert "parameters in 2 stages; each step: 8 samples, 128 tokens" in first
    assert all(name in second for name in ("weights", "gradients", "optimizer state", "activations", "replay log"))
    assert third.startswith("the 2 workers of this machine, torch included, may need 56") and third.endswith(
        "it has 1 MB: that is not enough"
    )
