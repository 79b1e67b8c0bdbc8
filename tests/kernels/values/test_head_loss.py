"""Head projection with cross-entropy: values, gradients, memory, and the split of its backward."""

from importlib import import_module

import pytest
import torch
from compare import DEVICE, close, double, error, grads, randn
from recycle_kernels import cross_entropy, head_loss, head_loss_reference, weight_grad
from torch.utils._python_dispatch import TorchDispatchMode


def problem(tokens, vocabulary, width, dtype=torch.float32, scale=1.0):
    x, weight = randn(tokens, width, dtype=dtype, scale=scale, grad=True), randn(vocabulary, width, grad=True)
    return x, weight, torch.randint(vocabulary, (tokens,), device=DEVICE)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 128 rows, the minimum."""
    monkeypatch.setattr(import_module("recycle_kernels.head_loss"), "CHUNK_BYTES", 1)


@pytest.mark.parametrize(("tokens", "vocabulary", "scale"), [(1, 2, 0.1), (300, 130, 1e-3), (5, 9000, 4.0)])
def test_loss_and_gradients_agree_with_float64(tokens, vocabulary, scale, dtype, small_chunks):
    if dtype == torch.bfloat16:
        scale = min(scale, 0.5)  # bfloat16 would round logits around 100 to multiples of 0.5
    x, weight, targets = problem(tokens, vocabulary, 48, dtype, scale)
    inputs, dloss = double(x, weight), [torch.tensor(0.3, device=DEVICE)]
    loss, exact = head_loss(x, weight, targets), head_loss_reference(*inputs, targets)
    assert loss.dtype == torch.float32
    assert abs((loss - exact).item()) < (1e-6 if dtype == torch.float32 else 1e-2) * max(1.0, exact.item())
    for value, reference in zip(grads(loss, [x, weight], dloss), grads(exact, inputs, dloss), strict=True):
        assert error(value, reference) < (1e-5 if dtype == torch.float32 else 2e-2)  # logits are rounded to the dtype


@pytest.mark.parametrize("counted", [150, pytest.param(1, marks=pytest.mark.slow), 0])
def test_ignored_targets_have_no_loss_and_no_gradient(counted, small_chunks):
    """The loss is the mean over the rows with a target. Without any, the loss is NaN and the gradients are 0."""
    x, weight, targets = problem(200, 130, 48)
    targets[torch.randperm(200, device=DEVICE)[counted:]] = -100
    one, logits = [torch.tensor(1.0, device=DEVICE)], (x @ weight.T).detach().requires_grad_()
    loss, exact = head_loss(x, weight, targets), head_loss_reference(*(inputs := double(x, weight)), targets)
    assert close(loss, exact) if counted else loss.isnan()
    buffer, queue = torch.zeros_like(weight), []
    grads(head_loss(x, weight, targets, defer=queue.append), [x], one)
    with torch.no_grad():
        queue.pop()(lambda dl, rows, parts: weight_grad(buffer, dl, rows))
    found = grads(loss, [x, weight], one)
    found, expected = [*found, buffer], grads(exact, inputs, one)
    for value, reference in zip(found, [*expected, expected[1]], strict=True):
        assert error(value, reference) < 1e-5 if counted else not value.any()
    (of_logits,) = grads(cross_entropy(logits, targets), [logits], one)
    assert not of_logits[targets < 0].any() and bool(of_logits[targets >= 0].any()) == bool(counted)


def test_a_deferred_weight_gradient_has_the_same_bits(dtype, small_chunks):
    x, weight, targets = problem(200, 130, 48, dtype)
    quarter = [torch.tensor(0.25, device=DEVICE)]  # a power of two, so that scaling commutes with rounding
    dx, dw = grads(head_loss(x, weight, targets), [x, weight], quarter)
    queue = []
    loss = head_loss(x, weight, targets, defer=queue.append)
    assert torch.equal(grads(loss, [x], quarter)[0], dx)
    buffer, chunks = torch.zeros_like(weight), []

    def add(dl, rows, parts):
        chunks.append(parts)
        weight_grad(buffer, dl, rows)

    with torch.no_grad():
        queue.pop()(add)
    assert chunks == [2, 2]
    assert torch.equal(buffer, dw)


class Largest(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that any torch op returns."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.bytes = max(self.bytes, out.nbytes)
        return out


def test_no_tensor_holds_all_logits(small_chunks):
    x, weight, targets = problem(256, 150, 16)
    with Largest() as largest:
        head_loss(x, weight, targets).backward()
    assert largest.bytes == 128 * 150 * 4
    with Largest() as largest:
        head_loss_reference(x, weight, targets).backward()
    assert largest.bytes == 256 * 150 * 4  # control: the reference does hold all logits


def test_evaluation_computes_no_gradient():
    x, weight, targets = problem(20, 60, 16)
    with torch.no_grad():
        loss = head_loss(x, weight, targets)
    assert not loss.requires_grad
    assert close(loss, head_loss_reference(*double(x, weight), targets))


def test_autocast_lowers_only_the_precision_of_the_products():
    x, weight, targets = problem(20, 60, 16)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = head_loss(x, weight, targets)
    assert loss.dtype == torch.float32
    assert 0 < error(loss, head_loss_reference(*double(x, weight), targets)) < 1e-2
    dx, dw = torch.autograd.grad(loss, [x, weight])
    assert (dx.dtype, dw.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_cross_entropy_is_precise_for_logits_far_from_zero(offset):
    logits = (randn(6, 9000) + offset).requires_grad_()
    targets = torch.randint(9000, (6,), device=DEVICE)
    (exact_logits,) = double(logits)
    loss, exact = cross_entropy(logits, targets), torch.nn.functional.cross_entropy(exact_logits, targets)
    assert abs((loss - exact).item()) < 1e-6 * max(1.0, abs(offset))
    one = [torch.ones((), device=DEVICE)]
    assert error(*grads(loss, [logits], one), *grads(exact, [exact_logits], one)) < (1e-5 if offset == 0 else 2e-3)


def test_nan_propagates_to_the_loss():
    logits = randn(2, 50)
    logits[1, 7] = float("nan")
    assert cross_entropy(logits, torch.zeros(2, dtype=torch.int64, device=DEVICE)).isnan()
