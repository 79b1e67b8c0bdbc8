"""Every request of `recycle_pp.ctl` to a job with three torchrun agents, and every refusal."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from recycle_pp import ctl
from recycle_pp.wire.launch import token_of

from .launched import TOKEN, Launched

pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(600)]
ARGUMENTS = ("run.steps=100000", "run.validate_every=0", "run.standby=off", "checkpoint.minutes=0")


@pytest.fixture
def job(tmp_path):
    with Launched(tmp_path, nodes=3, workers=1, arguments=ARGUMENTS) as job:
        yield job


@pytest.fixture
def ask(job, capsys, monkeypatch):
    """ask(verb, ...): (exit code, standard output or, if the request is refused, the message)."""
    monkeypatch.setenv("RECYCLE_TOKEN", TOKEN)

    def ask(*words):
        capsys.readouterr()
        code = ctl.main([str(job.run.path), *words])
        out, err = capsys.readouterr()
        return code, out if code == 0 else err.splitlines()[-1].removeprefix("recycle_pp: ")

    return ask


def refused(asked, sentence):
    code, said = asked
    assert code == 2 and sentence in said, said


def address_of_supervisor(job, node):
    (supervisor,) = job.supervisors([node])
    (listening,) = [of.laddr for of in supervisor.net_connections("tcp") if of.status == psutil.CONN_LISTEN]
    return f"{listening.ip}:{listening.port}"


def alive(processes):
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def processes(job, nodes):
    """The supervisors and workers of these nodes."""
    return [process for node in nodes for process in job.processes(node)[1:]]


def test_requests_are_carried_out_or_refused_even_after_a_failover(job, ask, monkeypatch):
    job.wait_for_step(3)

    # wrong requests
    refused(ask("drain", "7.0"), "there is no worker 7.0: the workers of this job are 0.0 to 2.0")
    refused(ask("stacks", "1"), "a worker is D.S, pipeline and stage, for instance 1.2, not '1'")
    refused(ask("profile", "1.0", "--steps", "0"), "--steps must be at least 1, not 0")
    refused(ask("set", "optimizer.lr=0.1"), "optimizer.lr cannot change while the job runs; these keys can: schedule.")
    refused(ask("set", "checkpoint.every"), "a change is KEY=VALUE")
    monkeypatch.setenv("RECYCLE_TOKEN", "another secret of sixteen")
    refused(ask("stop"), "does not accept this RECYCLE_TOKEN")
    monkeypatch.delenv("RECYCLE_TOKEN")
    refused(ask("stop"), "set RECYCLE_TOKEN")
    monkeypatch.setenv("RECYCLE_TOKEN", TOKEN)

    # requests that do not disturb the worker
    code, stacks = ask("stacks", "1.0")
    assert code == 0 and "most recent call first" in stacks and "executor.py" in stacks, stacks
    assert ctl.main([address_of_supervisor(job, 2), "stacks", "1.0"]) == 0, (
        "supervisor 2 must name the coordinator's address"
    )
    code, said = ask("profile", "1.0", "--steps", "2")
    assert code == 0 and said.startswith("2 steps of worker 1.0: "), said
    names = {event.get("name") for event in json.loads(Path(said.split()[-1]).read_text())["traceEvents"]}
    assert {"recycle/F", "aten::mm"} <= names
    assert job.events("profiled")[0]["worker"] == "1.0" and not job.events("death_detected")

    # a checkpoint, and a changed setting, which the next coordinator must know, too
    assert not job.events("checkpoint_saved")
    code, said = ask("checkpoint")
    (saved,) = job.events("checkpoint_saved")
    assert (code, said) == (0, f"checkpoint {job.run.checkpoints}/step-{saved['checkpoint']:06d} is complete\n")
    code, said = ask("set", "checkpoint.every=5")
    assert code == 0 and said.startswith("checkpoint.every=5 from step "), said
    assert job.events("settings_changed")[0]["changes"] == ["checkpoint.every=5"]
    job.wait_for_event("checkpoint_saved", 2)

    # the coordinator is lost; a request reaches the next one
    job.kill(0)
    assert ask("checkpoint")[0] == 0
    job.wait_for_event("coordinator_elected")
    before = len(job.events("checkpoint_saved"))
    job.wait_for_event("checkpoint_saved", before + 2)
    assert all(event["checkpoint"] % 5 == 0 for event in job.events("checkpoint_saved")[before:])

    # a worker leaves; the last worker of the stage may not
    refused(ask("stacks", "0.0"), "worker 0.0 has no process now")
    code, said = ask("drain", "2.0")
    assert (code, said) == (0, "worker 2.0 has left; the job continues without it\n")
    assert [event["worker"] for event in job.events("left")] == ["2.0"]
    assert job.events("death_detected")[-1]["cause"] == "eviction"
    refused(ask("drain", "1.0"), "worker 1.0 is the last of stage 0; with --force it leaves after a checkpoint")
    refused(ask("drain", "--force", "1.0"), "without worker 1.0 only 0 workers would be left for 1 stage")
    job.wait_for_step(job.committed() + 2)

    # the job is stopped
    running = processes(job, (1, 2))
    assert len(running) == 3, running  # the supervisor of the drained worker continues to run
    command = [sys.executable, "-m", "recycle_pp.cli", "ctl", str(job.run.path), "stop"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    left = alive(running)
    print(done.stderr, done.stdout, sep="")
    assert done.returncode == 0 and not left, (done, left)
    assert done.stdout.splitlines()[-1] == "no process of the job is left"
    step = f"{job.run.checkpoints}/step-{job.committed() + 1:06d}"
    assert f"the job has ended: ctl stop; the newest checkpoint is {step}" in done.stdout
    assert job.wait((1, 2), 60) == [1, 1], job.explain()
    assert job.events("ending")[0]["signal"] == "ctl stop"
    assert "exitcode  : 143" in job.output(1)
    refused(ask("checkpoint"), f"no job runs in {job.run.path}: it ended with exit code 143")


SMALL = ["model=tiny", "run.steps=1000000", "run.validate_every=0"]


def test_on_one_node_the_token_is_read_from_a_private_file_and_the_coordinators_own_worker_may_leave(
    zygote, capsys, monkeypatch
):
    monkeypatch.setenv("RECYCLE_TOKEN", "the token of another job")
    with zygote.run(["parallel=2x1", *SMALL]) as job:
        job.wait_for_event("started", 60)
        supervisors = [psutil.Process(pid) for pid in job.supervisors()]
        assert ctl.main([str(job.run.path), "drain", "0.0"]) == 0, job.output
        assert ctl.main([str(job.run.path), "stop"]) == 0, job.output
        assert not alive(supervisors)
        assert job.wait(20) == 143
        assert "Traceback" not in job.output
        assert token_of(job.run.path) is None


@pytest.mark.slow  # quick counterpart: tests of jobs that a signal ends check the same time limit
def test_a_hung_job_can_be_stopped(zygote, capsys):
    with zygote.run(["parallel=2x1", *SMALL, "control.suspicion=100"]) as job:
        job.wait_for_event("started", 60)
        worker = psutil.Process(next(iter(job.workers().values())))
        worker.suspend()
        assert ctl.main([str(job.run.path), "stacks", "0.0"]) == 2
        assert "wrote no stacks: its process is stopped" in capsys.readouterr().err
        assert ctl.main([str(job.run.path), "stop"]) == 0, job.output
        assert not alive([worker])
        assert job.wait(20) == 143


@pytest.mark.slow  # quick counterpart: tests/recycle_pp/coordinator/test_operators.py
def test_with_force_the_last_worker_of_a_stage_leaves_and_the_others_restart_from_its_checkpoint(zygote, capsys):
    with zygote.run(["parallel=2x2", *SMALL, "+fail_at=2:1.1"]) as job:
        job.wait_for_event("resumed", 60)
        run = str(job.run.path)
        assert ctl.main([run, "drain", "0.1"]) == 2
        assert ctl.main([run, "drain", "0.1", "--force"]) == 0, job.output
        restored = job.wait_for_event("restored", 60)
        saved = job.wait_for_event("checkpoint_saved", 1)
        assert restored["checkpoint"] == saved["checkpoint"]
        assert ctl.main([run, "checkpoint"]) == 0, job.output
        assert ctl.main([run, "stop"]) == 0, job.output
        assert job.wait(20) == 143
