"""The results of a stage do not depend on the split of the model, the time of W, or the worker."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.data.batches import Batches
from recycle_pp.model.measured_memory import allocations
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.testing import reference_trainer as plain
from tests.recycle_pp.in_process import CPU, backward, forward, pipeline, reduce_alone, small, sums

PRECISIONS = ["fp32", "bf16", "bf16-autocast"]
shapes = st.fixed_dictionaries(
    {
        "model__layers": st.integers(3, 4),
        "model__heads": st.sampled_from([2, 6]),
        "model__width": st.sampled_from([12, 36]),
        "model__ffn": st.sampled_from([7, 32]),
        "model__sequence": st.sampled_from([5, 16]),
        "model__dropout": st.sampled_from([0.0, 0.2]),
        "model__recompute": st.booleans(),
        "parallel__stages": st.integers(1, 3),
        "parallel__microbatch_size": st.integers(1, 3),
        "numerics__precision": st.sampled_from(PRECISIONS),
        "numerics__reproducible": st.booleans(),
    }
)


@settings(max_examples=20, deadline=None)
@given(shapes)
def test_i_and_then_w_gives_the_same_bits_as_b(changes):
    config = small(**changes)
    batches, results = Batches(config), []
    for split in (False, True):
        stages = pipeline(config)
        for g in (2, 0):
            forward(stages, batches, 3, g)
            backward(stages, g, split=split)
        results.append([sums(stage) for stage in stages])
    for fused, deferred in zip(*results, strict=True):
        assert all(torch.equal(fused[name], deferred[name]) for name in fused)


@settings(max_examples=20, deadline=None)
@given(shapes)
def test_stages_of_any_split_compute_the_same_bits_as_autograd_on_the_whole_model(changes):
    config = small(**changes | {"numerics__reproducible": False})
    stages, batches, model = pipeline(config), Batches(config), plain.whole(config)
    plain.masters_of(config, list(model.parameters()))
    with torch.autocast("cpu", torch.bfloat16, enabled=config.numerics.precision == "bf16-autocast"):
        batch = batches.batch(1, 2)
        expected = model(batch.inputs, batch.labels, key=(config.run.seed, 1, 2))
    (expected / stages[0].microbatches).backward()
    assert torch.equal(forward(stages, batches, 1, 2), expected)
    backward(stages, 2)
    gradients = {name: grad for stage in stages for name, grad in sums(stage).items()}
    assert list(gradients) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(gradients[name], plain.gradient(parameter)), name


def test_the_initial_weights_do_not_depend_on_the_split():
    def weights(**changes):
        stages = pipeline(small(model__layers=5, **changes))
        return {name: digest for stage in stages for name, digest in stage.digests().items()}

    whole = weights(parallel__stages=1)
    assert weights(parallel__stages=3) == weights(parallel__stages=2, model__split=[4, 1]) == whole
    assert weights(parallel__stages=1, run__seed=1) != whole
    assert len(set(whole.values())) == len(whole) - 2 * 5, "only the 11 norms start equal"


def test_a_stage_whose_state_comes_from_a_peer_draws_no_values(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "normal_", None)
    stage = Stage(small(model__layers=2), 0, CPU, filled=False)
    assert stage.parameters and not any(parameter.any() for parameter in stage.parameters.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_depends_only_on_seed_step_and_microbatch(recompute):
    config = small(model__dropout=0.3, model__recompute=recompute)
    batches = Batches(config)
    batch = batches.batch(0, 0)

    def loss(stages, step, g):
        (x,) = stages[1].forward(step, g, batch, stages[0].forward(step, g, batch))
        return x

    here, elsewhere = pipeline(config), pipeline(config)
    loss(elsewhere, 7, 3)  # stands for another worker, which has drawn random numbers before
    assert loss(here, 2, 1) == loss(elsewhere, 2, 1)
    assert len({loss(here, *key).item() for key in [(2, 1), (2, 2), (3, 1)]}) == 3
    assert here[1].evaluate(batch, here[0].evaluate(batch)) != [loss(here, 2, 1)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputing_changes_no_bit(precision):
    def gradients(recompute):
        config = small(model__dropout=0.1, model__recompute=recompute, numerics__precision=precision)
        stages, batches = pipeline(config), Batches(config)
        loss = forward(stages, batches, 0, 0)
        backward(stages, 0, split=True)
        return [loss, *(grad for stage in stages for grad in sums(stage).values())]

    assert all(map(torch.equal, gradients(False), gradients(True)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputation_may_be_switched_between_any_two_micro_batches(precision):
    """For example after a death. Micro-batches in flight keep the mode of their forward."""
    config = small(model__dropout=0.1, numerics__precision=precision)

    def gradients(*ways):
        stages, batches = pipeline(config), Batches(config)
        for g, again in enumerate(ways):
            for stage in stages:
                stage.module.recompute = again
            forward(stages, batches, 0, g)
        for g in range(len(ways)):
            backward(stages, g, split=g % 2 == 0)
        return [grad for stage in stages for grad in sums(stage).values()]

    assert all(map(torch.equal, gradients(False, False, False), gradients(True, False, True)))


def test_recomputing_keeps_only_the_inputs_of_layers():
    """F keeps about one activation of (b T, H) per layer instead of about ten."""

    def kept(recompute):
        config = small(model__recompute=recompute, model__layers=6)
        stage = Stage(config, 0, CPU)
        saved: set[tuple[int, int]] = set()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.add((t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())) or t, lambda t: t
        ):
            stage.forward(0, 0, Batches(config).batch(0, 0))
        return sum(size for _, size in saved)

    activation = 2 * 16 * 24 * 4
    assert kept(True) <= 3 * activation + 2 * 16 * 8 < 24 * activation < kept(False)


def test_i_frees_the_activations_and_w_frees_its_inputs():
    config = small()
    stage = Stage(config, 0, CPU)
    stage.forward(0, 0, Batches(config).batch(0, 0))
    flight = stage._flights[0]
    output = weakref.ref(flight.outputs[0])
    stage.backward_input(0, [torch.ones(of.shape) for of in stage.module.gives])
    gc.collect()
    assert output() is None
    waiting = weakref.ref(flight.queue[0][2][0])
    stage.backward_weight(0)
    gc.collect()
    assert waiting() is None and not stage._flights and not flight.queue


def test_tokens_and_targets_are_moved_to_the_device_of_the_stage(monkeypatch):
    config = small(parallel__stages=1)
    (stage,) = pipeline(config)
    came = []

    def module(batch, boundary, key):
        came.append((batch.inputs.device.type, batch.labels.device.type))
        return [torch.zeros(())]

    module.takes, module.reads = [], True
    monkeypatch.setattr(stage, "module", module)
    monkeypatch.setattr(stage, "_autocast", nullcontext)
    stage.device = torch.device("meta")
    stage.forward(0, 0, Batches(config).batch(0, 0))
    stage.evaluate(Batches(config).validation(0))
    assert came == [("meta", "meta")] * 2


def test_a_single_stage_is_first_and_last():
    config = small(parallel__stages=1)
    (stage,) = pipeline(config)
    assert stage.first and stage.last
    (loss,) = stage.forward(0, 0, Batches(config).batch(0, 0))
    assert loss.shape == () and loss.dtype == torch.float32 and not loss.requires_grad
    assert stage.backward(0) == []
    assert reduce_alone([stage])[0].losses[0] == loss


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16-autocast", torch.float32), ("bf16", torch.bfloat16)],
)
def test_boundary_tensors_have_the_announced_shape_and_dtype(precision, dtype):
    config = small(numerics__precision=precision)
    first, last = pipeline(config)
    batch = Batches(config).batch(0, 0)
    (y,) = first.forward(0, 0, batch)
    last.forward(0, 0, batch, [y])
    (dy,) = last.backward_input(0)
    (announced,) = first.module.gives
    assert [announced] == last.module.takes
    assert (y.shape, y.dtype) == (dy.shape, dy.dtype) == (announced.shape, announced.dtype)
    assert y.dtype == dtype
    assert not y.requires_grad and not dy.requires_grad


def test_a_tensor_at_an_odd_address_changes_no_bit():
    config = small(model__width=18, model__heads=3, model__kv_heads=1, model__ffn=33)
    _, last = pipeline(config)
    batch = Batches(config).batch(0, 0)
    shape = last.module.takes[0].shape
    x, results = torch.randn(shape), []
    for offset in range(4):
        moved = torch.empty(x.numel() + 4)[offset : offset + x.numel()].view(shape).copy_(x)
        results.append(
            [*last.forward(0, 0, batch, [moved]), *last.backward(0), *(grad.clone() for grad in sums(last).values())]
        )
        last.gradients.clear()
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


def test_validation_changes_no_state():
    config = small(model__dropout=0.5)
    stages, batches = pipeline(config), Batches(config)
    before = [sums(stage) for stage in stages]
    batch = batches.validation(0)
    loss = stages[1].evaluate(batch, stages[0].evaluate(batch))[0].item()
    with allocations(CPU) as again:
        assert stages[1].evaluate(batch, stages[0].evaluate(batch))[0].item() == loss
    assert again.kept == 0
    for stage, held in zip(stages, before, strict=True):
        assert all(torch.equal(held[name], grad) for name, grad in sums(stage).items())


def test_warming_up_changes_no_state():
    config = small(numerics__reproducible=True, optimizer__stagger=True)
    for stage in pipeline(config):
        optimizer = StageOptimizer(config, stage)
        before = {name: tensor.clone() for name, tensor in optimizer.state().items()}
        stage.warm()
        optimizer.warm()
        assert all(torch.equal(before[name], tensor) for name, tensor in optimizer.state().items())
        assert not any(tensor.any() for tensor in stage.gradients.payload())


def test_dropping_micro_batches_in_flight_keeps_the_gradients():
    config = small()
    stages, batches = pipeline(config), Batches(config)
    forward(stages, batches, 0, 0)
    backward(stages, 0)
    expected = reduce_alone(stages)
    with allocations(CPU) as left:
        forward(stages, batches, 1, 1)
        for stage in stages:
            stage.drop_flights()
    assert left.kept == 0
    for stage, reduced in zip(stages, expected, strict=True):
        assert torch.equal(reduce_alone([stage])[0].flat, reduced.flat)


@pytest.mark.parametrize("precision", ["bf16", "bf16-autocast"])
def test_the_bf16_weights_follow_every_change_of_the_masters(precision):
    config = small(numerics__precision=precision, parallel__stages=1)
    (stage,), batches = pipeline(config), Batches(config)
    optimizer = StageOptimizer(config, stage)
    forward([stage], batches, 0, 0)
    backward([stage], 0)
    (reduced,) = reduce_alone([stage])

    def loss():
        return stage.evaluate(batches.batch(0, 0))[0].item()

    def fresh():
        other = Stage(config, 0, CPU)
        StageOptimizer(config, other).load(optimizer.state())
        return other.evaluate(batches.batch(0, 0))[0].item()

    begin = loss()
    optimizer.speculate(reduced, 0)
    assert loss() == fresh() != begin
    optimizer.undo()
    assert loss() == begin


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_stage_that_was_warm_before_its_state_arrived_computes_with_the_state(precision):
    config = small(numerics__precision=precision, parallel__stages=1)
    donor, joiner, batch = Stage(config, 0, CPU), Stage(config, 0, CPU, filled=False), Batches(config).batch(0, 0)
    joiner.warm()
    optimizer = StageOptimizer(config, joiner, whole=False)
    optimizer.start_following()
    optimizer.take(
        range(len(joiner.layout.units)), StageOptimizer(config, donor).copy(joiner.layout.ids, newest=-1) or {}
    )
    assert torch.equal(joiner.evaluate(batch)[0], donor.evaluate(batch)[0])


def test_bf16_computes_with_the_rounded_masters_and_updates_the_masters():
    """The learning rate is far below the spacing of bfloat16. Without masters, no weight would ever change."""
    config = small(numerics__precision="bf16", parallel__stages=1, optimizer__lr=1e-5)
    (stage,), batches = pipeline(config), Batches(config)
    optimizer = StageOptimizer(config, stage)
    begin = stage.flat.joined()
    for step in range(3):
        forward([stage], batches, step, 0)
        backward([stage], 0)
        optimizer.step(reduce_alone([stage])[0], step)
        stage.gradients.clear()
    masters = stage.flat.joined()
    assert stage.working.dtype == torch.bfloat16 and torch.equal(stage.working.joined(), masters.bfloat16())
    assert all(p.dtype == torch.bfloat16 and p.data_ptr() % 256 == 0 for p in stage.parameters.values())
    moved = (masters - begin)[begin.abs() > 0.01]
    assert (moved != 0).float().mean() > 0.9 and moved.abs().max() < 0.01 * 2.0**-8


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_belongs_to_a_layer_with_memory_of_its_own(tied):
    """The embedding is layer -1; the norm and the head after n layers are layer n. A tied embedding is layer n + 1, in
    both of its stages."""
    stages = pipeline(small(model__layers=4, parallel__stages=2, model__tied=tied))
    numbers = [[stage.module.layers[name] for name in stage.names] for stage in stages]
    assert [sorted(set(of)) for of in numbers] == ([[0, 1, 5], [2, 3, 4, 5]] if tied else [[-1, 0, 1], [2, 3, 4]])
    assert all(of == sorted(of) for of in numbers)
    assert [len(stage.flat.parts) for stage in stages] == [len(set(of)) for of in numbers]
