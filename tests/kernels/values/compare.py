"""Comparison of kernel values with the float64 reference, by the norm of the difference."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def randn(*shape, dtype=torch.float32, scale=1.0, grad=False):
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_(grad)


def error(value, exact):
    """|value - exact| / |exact| in float64. NaN propagates, so that every comparison fails."""
    value, exact = value.detach().double(), exact.detach().double()
    return ((value - exact).norm() / exact.norm()).item()


def tolerance(dtype):
    """Relative tolerance: the rounding error of the dtype, plus some for a short sum."""
    return 1e-6 if dtype == torch.float32 else 1e-2


def close(values, exact, dtype=torch.float32):
    values, exact = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (values, exact))
    assert len(values) == len(exact)
    for value, reference in zip(values, exact, strict=True):
        assert value.shape == reference.shape
        assert error(value, reference) < tolerance(dtype)
    return True


def double(*tensors):
    """Float64 leaf tensors with the same values."""
    return [t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def grads(outputs, inputs, upstream):
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return torch.autograd.grad(outputs, inputs, [g.to(y.dtype) for g, y in zip(upstream, outputs, strict=True)])
