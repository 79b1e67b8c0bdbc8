"""Training by stages equals the plain PyTorch loop on the whole model."""

import pytest
import torch

from recycle_pp.numerics.update_rules import muon as update_rule
from recycle_pp.testing import reference_trainer as plain
from tests.recycle_pp.in_process import small, train

STEPS = 4
HALF = {"optimizer__moments": "bf16"}


def reference(settings):
    model = plain.whole(settings)
    return list(plain.train(settings, STEPS, model)), {name: p.detach() for name, p in model.named_parameters()}


def muon(scale):
    return {"optimizer__name": "muon", "optimizer__muon__scale": scale, "optimizer__muon__momentum": 0.9}


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("bf16-autocast", {}),
        ("fp32", muon("original")),
        ("bf16", muon("adamw")),
        ("fp32", HALF),
        ("bf16", muon("adamw") | HALF),
    ],
)
@pytest.mark.parametrize("stages", [1, 3])
def test_reproducible_training_equals_the_plain_loop_bit_for_bit_in_any_order(
    stages, precision, optimizer, monkeypatch
):
    """The plain loop uses torch.optim.AdamW and, for Muon, also torch.optim.Muon, which iterates in bfloat16."""
    monkeypatch.setattr(update_rule, "rounded", torch.Tensor.bfloat16)
    settings = small(
        numerics__reproducible=True, numerics__precision=precision, parallel__stages=stages, model__dropout=0.1,
        **optimizer,
    )  # fmt: skip
    losses, weights = reference(settings)
    ours, our_weights = train(settings, STEPS, order=[2, 0, 3, 1])
    assert ours == losses
    assert all(torch.equal(weights[name], our_weights[name]) for name in weights)


def test_training_equals_the_plain_loop_to_float_tolerance():
    settings = small(parallel__stages=3)
    (losses, _), (ours, _) = reference(settings), train(settings, STEPS, order=[3, 1, 0, 2])
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in losses], rel=1e-6)


def test_muon_in_float32_trains_like_torchs_muon_in_bfloat16():
    settings = small(**muon("adamw"))
    (losses, _), (ours, _) = reference(settings), train(settings, STEPS)
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in losses], rel=1e-3)
    adamw, _ = train(small(), STEPS)
    assert abs(ours[-1][0] - losses[-1][0]) < 0.05 * abs(ours[-1][0] - adamw[-1][0])


def test_fixed_point_sums_change_the_loss_by_at_most_float_rounding():
    exact, rounded = (train(small(numerics__reproducible=flag), STEPS)[0] for flag in (True, False))
    assert [loss for loss, _ in exact] == pytest.approx([loss for loss, _ in rounded], rel=1e-6)


def test_the_loss_falls():
    losses = [loss for loss, _ in train(small(optimizer__lr=1e-2, run__steps=30), 25)[0]]
    assert losses[-1] < losses[0] - 1
