"""How a job starts under real torchrun agents: every rank finds the others, or each node says why not."""

import subprocess
import time

import pytest

from recycle_pp.testing.ports import free_ports

from .launched import TOKEN, Launched

pytestmark = [pytest.mark.timeout(300), pytest.mark.torchrun, pytest.mark.xdist_group("launched")]


class Unequal(Launched):
    """Each node has further arguments of its own."""

    own: tuple = ((), ())

    def _start(self, node, nodes, workers):
        common, self.arguments = self.arguments, [*self.arguments, *self.own[node]]
        try:
            return super()._start(node, nodes, workers)
        finally:
            self.arguments = common


def test_control_address_on_one_node_is_found_by_all_its_ranks(tmp_path):
    arguments = [f"control.address=127.0.0.1:{free_ports()}", "run.steps=2", "run.validate_every=0", "run.standby=off"]
    with Launched(tmp_path, nodes=1, workers=2, arguments=arguments) as job:
        assert job.wait([0], 60) == [0], job.explain()
        assert job.committed() == 1


def test_nodes_with_different_settings_are_refused_at_once_with_one_sentence_and_2_on_each(tmp_path):
    class Job(Unequal):
        own = ([], ["optimizer.lr=0.001"])

    begun = time.monotonic()
    with Job(tmp_path, nodes=2, workers=2, arguments=["run.steps=5"]) as job:
        assert job.wait([0, 1], 60) == [1, 1], job.explain()
        assert time.monotonic() - begun < 40
        for node in (0, 1):
            (shown,) = [line for line in job.output(node).splitlines() if " traceback : " in line]  # one rank's
            assert "the nodes were started with different settings: optimizer.lr is 0.00" in shown
            assert "start every node with the same command line" in shown
            assert "exitcode  : 2 " in job.output(node)
        assert job.committed() == -1


def test_nodes_may_have_addresses_and_interfaces_of_their_own(tmp_path):
    port = free_ports()

    class Job(Unequal):
        own = (
            [f"control.address=0.0.0.0:{port}", "control.interface=lo"],
            [f"control.address=localhost:{port}", "control.interface=127.0.0.1"],
        )

    with Job(tmp_path, nodes=2, workers=1, arguments=["run.steps=2"]) as job:
        assert job.wait([0, 1], 60) == [0, 0], job.explain()


def test_a_rank_outside_of_its_job_is_refused_at_once():
    import os
    import sys

    variables = {"RANK": "5", "WORLD_SIZE": "2", "RECYCLE_TOKEN": TOKEN}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "recycle_pp.train", "model=tiny"],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert "RANK=5 LOCAL_RANK=5 LOCAL_WORLD_SIZE=2 cannot be in a job of WORLD_SIZE=2" in done.stderr
    assert time.monotonic() - begun < 10
