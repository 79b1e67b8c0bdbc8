"""Profiles of a worker's steps."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
from recycle_schedules import Worker

from recycle_pp.execution.profiling import Profiling
from recycle_pp.execution.spans import named
from recycle_pp.wire.messages.lifecycle import Profile


@pytest.fixture
def sent():
    return []


@pytest.fixture
def profiling(sent, tmp_path):
    return Profiling(str(tmp_path), Worker(1, 2), torch.device("cpu"), sent.append)


def commit(profiling, step, last=False):
    profiling.committed(SimpleNamespace(step=step, last=last), None)
    with named("recycle/F"):
        torch.ones(2).sum()


def written(sent):
    """Waits until the thread has written the file. Returns the only answer sent."""
    for thread in threading.enumerate():
        if thread.name == "profile":
            thread.join()
    (answer,) = sent
    return answer


def test_a_profile_has_the_ops_of_the_steps_after_the_next_commit(profiling, sent, tmp_path):
    commit(profiling, 18)
    profiling.asked(Profile(2))
    for step in (19, 20):
        commit(profiling, step)
        assert not sent
    commit(profiling, 21)
    answer = written(sent)
    path = tmp_path / "profiles" / "step-000020-1.2.json"
    assert (answer.path, answer.steps, answer.failed) == (str(path), 2, "")
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("name") == "recycle/F" for event in events) == 2
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_profile_ends_with_the_last_step_of_the_run(profiling, sent):
    profiling.asked(Profile(10))
    commit(profiling, 57)
    commit(profiling, 58, last=True)
    assert written(sent).steps == 1


def test_a_profile_that_cannot_be_written_is_reported(profiling, sent, tmp_path):
    (tmp_path / "profiles").touch()
    profiling.asked(Profile(1))
    commit(profiling, 3)
    commit(profiling, 4)
    assert written(sent).failed


def test_a_process_that_takes_another_role_abandons_its_profile(profiling, sent):
    profiling.asked(Profile(3))
    commit(profiling, 3)
    profiling.close()
    assert "another role" in written(sent).failed
