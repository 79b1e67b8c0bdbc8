"""At the start of a job under real torchrun agents, all ranks find each other, or each node prints why they do not."""

import os
import resource
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from recycle_pp.linux.processes import die_with_parent
from recycle_pp.testing.ports import free_ports

from .launched import TOKEN, Launched

pytestmark = [pytest.mark.timeout(300), pytest.mark.torchrun]


class Unequal(Launched):
    """A job whose nodes have different arguments."""

    own: tuple = ((), ())

    def _start(self, node, nodes, workers):
        common, self.arguments = self.arguments, [*self.arguments, *self.own[node]]
        try:
            return super()._start(node, nodes, workers)
        finally:
            self.arguments = common


@pytest.mark.slow
def test_all_ranks_of_one_node_use_control_address(tmp_path):
    arguments = [f"control.address=127.0.0.1:{free_ports()}", "run.steps=2", "run.validate_every=0", "run.standby=off"]
    with Launched(tmp_path, nodes=1, workers=2, arguments=arguments) as job:
        assert job.wait([0], 60) == [0], job.explain()
        assert job.committed() == 1


def test_nodes_with_different_settings_are_rejected_at_once_with_one_sentence_and_2_on_each(tmp_path):
    class Job(Unequal):
        own = ([], ["optimizer.lr=0.001"])

    begun = time.monotonic()
    with Job(tmp_path, nodes=2, workers=2, arguments=["run.steps=5"]) as job:
        assert job.wait([0, 1], 120) == [1, 1], job.explain()
        assert time.monotonic() - begun < 90  # in a new environment, Python first compiles torch to bytecode
        for node in (0, 1):
            # Only one rank prints a traceback.
            (shown,) = [line for line in job.output(node).splitlines() if " traceback : " in line]
            assert "the nodes were started with different settings: optimizer.lr is 0.00" in shown
            assert "start every node with the same command line" in shown
            assert "exitcode  : 2 " in job.output(node)
        assert job.committed() == -1


def test_nodes_may_have_different_addresses_and_name_their_interfaces(tmp_path):
    port = free_ports()

    class Job(Unequal):
        own = (
            [f"control.address=127.0.0.1:{port}", "control.interface=127.0.0.1"],
            [f"control.address=localhost:{port}", "control.interface=lo"],
        )

    with Job(tmp_path, nodes=2, workers=1, arguments=["run.steps=2"]) as job:
        assert job.wait([0, 1], 120) == [0, 0], job.explain()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("control.interface=eth99", "control.interface: 'eth99' is not an address, a host name or a network interface"),
        ("control.address=0.0.0.0:29501", "control.address must be an address where others can reach rank 0's node"),
    ],
)
def test_an_interface_or_address_that_cannot_work_is_rejected_at_once(setting, sentence):
    variables = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1",
                 "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "RECYCLE_TOKEN": TOKEN}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "recycle_pp.train", "model=tiny", "parallel=2x1", setting],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [done.stderr.strip()] and sentence in done.stderr


def test_a_rank_outside_of_its_job_is_rejected_at_once():
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


def test_a_limit_of_open_files_that_is_too_small_for_the_job_is_rejected_at_once():
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        die_with_parent(parent)

    parent = os.getpid()
    variables = {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "6"}
    done = subprocess.run(
        [sys.executable, "-m", "recycle_pp.train", "model=tiny", "parallel=3x2"],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, preexec_fn=limit,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the coordinator of 6 workers may need 82 open files, and the hard limit is 60; raise it" in done.stderr


def test_a_mistake_that_only_rank_0_checks_ends_the_other_nodes_with_the_same_sentence_and_2():
    """Two nodes with one rank each. Only rank 0 checks whether enough workers were launched."""
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports()), "RECYCLE_TOKEN": TOKEN}
    command = [sys.executable, "-m", "recycle_pp.train", "model=tiny", "parallel=3x1"]
    nodes = [
        subprocess.Popen(
            command, env={**os.environ, **variables, "RANK": str(rank), "GROUP_RANK": str(rank)},
            stderr=subprocess.PIPE, text=True, preexec_fn=partial(die_with_parent, os.getpid()),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [node.communicate(timeout=60)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [2, 2], said
    assert all("3 * 1 = 3 workers, but 2 processes were launched" in text.splitlines()[-1] for text in said), said


SLOW = """
import os, sys, time

class Slow:
    '''Like a cold disk, delays the first import of each of these modules by its number of seconds.'''

    def __init__(self, seconds):
        self.seconds = seconds

    def find_spec(self, name, path=None, target=None):
        if self.seconds.get(name, 0):
            time.sleep(self.seconds.pop(name))

if os.environ.get("RANK"):
    late = os.environ["RANK"] == "1" and "worker" in " ".join(sys.orig_argv)
    sys.meta_path.insert(0, Slow({"hydra": 9, "torch": 14 if late else 0}))
"""


@pytest.mark.slow
def test_a_slow_start_is_never_silent_for_more_than_five_seconds(tmp_path):
    """Importing hydra takes 9 s, and importing torch in worker 0.1 takes 14 s."""
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node=2", "-m", "recycle_pp.train", "model=tiny"]
    command += ["parallel.pipelines=1", "parallel.stages=2", "run.steps=2", "run.validate_every=0", "run.standby=off"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    said = []
    with subprocess.Popen(
        [*command, f"run.dir={tmp_path / 'run'}"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, preexec_fn=partial(die_with_parent, os.getpid()),
    ) as job:  # fmt: skip
        for line in job.stdout:
            said.append((time.monotonic(), line.rstrip()))
    text = "\n".join(line for _, line in said)
    assert job.returncode == 0, text
    first = next(i for i, (_, line) in enumerate(said) if line.startswith("recycle_pp:"))
    last = next(i for i, (_, line) in enumerate(said) if line.lstrip("█░ ").startswith("step "))
    gaps = [b[0] - a[0] for a, b in pairwise(said[first : last + 1])]
    assert max(gaps) < 5.5, text
    assert "recycle_pp: reads the configuration (4 s)" in text
    assert "import torch: workers 0.1 (rank 1) on " in text


def test_a_rank_reports_that_rank_0_is_missing(tmp_path):
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(free_ports())}
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"} | variables
    with subprocess.Popen(
        [sys.executable, "-m", "recycle_pp.train"], env=environment, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    ) as job:  # fmt: skip
        try:
            assert job.stderr.readline().startswith("recycle_pp: rank 1 has waited 4 s for rank 0 of this machine")
        finally:
            job.kill()
