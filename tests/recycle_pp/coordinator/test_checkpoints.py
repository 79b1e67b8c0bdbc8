"""Who is asked to save, and who is not waited for."""

from recycle_schedules import Worker

from recycle_pp.coordinator.checkpoints import Saving
from recycle_pp.wire.messages.workers import Assemble, Assembled, Assembling, Digests, Save, Saved, SaveFailed

SAVERS = [Worker(0, 0), Worker(0, 1)]
LIVE = [Worker(0, 0), Worker(1, 0), Worker(1, 1)]  # W(0, 1) has died


def saving(tmp_path, *, final):
    begun = Saving(tmp_path)
    begun.begin(8, SAVERS, final, live=())
    return begun


def asked(out):
    return [(send.to, type(send.message)) for send in out]


def test_at_the_end_of_the_run_a_peer_saves_for_whoever_is_dead(tmp_path):
    last = saving(tmp_path, final=True)
    assert asked(last.only(LIVE)) == [(Worker(1, 1), Save)]
    assert asked(last.saved(Worker(0, 0), Saved(8))) == []
    assert asked(last.saved(Worker(1, 1), Saved(8))) == [(Worker(1, 1), Assemble)]
    last.assembled(Assembled(8))
    assert not last.busy


def test_what_a_peer_has_saved_for_the_dead_before_counts(tmp_path):
    """A successor hears of the part first, and then looks who is missing."""
    last = saving(tmp_path, final=True)
    last.saved(Worker(0, 0), Saved(8))
    assert asked(last.saved(Worker(1, 1), Saved(8))) == [(Worker(1, 1), Assemble)]
    assert last.only(LIVE) == []


def test_whoever_dies_as_it_assembles_the_last_checkpoint_is_replaced(tmp_path):
    last = saving(tmp_path, final=True)
    last.assembling(Worker(0, 1), Assembling(8))
    assert asked(last.only(LIVE)) == [(Worker(0, 0), Assemble)]


def test_a_checkpoint_on_the_way_is_given_up_with_its_saver(tmp_path):
    early = saving(tmp_path, final=False)
    assert early.only(LIVE) == [] and not early.busy


def test_the_next_one_waits_for_those_who_still_write_their_part_of_one_that_was_given_up(tmp_path):
    early = saving(tmp_path, final=False)
    early.died(Worker(0, 1), LIVE)
    assert not early.busy and early.occupied and early.slow() == "worker 0.0"
    early.saved(Worker(0, 0), Saved(8))
    assert not early.occupied


def test_who_could_not_write_its_part_or_has_died_writes_no_more(tmp_path):
    early = saving(tmp_path, final=False)
    early.save_failed(SaveFailed(8, "no space left"), Worker(0, 1))
    assert not early.busy and early.occupied
    early.only([Worker(0, 1), Worker(1, 0)])  # as a successor finds out
    assert not early.occupied


def test_a_part_of_an_older_checkpoint_or_one_too_many_changes_nothing(tmp_path):
    last = saving(tmp_path, final=True)
    assert last.saved(Worker(0, 0), Saved(4)) == [] and last.busy
    last.saved(Worker(0, 0), Saved(8))
    assert last.saved(Worker(1, 0), Saved(8)) == [] and last.busy


def test_a_checkpoint_is_not_finished_before_all_who_live_have_said_that_they_hold_the_same(tmp_path):
    begun = saving(tmp_path, final=False)
    begun.begin(8, SAVERS, False, LIVE)
    for worker in SAVERS:
        assert begun.saved(worker, Saved(8)) == []
    assert begun.compared(Worker(0, 0), Digests(8, {"a": "1"})) == []
    assert begun.compared(Worker(1, 0), Digests(8, {"a": "1"})) == [] and begun.slow() == "worker 1.1"
    assert asked(begun.compared(Worker(1, 1), Digests(8, {"b": "1"}))) == [(Worker(0, 1), Assemble)]


def test_a_checkpoint_of_workers_that_differ_is_never_finished(tmp_path):
    begun = saving(tmp_path, final=False)
    begun.begin(8, SAVERS, False, LIVE)
    for worker in SAVERS:
        begun.saved(worker, Saved(8))
    for worker in LIVE:
        assert begun.compared(worker, Digests(8, {f"of stage {worker.stage}": str(worker.pipeline)})) == []
    assert begun.replicas.verdict() == "workers 0.0 and 1.0 hold different weights (of stage 0) after 8 steps"
    assert begun.busy


def test_who_dies_before_it_has_said_what_it_holds_is_not_waited_for(tmp_path):
    begun = saving(tmp_path, final=False)
    begun.begin(8, SAVERS, False, [*SAVERS, Worker(1, 0)])
    for worker in SAVERS:
        begun.saved(worker, Saved(8))
        begun.compared(worker, Digests(8, {}))
    assert asked(begun.died(Worker(1, 0), SAVERS)) == [(Worker(0, 1), Assemble)]


def test_a_last_checkpoint_that_failed_is_forgotten_with_the_next_one(tmp_path):
    """All copies of a block have died before it was saved: the job begins anew at the checkpoint before."""
    last = saving(tmp_path, final=True)
    assert last.save_failed(SaveFailed(8, "a box of head.weight is in none of the parts")) and last.failed
    last.begin(8, SAVERS, True, live=())
    assert not last.failed
