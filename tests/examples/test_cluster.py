"""The example files for clusters, as far as they can run on one machine.

Kubernetes pods are replaced by network namespaces (`tests.failures.network`), and srun and scontrol by small scripts.
"""

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import psutil
import pytest
import yaml

from recycle_pp.islands.__main__ import state
from recycle_pp.storage.store import Store
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.ports import free_ports
from recycle_pp.testing.s3_server import S3Server
from tests.failures import network

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["model=tiny", "run.validate_every=0", "numerics=reproducible", "run.sample_log=true"]
BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
_missing = network.missing()
machines = pytest.mark.skipif(_missing is not None, reason=str(_missing))
pytestmark = pytest.mark.timeout(500)


def wait_until(condition, what, seconds=150):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def steps(run):
    return [line["step"] for line in run.lines(run.metrics)]


def happened(run, event):
    return any(line["event"] == event for line in run.lines(run.events))


# ------------------------------------------------------------------------------------------------------ Kubernetes


class Pods:
    """The pods of the manifest: two pods with two workers each, on separate machines."""

    def __init__(self, folder: Path, net: network.Network, arguments: list[str]) -> None:
        service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
        self.container = job["spec"]["template"]["spec"]["containers"][0]
        self.names = service["metadata"]["name"], job["metadata"]["name"], job["spec"]["template"]["spec"]["subdomain"]
        self.run, self._folder, self._net, self._arguments = RunFolder(folder / "run"), folder, net, arguments
        self._machines: list[network.Machine] = []

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Starts a pod on a new machine."""
        self._machines.append(self._net.machine(f"pod{len(self._machines)}"))
        here = {"NODES": "2", "WORKERS": "2", "MASTER": self._machines[-1 - index].address, "NODE_RANK": f"{index}"}
        here |= {"RUN_DIR": str(self.run.path), "RECYCLE_TOKEN": "of the examples' tests"}
        assert here.keys() == {variable["name"] for variable in self.container["env"]}
        assert self.container["command"] == ["sh", "/recycle/node.sh"]
        with open(self._folder / "log", "ab") as log:
            return self._machines[-1].run(
                ["sh", EXAMPLES / "node.sh", *self._arguments], env=ENVIRONMENT | here, stdout=log, stderr=log
            )

    def log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")


def terminate(pod: subprocess.Popen[bytes]) -> None:
    """Sends SIGTERM to the container's first process, torchrun, like the kubelet."""
    for process in psutil.Process(pod.pid).children():
        process.send_signal(signal.SIGTERM)


@machines
@pytest.mark.slow
@pytest.mark.torchrun
def test_pods_start_are_drained_rejoin_end_with_a_checkpoint_and_resume(tmp_path):
    with network.Network() as net:
        pods = Pods(tmp_path, net, [*TINY, "run.steps=1000000"])
        assert len(set(pods.names)) == 1, (
            "the host name recycle-0.recycle requires equal names of service, job and subdomain"
        )
        first = pods.start(0)
        second = pods.start(1)
        wait_until(lambda: max(steps(pods.run), default=-1) >= 3, pods.log)
        terminate(second)  # as kubectl drain does
        second.wait(60)
        assert happened(pods.run, "evicted"), pods.log()
        assert first.poll() is None, pods.log()
        second = pods.start(1)  # as the Job's controller does
        wait_until(lambda: happened(pods.run, "node_joined"), pods.log)
        wait_until(lambda: sum(e["event"] == "rejoined" for e in pods.run.lines(pods.run.events)) == 2, pods.log)
        terminate(first)  # as kubectl delete job does
        terminate(second)
        first.wait(60), second.wait(60)
        assert "the newest checkpoint is" in pods.log()
        done = steps(pods.run)[-1] + 1
        again = Pods(tmp_path, net, [*TINY, f"run.steps={done + 3}"])  # as kubectl apply does
        codes = [pod.wait(120) for pod in (again.start(0), again.start(1))]
        assert codes == [0, 0], pods.log()
    assert steps(pods.run) == list(range(done + 3)), "each step must have one line"


# ----------------------------------------------------------------------------------------------------------- SLURM

SRUN = """#!/bin/sh
# srun: runs the command on both nodes at the same time, and passes SIGTERM on to both
while [ "${1#--}" != "$1" ]; do shift; done
for SLURM_NODEID in 0 1; do export SLURM_NODEID; MASTER_PORT=$PORT "$@" & pids="$pids $!"; done
trap 'kill -TERM $pids' TERM
wait $pids; code=$?
while kill -0 $pids 2>/dev/null; do wait; done
exit $code
"""
SCONTROL = """#!/bin/sh
case $1 in show) echo 127.0.0.1; echo 127.0.0.1 ;; *) echo "$@" >> "$REQUESTS" ;; esac
"""


@pytest.fixture
def slurm(tmp_path):
    """Starts a job as `sbatch examples/slurm.sh SETTINGS` does, on two nodes with two workers each."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = free_ports(2)  # torchrun's store uses this port, the first coordinator the next one
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_PER_NODE": "a100:2", "PORT": f"{port}"}
    variables |= {"SLURM_JOB_NODELIST": "n[0-1]", "REQUESTS": str(tmp_path / "requests")}
    variables |= {"PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}", "NODE_SH": str(EXAMPLES / "node.sh")}

    def start(*settings: str, script: str = "slurm.sh", first: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        """first: arguments of the script that precede the settings"""
        return subprocess.Popen(
            ["sh", EXAMPLES / script, *first, *TINY, *settings], env=os.environ | ENVIRONMENT | variables, cwd=tmp_path,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    return start


def requests(folder: Path) -> list[str]:
    return (folder / "requests").read_text().splitlines() if (folder / "requests").exists() else []


@pytest.mark.slow
@pytest.mark.torchrun
def test_a_slurm_job_at_its_time_limit_is_requeued_and_resumes(slurm, tmp_path):
    run = RunFolder(tmp_path / "runs" / "7")
    job = slurm("run.steps=1000000")
    wait_until(lambda: run.metrics.exists() and max(steps(run), default=-1) >= 2, lambda: job.poll() or "no step")
    (srun,) = [child for child in psutil.Process(job.pid).children() if "srun" in " ".join(child.cmdline())]
    srun.send_signal(signal.SIGTERM)  # as `--signal=TERM@120` does
    output, _ = job.communicate(timeout=90)
    assert (job.returncode, requests(tmp_path)) == (0, ["requeue 7"]), output
    done = steps(run)[-1] + 1
    again = slurm(f"run.steps={done + 2}")
    output, _ = again.communicate(timeout=150)
    assert (again.returncode, requests(tmp_path)) == (0, ["requeue 7"]), output
    assert steps(run) == list(range(done + 2))


@pytest.mark.torchrun
@pytest.mark.parametrize("earlier", [pytest.param(None, marks=pytest.mark.slow), '{"state": "stopped", "code": 143}'])
def test_a_slurm_job_with_a_mistake_is_not_requeued(earlier, slurm, tmp_path):
    """Not even if the time limit ended an earlier allocation of the job."""
    if earlier is not None:
        run = RunFolder(tmp_path / "runs" / "7")
        run.path.mkdir(parents=True)
        run.heartbeat.write_text(earlier)
    job = slurm("run.stepz=3")
    output, _ = job.communicate(timeout=150)
    assert (job.returncode, requests(tmp_path)) == (2, []), output
    assert "run.stepz is not a configuration key" in output


def test_a_node_that_comes_back_after_the_end_of_the_run_does_not_wait_for_the_others(tmp_path):
    for name, text in (("python", 'echo \'{"state": "finished"}\''), ("torchrun", "echo starts")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES": "2", "NODE_RANK": "1", "WORKERS": "1"}
    variables |= {"MASTER": "node0", "RUN_DIR": "runs/mine"}
    ends, extends = (
        subprocess.run(["sh", EXAMPLES / "node.sh"], env=variables | more, capture_output=True, text=True, check=True)
        for more in ({}, {"EXTEND": "1"})
    )
    assert ends.stdout == "the run in runs/mine is finished; EXTEND=1 starts it again\n"
    assert extends.stdout == "starts\n"


@pytest.mark.slow
@pytest.mark.torchrun
def test_an_island_under_slurm_takes_part_in_rounds_in_s3(slurm, tmp_path, monkeypatch):
    with S3Server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("SLURM_SH", str(EXAMPLES / "slurm.sh"))
        url = f"{server.url('islands')}/run"
        words = ["run.steps=12", "islands.steps=3", "islands.max_local=3"]
        job = slurm(*words, script="islands_slurm.sh", first=("oregon", url))
        output, _ = job.communicate(timeout=200)
        assert job.returncode == 0, output
        found = state(Store(url))
    assert [each["islands"] for each in found["rounds"]] == [["oregon"]] * 3
    assert steps(RunFolder(tmp_path / "runs" / "oregon")) == list(range(12))


# ----------------------------------------------------------------------------------------------------------- Modal


def test_the_modal_example_passes_all_variables_to_node_sh(monkeypatch):
    """Only the variables are tested, because the example has never run on Modal (its docstring says so)."""

    class Anything:
        def __getattr__(self, name):
            return Anything()

        def __call__(self, *arguments, **options):
            return arguments[0] if arguments and isinstance(arguments[0], types.FunctionType) else Anything()

    monkeypatch.setitem(sys.modules, "modal", Anything())
    names: dict = {"__name__": "modal_containers"}
    exec(compile((EXAMPLES / "modal_containers.py").read_text(), "modal_containers.py", "exec"), names)
    wanted = {"NODES", "NODE_RANK", "WORKERS", "MASTER", "RUN_DIR"}
    assert names["environment"](3).keys() == wanted
    script = (EXAMPLES / "node.sh").read_text()
    assert all(f"${name}" in script or f"${{{name}" in script for name in wanted)
    assert "NOT TRIED" in names["__doc__"]


@pytest.mark.parametrize("script", ["node.sh", "slurm.sh", "islands.sh", "islands_slurm.sh"])
def test_the_scripts_are_posix_shell(script):
    for shell in ("sh", "bash"):
        assert subprocess.run([shell, "-n", EXAMPLES / script]).returncode == 0
