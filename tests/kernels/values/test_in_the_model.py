"""The trainer's own model with `model.kernels=triton`: the same loss and gradients as with the references."""

import torch
from compare import DEVICE, error

from recycle_pp.model.stage import Stage
from recycle_pp.settings import Model, Parallel, Settings


def run(kernels, split):
    """F, then I and W or B, of one micro-batch on the only stage: (loss, gradient)."""
    model = Model(layers=1, width=64, heads=4, kv_heads=2, ffn=96, sequence=8, vocabulary=50, kernels=kernels)
    parallel = Parallel(pipelines=1, stages=1, microbatches=1, microbatch_size=2)
    stage = Stage(Settings(model=model, parallel=parallel), 0, torch.device(DEVICE))
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    loss = stage.forward(0, 0, tokens, tokens + 1)
    if split:
        stage.backward_input(0)
        stage.backward_weight(0)
    else:
        stage.backward(0)
    return loss, stage.gradients.payload()[0]


def test_a_stage_computes_the_same_with_kernels_as_with_references():
    loss, gradient = run("triton", split=True)
    exact_loss, exact_gradient = run("reference", split=True)
    assert error(loss, exact_loss) < 1e-6
    assert error(gradient, exact_gradient) < 1e-5


def test_input_then_weights_gives_the_bits_of_both_at_once():
    assert torch.equal(run("triton", split=True)[1], run("triton", split=False)[1])
