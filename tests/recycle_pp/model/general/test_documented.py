"""The module in docs/models.md: two tensors between stages, a convolution, tied weights."""

import re
import sys
from pathlib import Path

import pytest
import torch

from recycle_pp.data.batches import Batches
from tests.recycle_pp.in_process import pipeline, train

from . import models

DOCS = Path(__file__).parents[4] / "docs" / "models.md"
(MODULE,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.fixture
def my_package(tmp_path, monkeypatch):
    (tmp_path / "my_package.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_package", None)


def settings(stages, **changes):
    model = {"kind": "custom", "build": "my_package:Model", "layers": "blocks"}
    return models.settings(model, stages, **{"numerics__reproducible": True} | changes)


def test_the_documented_module_is_short():
    assert len([line for line in MODULE.splitlines() if line.strip()]) <= 30


def test_stages_of_the_documented_module_exchange_two_tensors_and_share_one_parameter(my_package):
    first, middle, last = (stage.module for stage in pipeline(settings(3)))
    assert [len(first.takes), len(middle.takes), len(last.takes), len(last.gives)] == [0, 2, 2, 0]
    assert first.gives == middle.takes and middle.gives == last.takes
    assert set(first.shared) == set(last.shared) == {"embedding.weight"} and not middle.shared
    assert {name.rpartition(".")[0] for name in middle.deferred} == {"blocks.2.up", "blocks.2.down"}


def test_training_of_the_documented_module_does_not_depend_on_the_layout(my_package):
    history, weights = train(settings(1), 3)
    for changes in ({"stages": 2}, {"stages": 3, "model__recompute": True}, {"stages": 4}):
        others, found = train(settings(**changes), 3, order=(3, 1, 0, 2))
        assert others == history
        assert all(torch.equal(weights[name], found[name]) for name in weights | found)
    assert history[-1][0] < history[0][0]
    assert Batches(settings(1)).windows > 12
