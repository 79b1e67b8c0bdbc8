"""SwiGLU: values and gradients with packed and with separate inputs."""

import torch
from compare import close, double, grads, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_kernels import swiglu, swiglu_reference


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 6), width=st.sampled_from([1, 33, 2048, 2500]), exponent=st.integers(-12, 12))
def test_any_shape_and_magnitude_agrees_with_float64(rows, width, exponent):
    gate, up = randn(rows, width, grad=True), randn(rows, width, scale=10.0**exponent, grad=True)
    inputs = double(gate, up)
    y, exact, dy = swiglu(gate, up), swiglu_reference(*inputs), randn(rows, width)
    assert close(y, exact)
    assert close(grads(y, [gate, up], [dy]), grads(exact, inputs, [dy]))


def test_a_packed_projection_gets_a_packed_gradient(dtype):
    packed = randn(3, 4, 2 * 300, dtype=dtype, grad=True)
    (exact_packed,) = double(packed)
    y, exact, dy = swiglu(packed), swiglu_reference(exact_packed), randn(3, 4, 300, dtype=dtype)
    assert close(y, exact, dtype)
    assert close(grads(y, [packed], [dy]), grads(exact, [exact_packed], [dy]), dtype)
    assert torch.equal(y, swiglu(*packed.chunk(2, -1)))


def test_large_gates_saturate_without_nan():
    gate = torch.tensor([[-1e30, -200.0, 200.0, 1e30]], device=randn(1).device, requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    y = swiglu(gate, up)
    assert close(y, gate.clamp(min=0))
    dgate, dup = grads(y, [gate, up], [torch.ones_like(y)])
    assert close(dgate, (gate > 0).float())
    assert close(dup, gate.clamp(min=0))


def test_transposed_inputs_get_gradients_too():
    gate, up = (randn(5, 3, 40, grad=True) for _ in range(2))
    inputs = double(gate, up)
    y, exact = swiglu(gate.transpose(0, 1), up.transpose(0, 1)), swiglu_reference(*(x.transpose(0, 1) for x in inputs))
    dy = randn(3, 5, 40)
    assert close(y, exact)
    assert close(grads(y, [gate, up], [dy]), grads(exact, inputs, [dy]))
