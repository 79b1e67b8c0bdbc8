"""Which members upload the parts of a checkpoint, and which one seals it."""

import pytest

from recycle_pp.coordinator.storing import Storing
from recycle_pp.protocol.assignment import initial
from recycle_pp.wire.messages.saving import Seal, Sealed, Upload, Uploaded, UploadFailed

WORKERS = initial(pipelines=2, stages=2)  # members 0 and 1 are pipeline 0, on node "a"; 2 and 3 are pipeline 1, on "b"
PARTS = ["stage-0-0-aa", "stage-1-1-bb"]  # written by members 0 and 3
LIVE = {0, 1, 2, 3}


@pytest.fixture
def nodes():
    return {0: "a", 1: "a", 2: "b", 3: "b"}


@pytest.fixture
def storing(nodes):
    return Storing(lambda: WORKERS, nodes.get)


def uploaded(*parts):
    return Uploaded(8, list(parts), {f"{part}/x": [1, 2] for part in parts})


def test_the_writers_upload_and_the_last_one_seals(storing):
    assert storing.begin(8, PARTS, False, False, LIVE) == [(0, Upload(8, PARTS[:1])), (3, Upload(8, PARTS[1:]))]
    assert storing.uploaded(3, uploaded(PARTS[1])) == []
    files = {"stage-0-0-aa/x": [1, 2], "stage-1-1-bb/x": [1, 2]}
    ((member, seal),) = storing.uploaded(0, uploaded(PARTS[0]))
    assert (member, seal.step, seal.parts, seal.files) == (0, 8, PARTS, files)
    assert storing.uploading == 8 and storing.sealed(Sealed(8)) is not None
    assert storing.uploading == 0 and storing.unsaved()[0] == 8


def test_a_seal_contains_the_losses_of_all_validations_since_the_last_completed_seal(storing):
    def losses(step):
        storing.begin(step, PARTS[:1], False, False, LIVE)
        files = {"stage-0-0-aa/x": [1, 2]}
        ((_, seal),) = storing.uploaded(0, Uploaded(step, PARTS[:1], files))
        return seal.losses

    storing.validated(4, 3.0)
    assert losses(8) == {4: 3.0}
    storing.failed(UploadFailed(8, "refused"))
    storing.validated(8, 2.0)
    assert losses(16) == {4: 3.0, 8: 2.0}
    storing.sealed(Sealed(16))
    storing.validated(16, 4.0)
    assert losses(24) == {16: 4.0}


def test_a_worker_of_the_same_node_uploads_for_a_dead_writer(storing):
    storing.begin(8, PARTS, False, False, LIVE)
    assert storing.died(0, LIVE - {0}) == [(1, Upload(8, PARTS[:1]))]


def test_the_parts_of_a_lost_node_are_lost_unless_all_nodes_share_the_folder(storing, nodes):
    storing.begin(8, PARTS, False, False, LIVE)
    del nodes[0], nodes[1]
    assert storing.died(0, {2, 3}) is None and storing.busy
    assert storing.failed(UploadFailed(8, "lost")) and not storing.busy
    storing.begin(8, PARTS, True, False, LIVE)
    assert storing.died(0, {2, 3}) == [(2, Upload(8, PARTS[:1]))]


def test_the_last_checkpoint_keeps_the_stages_whose_parts_survive_the_loss_of_any_node(storing):
    storing.begin(8, PARTS, False, True, LIVE)
    assert storing.kept() == []
    storing.uploaded(3, uploaded(PARTS[1]))
    assert storing.kept() == [1]
    storing.begin(8, PARTS, True, True, LIVE)
    assert storing.kept() == [0, 1]
    storing.sealed(Sealed(8))
    assert storing.kept() == []
    storing.begin(8, PARTS, True, False, LIVE)
    assert storing.kept() == []


def test_a_writer_whose_role_has_changed_uploads_its_part(storing):
    requests = storing.begin(8, PARTS, False, False, LIVE, None, {PARTS[1]: 1})
    assert requests == [(0, Upload(8, PARTS[:1])), (1, Upload(8, PARTS[1:]))]


def test_a_writer_that_is_dead_at_the_beginning_is_replaced(storing):
    assert storing.begin(8, PARTS, False, False, LIVE - {3}) == [(0, Upload(8, PARTS[:1])), (2, Upload(8, PARTS[1:]))]
    assert storing.begin(8, PARTS, False, False, {0, 1}) is None


def test_a_member_of_another_node_replaces_a_writer_only_if_none_of_its_own_node_is_live(storing):
    """The writers of all parts were on node "a", which has merged them. The folder may not be shared."""
    parts = ["stage-0-0-aa", "stage-1-0-bb"]
    assert storing.begin(8, parts, True, False, LIVE - {1}) == [(0, Upload(8, parts))]
    assert storing.begin(8, parts, True, False, {2, 3}) == [(2, Upload(8, parts[:1])), (3, Upload(8, parts[1:]))]


def test_the_death_of_a_worker_that_has_uploaded_causes_no_request(storing):
    storing.begin(8, PARTS, False, False, LIVE)
    storing.uploaded(0, uploaded(PARTS[0]))
    assert storing.died(0, LIVE - {0}) == []


def test_another_member_seals_for_a_dead_one(storing):
    storing.begin(8, PARTS, False, False, LIVE)
    storing.uploaded(0, uploaded(PARTS[0]))
    storing.uploaded(3, uploaded(PARTS[1]))
    ((member, seal),) = storing.died(3, LIVE - {3})
    assert member == 0 and isinstance(seal, Seal)


def test_requests_that_were_lost_in_a_reset_are_repeated(storing):
    storing.begin(8, PARTS, False, False, LIVE)
    assert storing.returned(3) == [(3, Upload(8, PARTS[1:]))] and storing.returned(2) == []
    storing.uploaded(0, uploaded(PARTS[0]))
    ((_, seal),) = storing.uploaded(3, uploaded(PARTS[1]))
    assert storing.returned(3) == [(3, seal)]


def test_answers_about_an_older_checkpoint_change_nothing(storing):
    storing.begin(16, PARTS, False, True, LIVE)
    assert storing.uploaded(0, uploaded(*PARTS)) == [] and not storing.failed(UploadFailed(8, "late"))
    assert storing.sealed(Sealed(8)) is None and storing.busy and storing.unsaved()[0] == 8


def test_only_a_failure_of_the_last_checkpoint_is_kept(storing):
    storing.begin(8, PARTS, False, False, LIVE)
    storing.failed(UploadFailed(8, "refused"))
    assert not storing.failed_last
    storing.begin(16, PARTS, False, True, LIVE)
    storing.failed(UploadFailed(16, "refused"))
    assert storing.failed_last
