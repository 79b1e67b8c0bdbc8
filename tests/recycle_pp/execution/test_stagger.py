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
