"""When the last worker of a stage dies, its understudy takes over without a checkpoint, and no bit changes."""

import os
import signal
import socket
import time

import psutil
import pytest

from recycle_pp.supervisor.foreign_sockets import connections_to
from tests.recycle_pp.model.general import models

from .harness import Case, explain, fails, pid_of
from .test_moves import SHARDED, hugging_face

slow = pytest.mark.slow
KEPT = ("state.understudy=auto", "run.respawns=0")


def last_dies(moment, stage=1):
    """Settings with which W(1,stage) dies, and later W(0,stage), when the stage's understudy is in step."""
    return (*KEPT, *fails(f"3:1.{stage}@backward", f"14:0.{stage}@{moment}"))


def case(claim, overrides, stagger=False):
    return Case(claim, "2x2", overrides, steps=18, deaths=2, stagger=stagger, bound=200)


SLOW = [
    case("at the vote", last_dies("vote"), stagger=True),
    case("at the commit", last_dies("commit")),
    case("in the sum", last_dies("allreduce"), stagger=True),
    case("in bf16", (*last_dies("forward"), "numerics.precision=bf16")),
    case("with int32 sums", (*last_dies("vote"), "numerics.sums=int32")),
    case("before a checkpoint", (*last_dies("commit"), "checkpoint.every=5")),
    case("sharded", (*last_dies("backward"), *SHARDED)),
    case("sharded in bf16", (*last_dies("commit", 0), *SHARDED, "numerics.precision=bf16"), stagger=True),
    case("with limited memory", (*last_dies("vote"), "parallel.memory=1GB")),
]
CASES = [
    case("the last worker dies in a backward", last_dies("backward")),
    *(pytest.param(each, marks=slow) for each in SLOW),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_understudy_takes_over_the_stage_of_a_dead_last_worker_and_no_bit_changes(case, runs):
    check_took_over(runs.of(case, "understudies"), runs)


def tied(at):
    """The project's own Transformer, with tied embedding and head weights."""
    folder = models.folder("llama", at, num_hidden_layers=4, vocab_size=512, tie_word_embeddings=True)
    return ("model=llama", f"model.path={folder}", "model.init=random", "model.sequence=16")


def custom():
    """A model whose layers are all the same module, so that no layer can move."""
    return ("model=custom", f"model.build={models.__name__}:SharedLayer", "model.layers=blocks", "model.sequence=16")


@slow
@pytest.mark.parametrize(
    ("kind", "stage", "more"),
    [
        ("qwen2", 1, ()),
        ("qwen2", 0, SHARDED),
        ("gpt2", 1, ()),  # its embedding and head are tied
        ("SharedLayer", 0, ()),
        ("own", 1, ()),
        ("own", 0, SHARDED),
    ],
)
def test_an_understudy_takes_over_a_stage_of_another_or_tied_model_and_no_bit_changes(
    kind, stage, more, runs, tmp_path
):
    of_kind = custom() if kind == "SharedLayer" else tied(tmp_path) if kind == "own" else hugging_face(kind, tmp_path)
    found = runs.of(case(f"{kind} model", (*last_dies("vote", stage), *of_kind, *more)), "understudies")
    check_took_over(found, runs)


def check_took_over(outcome, runs):
    runs.check_exact(outcome)
    (took,), last = outcome.all("took_over"), outcome.all("death_detected")[-1]["worker"]
    assert (took["worker"], took["step"]) == (last, 14 + ("@commit" in str(outcome.case.overrides))), explain(outcome)
    assert not outcome.all("restored") + outcome.all("stage_lost"), explain(outcome)


@slow
def test_without_room_no_stage_gets_an_understudy_and_the_job_continues(runs):
    """A worker has too little memory for another stage in addition to its own."""
    overrides = (*KEPT, *fails("3:1.1@backward"), "parallel.memory=310.4MB")
    outcome = runs.of(Case("no room", "2x2", overrides, steps=8, bound=200), "understudies")
    runs.check_exact(outcome)
    assert outcome.all("understudy_refused"), explain(outcome)
    (refused,) = outcome.all("understudy_refused")
    assert refused["worker"] == "0.1" and refused["needed_bytes"] > refused["free_bytes"], explain(outcome)
    assert not outcome.all("understudy_begins")


@slow
def test_an_understudy_takes_over_even_if_its_stream_from_the_last_worker_broke_earlier(runs):
    """Both processes survive the break. If neither reported it, the job would wait for control.suspicion."""
    outcome = runs.of(
        Case(
            "its stream broke",
            "2x2",
            (*KEPT, *fails("3:1.1@backward"), "control.suspicion=30"),
            steps=60,
            deaths=2,
            bound=200,
        ),
        "understudies",
        meanwhile=break_and_kill,
    )
    runs.check_exact(outcome)
    assert outcome.all("took_over"), explain(outcome)
    assert not outcome.all("restored") + outcome.all("stage_lost"), explain(outcome)


def break_and_kill(job):
    """Breaks the connections between the last worker and its understudy. Kills the worker when they are restored."""
    job.wait_for_event("understudy_in_step", 60)
    (ready,) = (event for event in job.run.lines(job.run.events) if event["event"] == "understudy_in_step")
    last, understudy = (pid_of(ready[name], job.run.lines(job.run.events)) for name in ("worker", "understudy"))
    for pid, other in ((last, understudy), (understudy, last)):
        listens = [c for c in psutil.Process(other).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        for port in {c.laddr.port for c in listens}:
            for connection in connections_to(pid, port):
                with connection:
                    connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 15
    while sum(event["event"] == "understudy_in_step" for event in job.run.lines(job.run.events)) < 2:
        assert time.monotonic() < deadline, "the understudy did not get in step again"
        time.sleep(0.05)
    os.kill(last, signal.SIGKILL)
