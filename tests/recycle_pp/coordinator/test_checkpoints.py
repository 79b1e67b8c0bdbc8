"""Which workers save a checkpoint, and which ones it does not wait for."""

import asyncio
from pathlib import Path

from recycle_pp.coordinator.checkpoints import Saving
from recycle_pp.protocol.assignment import initial
from recycle_pp.wire.messages.saving import Assemble, Assembled, Assembling, Digests, Save, Saved, SaveFailed

WORKERS = initial(pipelines=2, stages=2)
SAVERS = [0, 1]
LIVE = [0, 2, 3]  # member 1, which plays W(0, 1), is dead


def saving(tmp_path, *, final):
    begun = Saving(tmp_path, lambda: WORKERS)
    begun.begin(8, SAVERS, final, live=())
    return begun


def asked(out):
    return [(send.to, type(send.message)) for send in out]


def test_at_the_end_of_the_run_a_peer_saves_for_a_dead_worker(tmp_path):
    last = saving(tmp_path, final=True)
    assert asked(last.only(LIVE)) == [(3, Save)]
    assert asked(last.saved(0, Saved(8))) == []
    assert asked(last.saved(3, Saved(8, whole=True))) == [(3, Assemble)]
    last.assembled(Assembled(8))
    assert not last.busy


def test_a_request_that_was_lost_in_a_reset_is_repeated_once_the_worker_has_returned(tmp_path):
    last = saving(tmp_path, final=True)
    # The job itself repeats the commit that asked member 1 to save, so no `Save` is sent.
    assert last.returned(1) == []
    last.died(1, LIVE)
    assert asked(last.returned(3)) == [(3, Save)]
    assert last.returned(0) == []
    last.saved(3, Saved(8, whole=True))
    last.saved(0, Saved(8))
    assert asked(last.returned(0)) == [(0, Assemble)]
    last.assembling(0, Assembling(8))
    assert last.returned(0) == []


def test_a_part_already_saved_by_a_peer_of_the_dead_worker_counts(tmp_path):
    """A new coordinator receives the part first and then checks which workers are missing."""
    last = saving(tmp_path, final=True)
    last.saved(0, Saved(8))
    assert asked(last.saved(3, Saved(8))) == [(3, Assemble)]
    assert last.only(LIVE) == []


def test_a_worker_that_dies_while_it_assembles_the_last_checkpoint_is_replaced(tmp_path):
    last = saving(tmp_path, final=True)
    last.assembling(1, Assembling(8))
    assert asked(last.only(LIVE)) == [(0, Assemble)]


def test_the_last_checkpoint_keeps_a_stage_without_workers_once_its_part_is_written(tmp_path):
    """Member 0 is the only live worker, so stage 1 has none."""
    last = saving(tmp_path, final=True)
    assert last.kept() == [] and saving(tmp_path, final=False).kept() == []
    last.saved(1, Saved(8, part="1"))
    assert last.kept() == [1] and last.only([0]) == []
    assert last.saved(0, Saved(8, part="0")) == [(0, Assemble(8, ["1", "0"]))] and last.kept() == [0, 1]
    last.assembling(1, Assembling(8))
    assert asked(last.died(1, [0])) == [(0, Assemble)] and not last.failed


def test_the_last_checkpoint_fails_if_no_worker_is_left_to_write_a_part_or_assemble_it(tmp_path):
    for died in (lambda last: last.died(1, [0]), lambda last: (last.assembling(1, Assembling(8)), last.died(1, []))):
        last = saving(tmp_path, final=True)
        died(last)
        assert last.failed and not last.busy and last.kept() == []


def test_with_a_store_a_part_on_one_disk_keeps_no_stage():
    last = Saving(Path("nowhere"), lambda: WORKERS, store="s3://bucket/run")
    last.begin(8, SAVERS, True, live=())
    last.saved(1, Saved(8))
    assert last.busy and last.kept() == []


def test_a_checkpoint_is_abandoned_if_its_saver_dies(tmp_path):
    early = saving(tmp_path, final=False)
    assert early.only(LIVE) == [] and not early.busy


def test_the_next_checkpoint_waits_for_workers_that_still_write_an_abandoned_one(tmp_path):
    early = saving(tmp_path, final=False)
    early.died(1, LIVE)
    assert not early.busy and early.occupied and early.slow() == "worker 0.0"
    early.saved(0, Saved(8))
    assert not early.occupied


def test_failed_and_dead_savers_are_not_waited_for(tmp_path):
    early = saving(tmp_path, final=False)
    early.save_failed(SaveFailed(8, "no space left"), 1)
    assert not early.busy and early.occupied
    early.only([1, 2])  # the live workers that a new coordinator finds
    assert not early.occupied


def test_parts_of_an_older_checkpoint_and_surplus_parts_are_ignored(tmp_path):
    last = saving(tmp_path, final=True)
    assert last.saved(0, Saved(4)) == [] and last.busy
    last.saved(0, Saved(8))
    assert last.saved(2, Saved(8)) == [] and last.busy


def test_a_checkpoint_is_finished_only_after_all_live_workers_have_reported_equal_digests(tmp_path):
    begun = saving(tmp_path, final=False)
    begun.begin(8, SAVERS, False, LIVE)
    for member in SAVERS:
        assert begun.saved(member, Saved(8)) == []
    assert begun.compared(0, Digests(8, {"a": "1"})) == []
    assert begun.compared(2, Digests(8, {"a": "1"})) == [] and begun.slow() == "worker 1.1"
    assert asked(begun.compared(3, Digests(8, {"b": "1"}))) == [(1, Assemble)]


def test_a_checkpoint_is_never_finished_if_the_workers_differ(tmp_path):
    begun = saving(tmp_path, final=False)
    begun.begin(8, SAVERS, False, LIVE)
    for member in SAVERS:
        begun.saved(member, Saved(8))
    for member in LIVE:
        worker = WORKERS[member]
        assert begun.compared(member, Digests(8, {f"of stage {worker.stage}": str(worker.pipeline)})) == []
    assert begun.replicas.verdict() == "workers 0.0 and 1.0 hold different weights (of stage 0) after 8 steps"
    assert begun.busy


def test_a_worker_that_dies_before_it_reports_its_digests_is_not_waited_for(tmp_path):
    begun = saving(tmp_path, final=False)
    begun.begin(8, SAVERS, False, [*SAVERS, 2])
    for member in SAVERS:
        begun.saved(member, Saved(8))
        begun.compared(member, Digests(8, {}))
    assert asked(begun.died(2, SAVERS)) == [(1, Assemble)]


def test_the_next_checkpoint_clears_the_failure_of_the_last_one(tmp_path):
    """All holders of a block died before it was saved, so the job restarts from the previous checkpoint."""
    last = saving(tmp_path, final=True)
    assert last.save_failed(SaveFailed(8, "a box of head.weight is in none of the parts")) and last.failed
    last.begin(8, SAVERS, True, live=())
    assert not last.failed


def test_a_checkpoint_that_is_deleted_during_the_look_hides_no_other_checkpoint(tmp_path, monkeypatch):
    for step in (10, 20):
        (tmp_path / f"step-{step:06d}" / "stage-0-0-0123abcd").mkdir(parents=True)
    listed = Path.iterdir

    def iterdir(path):
        if path.name == "step-000010":
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    saving = Saving(tmp_path, lambda: {})
    asyncio.run(saving.look())
    assert saving.found == {20: ["stage-0-0-0123abcd"]} and saving.newest_step == 20
