"""With data.document_mask, a sample of several documents trains like its documents one by one."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from recycle_pp.config.settings import Settings
from recycle_pp.data.batch import documents
from recycle_pp.model.document_check import refuse_leaks
from recycle_pp.model.general.source import source_of
from recycle_pp.model.stage import Stage
from recycle_pp.model.stage_module import Batch
from recycle_pp.model.transformer import Build, Transformer, attend, document_mask
from tests.recycle_pp.in_process import CPU, backward, pipeline, small, sums
from tests.recycle_pp.model.general import models

T, SEPARATOR = 16, 0
tokens = st.integers(1, 255) | st.just(SEPARATOR)
samples = st.lists(st.lists(tokens, min_size=T + 1, max_size=T + 1), min_size=2, max_size=2)


def batch_of(rows) -> Batch:
    tokens = torch.tensor(rows)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return Batch(inputs, labels, more=documents(inputs == SEPARATOR))


def pieces(rows):
    """(inputs, targets) of every document of every row. A document starts with its separator."""
    for row in rows:
        cuts = [0, *(t for t in range(1, T) if row[t] == SEPARATOR), T]
        for begin, end in pairwise(cuts):
            yield torch.tensor([row[begin:end]]), torch.tensor([row[begin + 1 : end + 1]])


def separated(config: Settings, rows) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Mean loss over all tokens and its gradients, computed by the whole model, one document at a time."""
    losses, gradients = [], {}
    for inputs, targets in pieces(rows):
        own = replace(config.model, sequence=inputs.shape[1])
        model = Transformer(Build(own, config.run.seed, CPU), range(config.model.layers))
        loss = model(inputs, targets) * (inputs.shape[1] / (len(rows) * T))
        loss.backward()
        losses.append(loss.detach())
        for name, parameter in model.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad
    return sum(losses), gradients


@settings(max_examples=25, deadline=None)
@given(
    samples,
    st.fixed_dictionaries(
        {
            "parallel__stages": st.integers(1, 3),
            "model__kv_heads": st.sampled_from([2, 4]),
            "model__recompute": st.booleans(),
        }
    ),
)
def test_the_gradient_of_a_sample_is_the_sum_over_its_documents(rows, changes):
    config = small(data__document_mask=True, parallel__microbatches=1, **changes)
    stages, boundary, batch = pipeline(config), [], batch_of(rows)
    for stage in stages:
        boundary = stage.forward(0, 0, batch, boundary)
    backward(stages, 0, split=True)
    loss, expected = separated(config, rows)
    assert boundary[0].item() == pytest.approx(loss.item(), rel=1e-5)
    found = {name: grad for stage in stages for name, grad in sums(stage).items()}
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


@given(samples)
def test_positions_restart_at_every_separator(rows):
    batch = batch_of(rows)
    found = (batch.more[key].tolist() for key in ("document_ids", "position_ids"))
    for row, ids, places in zip(rows, *found, strict=True):
        for t in range(T):
            assert ids[t] == row[: t + 1].count(SEPARATOR)
            assert places[t] == (0 if row[t] == SEPARATOR else t if t == 0 else places[t - 1] + 1)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2"])  # learned positions, rotary, sliding window
@pytest.mark.parametrize("stages", [1, 3])
def test_a_decoder_of_transformers_keeps_documents_apart(kind, stages, tmp_path):
    models.folder(kind, tmp_path, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    config = models.of_folder(tmp_path, stages, data__document_mask=True, parallel__microbatches=1)
    row = list(range(3, 3 + T + 1))
    rows = [[*row[:4], SEPARATOR, *row[5:]], [3, SEPARATOR, SEPARATOR, *row[3:12], SEPARATOR, *row[13:]]]
    parts, boundary = pipeline(config), []
    for stage in parts:
        refuse_leaks(stage)
        boundary = stage.forward(0, 0, batch_of(rows), boundary)
    backward(parts, 0)
    source = source_of(config)
    torch.manual_seed(config.run.seed)
    model, losses = source.build().train(), []
    for inputs, targets in pieces(rows):
        given_ = {"input_ids": inputs, "labels": targets, "shift_labels": targets, "use_cache": False}
        losses.append(model(**given_).loss * (inputs.shape[1] / (2 * T)))
    sum(losses).backward()
    assert boundary[0].item() == pytest.approx(sum(losses).item(), rel=1e-5)
    found = {}
    for stage in parts:
        for name, grad in sums(stage).items():
            found[name] = found[name] + grad if name in found else grad
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["opt", "mamba", "bloom"])
def test_a_decoder_that_cannot_keep_documents_apart_is_rejected(kind, tmp_path):
    models.folder(kind, tmp_path)
    with pytest.raises(ValueError, match=r"^data.document_mask must be false: "):
        refuse_leaks(Stage(models.of_folder(tmp_path, data__document_mask=True), 0, CPU))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_custom_module_that_mixes_documents_is_rejected(stage):
    """The convolution of the module in docs/models.md runs over document boundaries."""
    config = models.of_function("documented", 3, data__document_mask=True)
    with pytest.raises(ValueError, match=rf"stage {stage} of this model mixes documents"):
        refuse_leaks(Stage(config, stage, CPU))
    refuse_leaks(Stage(models.of_function("Plain", 3, data__document_mask=True), stage, CPU))  # mixes no tokens


class AsOnCuda(torch.Tensor):
    is_cuda = True


@pytest.mark.parametrize("masked, groups", [(True, False), (False, True)])
def test_groups_with_a_mask_are_expanded_on_a_gpu(masked, groups, monkeypatch):
    """Otherwise torch would select its reference kernel, which allocates a T x T matrix for every head."""
    seen, real = [], F.scaled_dot_product_attention

    def attention(*args, **kwargs):
        seen.append(kwargs["enable_gqa"])
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, T, 8, generator=random) for heads in (4, 2, 2))
    mask = document_mask(torch.arange(T).expand(2, T) // 5) if masked else None
    expected = attend(q, k, v, mask)
    torch.testing.assert_close(attend(q.as_subclass(AsOnCuda), k, v, mask).as_subclass(torch.Tensor), expected)
    assert seen == [True, groups]
