"""The torch references of the kernel tests, compared with finite differences and torch's own functions."""

import torch
from recycle_kernels import (
    AdamW,
    adamw_reference,
    add_rms_norm_reference,
    cross_entropy_reference,
    head_loss_reference,
    make_chunks,
    rms_norm_reference,
    rope_qkv_reference,
    rope_reference,
    rope_table,
    swiglu_reference,
)
from torch.autograd import gradcheck
from torch.nn import functional as F


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_agree_with_finite_differences():
    table = [t.double() for t in rope_table(3, 4)]
    targets = torch.tensor([1, 0, 4])
    assert gradcheck(rms_norm_reference, (randn(3, 5), randn(5)))
    assert gradcheck(add_rms_norm_reference, (randn(3, 5), randn(3, 5), randn(5)))
    assert gradcheck(lambda x: rope_reference(x, *table), (randn(2, 3, 2, 4),))
    assert gradcheck(lambda x: rope_qkv_reference(x, 2, 1, *table), (randn(1, 3, 4, 4),))
    assert gradcheck(swiglu_reference, (randn(3, 8),))
    assert gradcheck(swiglu_reference, (randn(3, 4), randn(3, 4)))
    assert gradcheck(lambda x, w: head_loss_reference(x, w, targets), (randn(3, 4), randn(6, 4)))
    assert gradcheck(lambda x: cross_entropy_reference(x, targets), (randn(3, 6),))


def test_references_equal_torchs_own_functions():
    x, weight = randn(7, 16), randn(16)
    assert torch.allclose(rms_norm_reference(x, weight), F.rms_norm(x, (16,), weight, 1e-5), rtol=1e-12)
    assert torch.equal(swiglu_reference(x), F.silu(x[:, :8]) * x[:, 8:])


def test_rope_is_a_multiplication_by_a_complex_phase():
    x = randn(2, 9, 3, 8)
    table = rope_table(9, 8)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(*(t.double() for t in table))[None, :, None]
    assert torch.allclose(rope_reference(x, *table), torch.cat([pairs.real, pairs.imag], -1), atol=1e-12)


def test_attention_depends_only_on_position_differences():
    q, k = (randn(1, 1, 1, 8).expand(1, 20, 1, 8) for _ in range(2))
    table = [t.double() for t in rope_table(20, 8)]
    scores = rope_reference(q, *table)[0, :, 0] @ rope_reference(k, *table)[0, :, 0].T
    assert torch.allclose(scores[:-1, :-1], scores[1:, 1:], atol=1e-6)


def test_adamw_follows_torchs_optimizer_step_by_step():
    matrices, vectors = torch.nn.Parameter(randn(20).detach()), torch.nn.Parameter(randn(5).detach())
    decayed, rest = {"params": [matrices], "weight_decay": 0.1}, {"params": [vectors], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([decayed, rest], lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    flat = torch.cat([matrices, vectors]).detach().clone()
    state = (flat, *(torch.zeros(25, dtype=torch.float64) for _ in range(2)))
    chunks = make_chunks([20, 5], [True, False], "cpu")
    for step in range(1, 6):
        grad = randn(25).detach()
        matrices.grad, vectors.grad = grad[:20] * 0.5, grad[20:] * 0.5
        optimizer.step()
        adamw_reference(state, grad, chunks, AdamW(1e-2, weight_decay=0.1), step, scale=0.5)
        assert torch.allclose(flat, torch.cat([matrices, vectors]), rtol=1e-12)


def test_adamw_rounds_its_bfloat16_moments_to_nearest_even_after_the_step():
    param, mean, square, grad = torch.randn(25), torch.randn(25).bfloat16(), torch.rand(25).bfloat16(), torch.randn(25)
    chunks, wide = make_chunks([25], [True], "cpu"), (param.clone(), mean.float(), square.float())
    adamw_reference((param, mean, square), grad, chunks, AdamW(1e-2), 3)
    adamw_reference(wide, grad, chunks, AdamW(1e-2), 3)
    assert torch.equal(param, wide[0])
    assert torch.equal(mean, wide[1].bfloat16()) and torch.equal(square, wide[2].bfloat16())
