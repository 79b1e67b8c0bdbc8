"""The parts that a worker with sharded state saves."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.participant import Participant
from recycle_pp.state.saving import StageSaving
from recycle_pp.telemetry.checkpoint_folders import temporary, unfinished
from recycle_pp.wire.messages.saving import Digests, Save, Saved, SaveFailed
from recycle_pp.wire.messages.steps import Commit

from ..in_process import CPU, small
from ..numerics.test_units import flip


@pytest.mark.parametrize("changed", [False, True])
def test_a_worker_that_must_save_all_its_units_rejects_units_changed_since_the_commit(changed, tmp_path):
    """Another holder has died, so no other copy may be left to compare with."""
    config, said = small(parallel__pipelines=2, parallel__sharded=True, control__mismatch="third"), []
    stage = Stage(config, 0, CPU)
    optimizer = StageOptimizer(config, stage, whole=False)
    for unit in range(len(stage.layout.units)):
        optimizer.begin(unit)
    inject = lambda moment, step: None  # noqa: E731
    me = Participant(0, Worker(0, 0), Holdings(0, stage.layout.ids, -1))
    saving = StageSaving(config, str(tmp_path), stage, optimizer, Batches(config), me, said.append, inject)
    saving.committed(SimpleNamespace(step=3, savers=[], last=True), None)
    if changed:
        flip(optimizer.vectors(1)[1], 5, 7)
    saving.asked(Save(4))
    deadline = time.monotonic() + 30
    while not said and time.monotonic() < deadline:
        time.sleep(0.01)
    (answer,) = said
    assert isinstance(answer, SaveFailed if changed else Saved)
    assert not changed or "has changed since its update" in answer.detail


def test_a_save_deletes_leftovers_of_older_saves_but_no_checkpoint_that_the_commit_names_as_in_use(tmp_path):
    config, said = small(), queue.Queue()
    stage = Stage(config, 0, CPU)
    me = Participant(0, Worker(0, 0), Holdings(0, stage.layout.ids, -1))
    arguments = (stage, StageOptimizer(config, stage), Batches(config), me, said.put, lambda *_: None)
    for step in (1, 2):
        temporary(tmp_path / "checkpoints", step).mkdir(parents=True)
    commit = Commit(0, 3, scale=1.0, norm=1.0, loss=1.0, savers=[0], in_use=[1])
    StageSaving(config, str(tmp_path), *arguments).committed(commit, None)
    assert {type(said.get(timeout=30)) for _ in range(2)} == {Digests, Saved}
    assert set(unfinished(tmp_path / "checkpoints").values()) == {1, 4}


def test_digests_name_the_units_of_the_commit_even_if_layers_move_meanwhile(tmp_path, monkeypatch):
    config, said, moved = small(parallel__pipelines=2, parallel__sharded=True), queue.Queue(), threading.Event()
    stage = Stage(config, 0, CPU)
    optimizer = StageOptimizer(config, stage, whole=False)
    for unit in range(len(stage.layout.units)):
        optimizer.begin(unit)
    expected = {f"state of {name}" for name in stage.layout.unit_names}
    me = Participant(0, Worker(0, 0), Holdings(0, stage.layout.ids, -1))
    saving = StageSaving(config, str(tmp_path), stage, optimizer, Batches(config), me, said.put, lambda *_: None)

    class Late(threading.Thread):
        def run(self):
            moved.wait(30)
            super().run()

    monkeypatch.setattr(threading, "Thread", Late)
    saving.committed(SimpleNamespace(step=3, savers=[1], last=False), None)
    stage.relayout([-1, 0])
    optimizer.relayout([])
    moved.set()
    assert expected <= {*said.get(timeout=30).digests}
