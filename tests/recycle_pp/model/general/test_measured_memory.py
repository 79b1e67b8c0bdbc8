"""The memory of third-party models, measured on micro-batches of zeros."""

import torch

from recycle_pp.data.batches import Batches
from recycle_pp.model.measured_memory import measured_memory
from recycle_pp.model.stage import Stage
from tests.recycle_pp.in_process import CPU, backward, forward, pipeline, sums

from . import models

X = 2 * 16 * 16 * 4  # bytes of an activation: samples, tokens, width, float32


def test_a_block_keeps_autograds_saved_tensors_or_with_recomputation_only_its_input():
    """The measured bytes of one block are those of its saved tensors.

    LayerNorm keeps x and two numbers per token. `up` keeps its input; GELU and `down` each keep an input of twice the
    width; dropout keeps its mask. torch's checkpoint keeps the state of its generator, 5 KB. The inputs of `up` and
    `down` are kept for W.
    """
    settings = models.of_function("Plain", 3, model__recompute="auto", model__layers="blocks", parallel__memory="1GB")
    kept, again = measured_memory(Stage(settings, 1, CPU))  # one block between two others
    numbers = 2 * 2 * 16 * 4
    assert X * (1 + 1 + 2 + 2) <= kept.flight <= X * (1 + 1 + 2 + 2 + 2) + numbers + 1024
    assert X <= again.flight <= X + 6144
    waiting = X * (1 + 2 + 1 + 2)  # (x, dy) of `up` and `down`
    assert waiting <= kept.waiting <= waiting + X + 1024
    assert kept.boundary == 2 * X, "y to the next stage, dx to the previous one"


def test_measuring_changes_no_state():
    def gradients(measure):
        settings = models.of_function("Routed", 2, numerics__reproducible=True)
        stages, batches = pipeline(settings), Batches(settings)
        for stage in stages if measure else ():
            measured_memory(stage)
        for g in range(2):
            forward(stages, batches, 0, g)
            backward(stages, g)
        return [grad for stage in stages for grad in sums(stage).values()]

    assert all(map(torch.equal, gradients(False), gradients(True)))
