"""The outer step, and its effect on a few islands."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.islands.codec import encode
from recycle_pp.islands.outer import difference, mean_of, merged, stepped

NOTHING = np.zeros(50, np.float32)


def vector(seed, size=50):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


@given(st.floats(0.05, 1.0), st.floats(0.0, 0.95), st.integers(0, 99))
@settings(max_examples=20)
def test_the_outer_step_is_torch_s_sgd_with_nesterov_momentum(lr, decay, seed):
    theta, momentum = vector(seed), NOTHING
    parameter = torch.tensor(theta.copy(), requires_grad=True)
    reference = torch.optim.SGD([parameter], lr=lr, momentum=decay, nesterov=decay > 0)
    for step in range(5):
        mean = vector(seed + 100 * step)
        theta, momentum = stepped(theta, momentum, mean, lr, decay)
        parameter.grad = torch.tensor(mean)
        reference.step()
        np.testing.assert_allclose(theta, parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_two_islands_with_one_step_of_sgd_each_equal_data_parallel_training():
    rng = np.random.default_rng(0)
    data, labels = (
        rng.standard_normal((40, 64, 50)).astype(np.float32),
        rng.standard_normal((40, 64)).astype(np.float32),
    )

    def gradient(weights, step, half):
        x, y = data[step, half], labels[step, half]
        return (x.T @ (x @ weights - y) / len(y)).astype(np.float32)

    halves = slice(0, 32), slice(32, 64)
    together = theta = vector(7)
    momentum, lr = NOTHING, np.float32(0.01)
    for step in range(40):
        together = together - lr * gradient(together, step, slice(0, 64))
        local = {name: theta - lr * gradient(theta, step, half) for name, half in zip("ab", halves, strict=True)}
        deltas = {name: difference(theta, weights, NOTHING) for name, weights in local.items()}
        mean = mean_of(deltas, {"a": 32, "b": 32})
        theta, momentum = stepped(theta, momentum, mean, lr=1.0, decay=0.0)
    assert np.abs(theta - together).max() < 1e-6


def test_theta_of_one_island_follows_its_weights():
    theta = weights = vector(1)
    momentum = residual = NOTHING
    for round in range(20):
        weights = weights + vector(round + 10) * np.float32(1e-3)
        _, sent = encode(difference(theta, weights, residual), 32)
        mean = mean_of({"a": sent}, {"a": 12})
        theta, momentum = stepped(theta, momentum, mean, lr=1.0, decay=0.0)
        assert np.abs(theta - weights).max() < 1e-6


@given(st.permutations(["a", "b", "c"]), st.integers(0, 20))
def test_the_mean_does_not_depend_on_the_order_in_which_deltas_arrive(names, seed):
    deltas = {name: vector(seed + ord(name)) for name in names}
    samples = {"a": 100, "b": 300, "c": 7}
    in_order = {name: deltas[name] for name in sorted(names)}
    assert mean_of(deltas, samples).tobytes() == mean_of(in_order, samples).tobytes()


def test_the_mean_is_weighted_by_samples_and_a_single_delta_is_unchanged():
    deltas = {"a": vector(1), "b": vector(2)}
    mean = mean_of(deltas, {"a": 300, "b": 100})
    np.testing.assert_allclose(mean, 0.75 * deltas["a"] + 0.25 * deltas["b"], rtol=1e-5, atol=1e-6)
    assert mean_of({"a": deltas["a"]}, {"a": 3}).tobytes() == deltas["a"].tobytes()
    assert mean_of({}, {}) is None


@given(st.floats(0, 1), st.integers(0, 9))
def test_the_merge_is_between_weights_and_theta(mix, seed):
    weights, theta = vector(seed), vector(seed + 50)
    found = merged(weights, theta, mix)
    np.testing.assert_allclose(found, mix * weights + (1 - mix) * theta, atol=1e-5)
    assert merged(weights, theta, 1.0).tobytes() == weights.tobytes()
    assert merged(weights, theta, 0.0).tobytes() == theta.tobytes()
