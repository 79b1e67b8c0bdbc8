"""A third-party model split into stages computes the same loss and gradients, bit for bit, as the whole model."""

import pytest
import torch

from recycle_pp.data.batches import Batches
from recycle_pp.model.general.dry_run import layers_of
from recycle_pp.model.general.source import source_of
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from tests.recycle_pp.in_process import CPU, backward, forward, pipeline, reduce_alone, small, sums, train

from . import models

KEY = (0, 3, 2)  # seed, step, micro-batch
# tied with dropout, plain, experts, state space; the others run with --full
QUICK = ("gpt2", "llama", "olmoe", "mamba")
KINDS = [pytest.param(kind, marks=[] if kind in QUICK else [pytest.mark.slow]) for kind in models.ARCHITECTURES]
OWN = ["Plain", "TiedByHand", "Routed", "Bare"]


def cut(settings, batch, split=False):
    """(loss, gradients by name) of all stages. The parts of one gradient in several stages are added."""
    stages, boundary = pipeline(settings), []
    for stage in stages:
        boundary = stage.forward(*KEY[1:], batch, boundary)
    backward(stages, KEY[2], split=split)
    gradients = {}
    for stage in stages:
        for name, grad in sums(stage).items():
            gradients[name] = gradients[name] + grad if name in gradients else grad.clone()
    return boundary[0], gradients


def whole(settings, batch):
    """(loss, gradients by name) of the unmodified model."""
    source = source_of(settings)
    torch.manual_seed(settings.run.seed)
    model = source.build().train()
    models.seeded_layers(layers_of(model, source.layers).children(), KEY)
    items = torch.tensor(float(batch.labels.numel()))
    loss = source.loss(model, batch, items, batch.labels)
    (loss / 4).backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def same(a, b):
    (loss, gradients), (other_loss, others) = a, b
    assert gradients.keys() == others.keys()
    assert torch.equal(loss, other_loss)
    return [name for name in gradients if not torch.equal(gradients[name], others[name])] == []


@pytest.mark.parametrize("kind", KINDS)
def test_architectures_of_transformers_are_exact(kind, tmp_path):
    models.folder(kind, tmp_path)
    batch = models.batch()
    expected = whole(models.of_folder(tmp_path), batch)
    for stages in (1, 2, 3):
        assert same(cut(models.of_folder(tmp_path, stages), batch, split=stages == 3), expected)


@pytest.mark.parametrize("build", OWN)
def test_custom_modules_are_exact(build):
    batch = models.batch()
    expected = whole(models.of_function(build), batch)
    assert all(same(cut(models.of_function(build, stages), batch, split=True), expected) for stages in (1, 2, 3))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_each_parameter_belongs_to_a_layer_with_memory_of_its_own(kind, tmp_path):
    """Parameters used before the first layer are layer -1, and those used after the last of n layers are layer n.
    GPT-2's tied embedding is layer n + 1, in both of its stages."""
    models.folder(kind, tmp_path)
    numbers = {}
    for stage in pipeline(models.of_folder(tmp_path, 2)):
        layers = [stage.module.layers[name] for name in stage.names]
        assert layers == sorted(layers) and len(stage.flat.parts) == len(set(layers))
        numbers |= stage.module.layers
    tied = {"gpt2": "transformer.wte.weight"}.get(kind)
    depth = numbers["transformer.ln_f.weight" if tied else "model.norm.weight"]
    assert numbers.pop(tied, depth + 1) == depth + 1
    assert set(numbers.values()) == {*range(-1, depth + 1)}
    for name, layer in numbers.items():
        inside = [part for part in name.split(".") if part.isdigit()]
        assert inside == ([str(layer)] if 0 <= layer < depth else []), (name, layer)


def test_a_layer_used_four_times_has_the_same_sums_in_any_layout():
    """The layer's gradient has four addends, added in an order that depends on the layout. Exact sums do not."""
    batch = models.batch()
    sums_of = [
        cut(models.of_function("SharedLayer", stages, numerics__reproducible=True), batch) for stages in (1, 2, 3, 4)
    ]
    assert all(same(of, sums_of[0]) for of in sums_of)
    loss, gradients = cut(models.of_function("SharedLayer"), batch)
    expected = whole(models.of_function("SharedLayer"), batch)
    assert torch.equal(loss, expected[0])
    assert all(torch.allclose(of, gradients[name], atol=1e-8) for name, of in expected[1].items())


@pytest.mark.parametrize("build", ["Routed", "TiedByHand"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-autocast"])
def test_recomputing_changes_no_bit(build, precision):
    batch = models.batch()
    kept, again = (
        cut(models.of_function(build, 2, model__recompute=recompute, numerics__precision=precision), batch, split=True)
        for recompute in (False, True)
    )
    assert same(kept, again)


def test_recomputation_may_be_switched_between_any_two_micro_batches():
    def gradients(*ways):
        settings = models.of_function("Routed", 2)
        stages, batches = pipeline(settings), Batches(settings)
        for g, again in enumerate(ways):
            for stage in stages:
                stage.module.recompute = again
            forward(stages, batches, 0, g)
        for g in range(len(ways)):
            backward(stages, g)
        return [grad for stage in stages for grad in sums(stage).values()]

    assert all(map(torch.equal, gradients(False, False, False), gradients(True, False, True)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"numerics__precision": "bf16"}, marks=pytest.mark.slow),
        pytest.param({"numerics__precision": "bf16-autocast"}, marks=pytest.mark.slow),
        {"model__recompute": True},
    ],
    ids=str,
)
def test_training_does_not_depend_on_the_layout_or_the_order(changes, tmp_path):
    """Four steps of a tied model with dropout: fixed-point sums, clipping, AdamW, both copies of the tied matrix."""
    models.folder("gpt2", tmp_path)
    changes = {"numerics__reproducible": True, "optimizer__clip": 0.5} | changes
    history, weights = train(models.of_folder(tmp_path, **changes), 4)
    other_history, others = train(models.of_folder(tmp_path, 3, **changes), 4, order=(2, 0, 3, 1))
    third_history, thirds = train(models.of_folder(tmp_path, 2, model__split=[1, 2], **changes), 4)
    assert history == other_history == third_history
    assert weights.keys() == others.keys() == thirds.keys()
    assert all(torch.equal(weights[n], others[n]) and torch.equal(weights[n], thirds[n]) for n in weights)
    assert history[-1][0] < history[0][0]


def test_both_stages_of_a_tied_parameter_hold_the_same_bits():
    settings = models.of_function("TiedByHand", 3, numerics__reproducible=True)
    stages, batches = pipeline(settings), Batches(settings)
    assert [bool(stage.module.shared) for stage in stages] == [True, False, True]
    assert [stage.borrows("embedding.weight") for stage in stages] == [False, False, True]
    before = stages[0].parameters["embedding.weight"].clone()
    for g in range(4):
        forward(stages, batches, 0, g)
        backward(stages, g)
    for stage, reduced in zip(stages, reduce_alone(stages), strict=True):
        StageOptimizer(settings, stage).step(reduced, 0)
    first, last = (stages[k].parameters["embedding.weight"] for k in (0, 2))
    assert torch.equal(first, last) and not torch.equal(first, before)


def test_a_stage_holds_only_its_own_parameters(tmp_path):
    models.folder("llama", tmp_path)
    stages = pipeline(models.of_folder(tmp_path, 3))
    real = [{n for n, p in stage.module.model.named_parameters() if p.device.type != "meta"} for stage in stages]
    assert [set(stage.names) for stage in stages] == real
    assert not set.intersection(*real) and not real[0] & real[2]
    names = [name for stage in stages for name in stage.names]
    assert set(names) == {name for name, _ in source_of(models.of_folder(tmp_path)).build().named_parameters()}


def test_ignored_labels_are_excluded_from_the_mean_over_the_step(tmp_path):
    """Micro-batches with 20 and 3 counted labels have weights 20:3, whether the model or the stage divides."""
    models.folder("llama", tmp_path)
    first, second = models.batch(1), models.batch(2)
    first.labels.view(-1)[20:] = -100
    second.labels.view(-1)[3:] = -100
    for settings in (models.of_folder(tmp_path, 2), models.of_function("Plain", 2)):
        stages = pipeline(settings)
        shares = []
        for g, one in enumerate((first, second)):
            boundary = []
            for stage in stages:
                boundary = stage.forward(0, g, one.of_step(23 / 4), boundary)
            backward(stages, g)
            shares.append(boundary[0])
        source = source_of(settings)
        torch.manual_seed(0)
        model = source.build().train()
        total = torch.zeros(())
        for g, (one, count) in enumerate(((first, 20), (second, 3))):
            model_layers = layers_of(model, source.layers).children()
            models.seeded_layers(model_layers, (0, 0, g))
            total = total + source.loss(model, one, torch.tensor(float(count)), one.labels) * count / 23
        total.backward()
        assert sum(shares) / 4 == pytest.approx(total.item(), rel=1e-6)
        for stage in stages:
            for name, grad in sums(stage).items():
                assert torch.allclose(grad, model.get_parameter(name).grad, atol=1e-7), name


def test_a_padding_mask_reaches_every_stage(tmp_path):
    models.folder("llama", tmp_path)
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[:, 11:] = 0
    padded, plain = models.batch(attention_mask=mask), models.batch()
    padded.labels[:, 11:] = plain.labels[:, 11:] = -100
    masked = [cut(models.of_folder(tmp_path, stages), padded) for stages in (1, 3)]
    assert same(*masked)
    source = source_of(models.of_folder(tmp_path))
    torch.manual_seed(0)
    given = {"input_ids": padded.inputs, "labels": padded.labels, "shift_labels": padded.labels}
    loss = source.build()(**given, attention_mask=mask, num_items_in_batch=torch.tensor(22.0)).loss
    assert torch.equal(masked[0][0], loss)


def test_the_loss_may_be_a_function():
    here = models.__name__
    given = cut(models.of_function("Logits", 2, model__loss=f"{here}:of_logits"), models.batch())
    assert same(given, cut(models.of_function("Plain", 2), models.batch()))


@pytest.mark.parametrize("counted", [True, False])
def test_a_loss_that_divides_by_the_items_is_weighted_once(counted):
    """Micro-batches with 20 and 3 counted labels. Without the counts of the step, each has the same weight."""
    found = []
    for loss in ("of_logits", "of_logits_by_items"):
        stages = pipeline(models.of_function("Logits", 2, model__loss=f"{models.__name__}:{loss}"))
        for g, count in enumerate((20, 3)):
            one, boundary = models.batch(g), []
            one.labels.view(-1)[count:] = -100
            for stage in stages:
                boundary = stage.forward(0, g, one.of_step(23 / 4 if counted else None), boundary)
            backward(stages, g)
        found.append({name: grad for stage in stages for name, grad in sums(stage).items()})
    assert all(torch.allclose(grad, found[1][name], atol=1e-7) for name, grad in found[0].items())


@pytest.mark.parametrize("loss", ["of_logits", "of_logits_by_hand", "of_logits_by_items", None])
@pytest.mark.parametrize("items", [None, 4.0, 0.0])
def test_the_loss_of_a_micro_batch_without_any_label_is_zero(loss, items):
    """With own models, and with the project's Transformer (None)."""
    given = models.of_function("Logits", 2, model__loss=f"{models.__name__}:{loss}")
    stages = pipeline(given if loss else small(parallel__microbatch_size=2))
    one, boundary = models.batch(), []
    one.labels.fill_(-100)
    for stage in stages:
        boundary = stage.forward(0, 0, one.of_step(items), boundary)
    backward(stages, 0)
    assert boundary[0] == 0 and not any(grad.any() for stage in stages for grad in sums(stage).values())
    assert stages[-1].evaluate(one.of_step(items), stages[0].evaluate(one))[0] == 0


def test_validation_uses_no_random_numbers_and_does_not_affect_training():
    stage = Stage(models.of_function("Plain"), 0, CPU)
    batch = models.batch()
    first = stage.forward(0, 0, batch)
    assert stage.evaluate(batch) == stage.evaluate(batch) != first
    assert stage.forward(0, 0, batch) == first
