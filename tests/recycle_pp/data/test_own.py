"""A user's own dataset (data.build): each sample is used once an epoch, unchanged."""

import re

import pytest
import torch

from recycle_pp.config.checks import validate
from recycle_pp.config.mistakes import UserMistake
from recycle_pp.data.batches import Batches, blank
from tests.recycle_pp.data import own_sets
from tests.recycle_pp.in_process import small


def settings(build, **changes):
    return small(data__build=f"{own_sets.HERE}:{build}", model__kind="custom", data__validation_share=0.2, **changes)


def test_tensors_arrive_unchanged_under_their_names():
    data = Batches(settings("mixed"))
    assert (data.windows, data.validations) == (8, 1)
    batch, numbers = data.batch(0, 1), data.sample_ids(0, 1)
    assert batch.inputs.shape == (2, 0) and batch.labels.tolist() == numbers
    assert batch.more["sound"].shape == (2, 3, 2) and batch.more["sound"].dtype == torch.float32
    assert batch.more["sound"][:, 0, 0].tolist() == numbers
    assert batch.more["loud"].tolist() == [number > 4 for number in numbers]
    assert data.validation(0).labels.tolist() == [8, 9]


def test_an_epoch_has_every_training_sample_once():
    data = Batches(settings("mixed"))
    seen = [number for step in range(4) for g in range(4) for number in data.sample_ids(step, g)]
    for epoch in range(4):
        assert sorted(seen[8 * epoch : 8 * epoch + 8]) == list(range(8))


def test_a_blank_batch_has_the_shapes_of_the_data():
    batch, of = Batches(settings("mixed")).batch(0, 0), blank(settings("mixed"))
    assert (of.inputs.shape, of.labels.shape) == (batch.inputs.shape, batch.labels.shape)
    assert {n: (t.shape, t.dtype) for n, t in of.more.items()} == {n: (t.shape, t.dtype) for n, t in batch.more.items()}
    assert not any(tensor.any() for tensor in of.more.values())


def test_the_labels_of_a_step_are_counted_if_the_dataset_counts_them():
    data = Batches(settings("counted"))
    labels = torch.cat([data.batch(1, g).labels for g in range(4)])
    assert data.items(1) == int((labels != -100).sum()) / 4
    assert data.validation_items(4) == int(sum((data.validation(i).labels != -100).sum() for i in range(4))) / 4
    assert Batches(settings("tokens")).items(1) is None


def test_the_fingerprint_depends_only_on_the_content():
    found = {build: Batches(settings(build)).fingerprint for build in ("tokens", "counted", "mixed")}
    assert found["tokens"] == found["counted"] != found["mixed"]


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        ("nothing", r"data\.build=.*nothing must return an object with __len__ and __getitem__, not int"),
        ("nowhere", r"data\.build=.*nowhere: .* has no nowhere"),
        ("fails", rf"fails\[7\] raised OSError: no such picture \({re.escape(own_sets.__file__)}, line \d+, in __get"),
        (
            "targets",
            r"so its samples must contain a tensor `labels`; they contain input_ids, targets",
        ),
        ("uneven", r"samples have different shapes or names"),
    ],
)
def test_a_mistake_in_the_dataset_is_reported_in_one_sentence(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        data = Batches(settings(build))
        for g in range(4):
            data.batch(0, g)


def test_the_projects_own_model_accepts_only_tokens():
    config = settings("mixed").with_values({"model.kind": "transformer"})
    with pytest.raises(
        UserMistake, match="must return input_ids and labels for model=transformer, not sound, loud, labels"
    ):
        Batches(config).batch(0, 0)


@pytest.mark.parametrize("kind", ["transformer", "llama", "hf"])
@pytest.mark.parametrize(
    "build, sentence",
    [
        ("short", r"input_ids must be \(16,\) int64 for model.sequence=16, not \(8,\) int64"),
        ("int32", r"labels must be \(16,\) int64 for model.sequence=16, not \(16,\) int32"),
        ("large", r"input_ids must be 0 to 255 \(model.vocabulary=256\), not 289"),
        ("ignored_input", r"input_ids must be 0 to 255 \(model.vocabulary=256\), not -100"),
        ("negative", r"labels must be 0 to 255 \(model.vocabulary=256\) or -100, not -1"),
    ],
)
def test_tokens_of_another_length_type_or_range_are_refused(kind, build, sentence):
    samples = Batches(settings(build, run__validate_every=0).with_values({"model.kind": kind}))._samples
    samples.train(38)
    with pytest.raises(UserMistake, match=rf"{build}\[39\]: {sentence}"):
        samples.train(39)


@pytest.mark.parametrize("key, value", [("path", "a"), ("format", "chat"), ("document_mask", True)])
def test_other_sources_cannot_be_combined_with_a_dataset(key, value):
    config = small(data__build="a:b").with_values({f"data.{key}": value})
    with pytest.raises(ValueError, match=f"data.{key} must be .* with data.build"):
        validate(config)
