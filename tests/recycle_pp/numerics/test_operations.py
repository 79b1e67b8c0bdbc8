"""The reference operations match their formulas, differentiated by autograd."""

import pytest
import torch
from torch.nn import functional as F

from recycle_pp.model.transformer import rope_tables
from recycle_pp.numerics import torch_operations as reference
from recycle_pp.numerics.backends import operations

CPU = torch.device("cpu")


def close_in_value_and_gradient(ours, formula, *inputs):
    """Compares both functions on the same inputs, with a random gradient of their results."""
    results = []
    for function in (ours, formula):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.manual_seed(1)
        torch.autograd.backward(outputs, [torch.randn_like(y) for y in outputs])
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_rms_norm():
    x, weight = torch.randn(10, 24) * 3, torch.randn(24)
    close_in_value_and_gradient(
        lambda x, w: reference.add_rms_norm(x, None, w, 1e-5)[0], lambda x, w: F.rms_norm(x, (24,), w, 1e-5), x, weight
    )


def test_rms_norm_first_adds_the_branch_and_also_returns_the_sum():
    def formula(x, branch, weight):
        return F.rms_norm(x + branch, (24,), weight, 1e-5), x + branch

    close_in_value_and_gradient(
        lambda *operands: reference.add_rms_norm(*operands, 1e-5), formula, *torch.randn(2, 10, 24), torch.randn(24)
    )


def test_swiglu():
    def formula(gate_up):
        gate, up = gate_up.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up

    close_in_value_and_gradient(reference.swiglu, formula, torch.randn(6, 14))


def test_rope_rotates_queries_and_keys_but_not_values():
    cos, sin = rope_tables(5, 8, 10000.0, CPU)

    def turned(x):  # the same rotation in complex numbers
        pair = torch.complex(*x.double().chunk(2, -1)) * torch.complex(cos, sin).to(torch.complex128)
        return torch.cat([pair.real, pair.imag], -1).float()

    def formula(qkv):
        q, k, v = qkv.split([4, 2, 2], 2)
        return turned(q), turned(k), v.clone()

    close_in_value_and_gradient(
        lambda qkv: tuple(y.clone() for y in reference.rope_qkv(qkv, 4, 2, cos, sin)), formula, torch.randn(2, 5, 8, 8)
    )


def test_rope_angles_are_position_times_a_falling_frequency():
    cos, sin = rope_tables(3, 4, 100.0, CPU)
    angle = torch.tensor([[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]).unsqueeze(1)
    torch.testing.assert_close(cos, angle.cos())
    torch.testing.assert_close(sin, angle.sin())


def test_the_loss_is_float32_for_any_logits():
    x, weight, targets = torch.randn(6, 5).bfloat16(), torch.randn(9, 5).bfloat16(), torch.arange(6)
    loss = reference.head_loss(x, weight, targets, None, 0)
    assert loss.dtype == torch.float32
    expected = -(x @ weight.T).float().log_softmax(-1)[torch.arange(6), targets].mean()
    torch.testing.assert_close(loss, expected)


def test_an_unknown_choice_of_kernels_is_rejected_by_name():
    with pytest.raises(ValueError, match=r"model\.kernels must be auto, triton or reference, not 'cuda'"):
        operations("cuda", CPU)
