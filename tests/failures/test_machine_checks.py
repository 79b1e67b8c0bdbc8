"""`doctor` on several machines: with real torchrun agents, and on simulated machines with a network between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_pp.testing.ports import free_ports

from . import network

TOKEN = "the secret of the machine checks"
DOCTOR = [sys.executable, "-m", "recycle_pp.doctor", "--json", "--run"]
_missing = network.missing()


def ended(processes, seconds=100):
    """Waits until all processes have ended. Returns (exit code, standard output) of each."""
    try:
        return [(process.wait(seconds), process.stdout.read().decode()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.skipif(_missing is not None, reason=str(_missing))
def test_a_cut_link_and_a_far_machine_are_named_among_four_machines(tmp_path):
    """The test sets torchrun's variables instead of starting torchrun, whose agents would import torch."""
    with network.Network() as net:
        machines = [net.machine(name) for name in "abcd"]
        net.cut(machines[1], machines[2])
        net.far(machines[3], 0.02)
        launch = {"WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "4"}
        launch |= {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29500", "RECYCLE_TOKEN": TOKEN}
        started = []
        for number, machine in enumerate(machines):
            environment = os.environ | launch | {"RANK": str(number), "GROUP_RANK": str(number)}
            started.append(machine.run([*DOCTOR, tmp_path], env=environment, stdout=subprocess.PIPE))
        (code, printed), *others = ended(started)
    assert code == 2 and others == [(2, "")] * 3, "only the first machine may print a table, and all must exit with 2"
    survey = json.loads(printed)
    assert [machine["address"] for machine in survey["machines"]] == [machine.address for machine in machines]
    assert all(machine["writes"] > 0 and abs(machine["offset"]) < 0.5 for machine in survey["machines"])
    broken = {check["name"] for check in survey["checks"] if check["verdict"] == "broken"}
    assert broken == {"b -> c", "c -> b"}
    named = {check["name"] for check in survey["checks"]}
    assert "d: latency" in named and not {"a: latency", "a -> d: latency", "a -> b: latency"} & named


@pytest.mark.slow
@pytest.mark.torchrun
def test_torchrun_agents_print_one_table(tmp_path):
    port = free_ports(2)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes=3", "--nproc-per-node=2"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    environment = os.environ | {"RECYCLE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*torchrun, f"--node-rank={node}", "-m", "recycle_pp.doctor", "--json", "--run-dir", tmp_path],
            env=environment,
            stdout=subprocess.PIPE,
        )
        for node in range(3)
    ]
    printed = [text for _, text in ended(started) if text]
    survey = json.loads(printed[0])
    assert len(printed) == 1 and len(survey["machines"]) == 3 and len(survey["links"]) == 6
    assert not any(link["error"] for link in survey["links"]) and survey["verdict"] != "broken"
