"""The refusal of a job that does not fit into memory names settings with which it would fit."""

from __future__ import annotations

import pytest

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.config.sizes import format_size
from recycle_pp.fitting.outlook import outlook
from recycle_pp.fitting.remedies import refusal, remedies

LARGE = ["model=llama8b", "parallel=2x4", "parallel.pipelines=4", "parallel.microbatch_size=1", "numerics=bf16"]


def job(*words: str) -> Settings:
    return compose([*LARGE, *words])


@pytest.mark.parametrize("capacity", [30e9, 45e9])
def test_with_each_remedy_the_job_fits(capacity):
    settings = job()
    whole = outlook(settings, capacity, "cuda")[0]
    assert not whole.fits
    sentence = refusal(settings, whole, capacity, "cuda", format_size)
    assert f"and has {format_size(capacity)}" in sentence and "it would fit with" in sentence
    found = remedies(settings, capacity, "cuda", dead=0)
    assert found
    for words in found:
        assert outlook(compose([*LARGE, *words.split(), "model.split=null"]), capacity, "cuda")[0].fits


@pytest.mark.parametrize(
    ("memory", "remedy"),
    [("null", "model.recompute=true"), ("51GB", "model.recompute=auto")],
)
def test_recomputing_is_a_remedy_if_the_settings_forbid_it(memory, remedy):
    """auto is better, but needs parallel.memory."""
    settings = job("model.recompute=false", f"parallel.memory={memory}")
    assert remedy in remedies(settings, 51e9, "cuda", dead=0)


def test_the_refusal_names_no_remedy_if_none_helps():
    settings = job()
    whole = outlook(settings, 1e6, "cuda")[0]
    assert refusal(settings, whole, 1e6, "cuda", format_size).endswith("no combination of three changed settings helps")
