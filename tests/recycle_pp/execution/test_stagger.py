"""A staggered worker updates its parameters before the commit, unless all workers must have the same step."""

import pytest

from recycle_pp.execution.commits import Commits
from tests.recycle_pp.execution.cluster import Cluster
from tests.recycle_pp.in_process import small


@pytest.mark.parametrize(
    ("changes", "early"), [({}, {0, 1}), ({"run__validate_every": 2}, {0}), ({"checkpoint__every": 2}, {0})], ids=str
)
def test_a_worker_waits_for_the_commit_if_the_job_then_validates_or_saves_or_ends(changes, early, monkeypatch):
    found = set()

    def speculate(self, orders, step, original=Commits.speculate):
        found.add(step)
        return original(self, orders, step)

    monkeypatch.setattr(Commits, "speculate", speculate)
    settings = {"run__steps": 3, "run__validate_every": 0, "checkpoint__every": 0, "optimizer__stagger": True}
    # Without clipping, because the steps after the early update of a clipped step have no early update.
    with Cluster(small(optimizer__clip=None, **settings | changes)) as cluster:
        cluster.run()
    assert found == early


@pytest.mark.parametrize(("reproducible", "early"), [(True, {0, 1, 2}), (False, {1})])
def test_a_stage_with_tied_weights_waits_for_the_commit_unless_sums_are_reproducible(reproducible, early, monkeypatch):
    """Its early update contains the sum of the other tied stage. If that stage repeats its sum after a death, the
    weights that both stages hold would differ."""
    found = set()

    def speculate(self, orders, step, original=Commits.speculate):
        if ahead := original(self, orders, step):
            found.add(self._stage.stage)
        return ahead

    monkeypatch.setattr(Commits, "speculate", speculate)
    settings = {"run__steps": 3, "run__validate_every": 0, "checkpoint__every": 0, "optimizer__clip": None}
    shape = {"parallel__stages": 3, "model__layers": 3, "model__tied": True}
    with Cluster(small(optimizer__stagger=True, numerics__reproducible=reproducible, **settings, **shape)) as cluster:
        cluster.run()
    assert found == early
