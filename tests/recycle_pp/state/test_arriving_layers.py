"""While its stage trains, a member follows layers that it will get, until the stage takes them over."""

import queue
import threading
import weakref

import pytest
import torch
from recycle_schedules import Worker as Role

from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.participant import Participant
from recycle_pp.state.follow import Following
from recycle_pp.wire.messages.generations import Announce
from recycle_pp.wire.messages.lifecycle import Expect, Synced
from recycle_pp.wire.messages.states import StatePart
from recycle_pp.wire.messages.units import packed, unpacked

from .test_follow import OldStream, Worker, assert_same, take

MOVED = {0: [-1, 0], 1: [1, 2, 3]}  # layer 1 moves from stage 0 to stage 1


class Receiver:
    """A member of stage 1, which follows layer 1."""

    def __init__(self, layout=None):
        self.worker, self.giver = Worker(reproducible=True), Worker(reproducible=True, stage=0)
        self.giver.commit(0, "stepped")
        self.participant = Participant(1, Role(0, 1), committed=0, applied=0)
        self.participant.holdings = Holdings(1, self.worker.stage.layout.ids, 0)
        self.announce({0: [-1, 0, 1], 1: [2, 3]})
        stage, optimizer = self.worker.stage, self.worker.optimizer
        self.following = Following(
            stage, optimizer, self.participant, threading.RLock(), "token", "127.0.0.1", lambda *_: None
        )
        self.following.close()
        self.following._closed = False

    def announce(self, layout):
        """Announces a generation with this layout. Returns the layers of the units that the worker reports."""
        message = Announce(self.participant.generation + 1, {0: Role(0, 0), 1: Role(0, 1)}, 0, 0, layout=layout)
        return {unit.layer for unit in unpacked(self.participant.announce(message).holds.units)}

    def parcel(self, session):
        names = [unit for unit in self.giver.stage.layout.ids if unit.layer == 1]
        exponents = self.giver.stage.gradients.exponents_of_layers()
        tensors = self.giver.optimizer.copy(names, 0) | {f"exponents.{layer}": of for layer, of in exponents.items()}
        return StatePart(session, 0, packed(names), len(names)), tensors

    def arrived(self):
        """Whether the stage has layer 1 with the same bits as the donor."""
        here, there = self.worker, self.giver
        numbers = [(here.stage.layout.number(unit), there.stage.layout.number(unit))
                   for unit in there.stage.layout.ids if unit.layer == 1]  # fmt: skip
        pairs = [(here.optimizer.vectors(a), there.optimizer.vectors(b)) for a, b in numbers]
        exponents = [of.stage.gradients.exponents_of_layers()[1] for of in (here, there)]
        return torch.equal(*exponents) and all(all(map(torch.equal, one, other)) for one, other in pairs)


def test_a_member_follows_layers_beside_its_stage_until_they_move():
    receiver = Receiver()
    before = receiver.worker.state()
    receiver.following.expect(Expect(7, [1]))
    assert take(receiver.following, receiver.parcel(7))
    assert_same(receiver.worker.state(), before)
    assert 1 in receiver.announce(MOVED)
    receiver.following.relayout(MOVED[1])
    assert [*receiver.worker.stage.layout.layers] == MOVED[1] and receiver.arrived()
    assert receiver.participant.holdings.all == receiver.worker.stage.layout.ids


def test_an_abandoned_move_leaves_no_copies_behind():
    receiver = Receiver()
    receiver.following.expect(Expect(7, [1]))
    take(receiver.following, receiver.parcel(7))
    beside = weakref.ref(receiver.following._session.optimizer)
    receiver.following.expect(Expect(8, []))
    assert beside() is None and 1 not in receiver.announce(MOVED)


def test_a_donor_that_connects_before_its_session_is_known_waits():
    receiver = Receiver()
    parcels, synced = queue.Queue(), queue.Queue()
    parcels.put(receiver.parcel(7))
    stream = OldStream(None)
    stream.receive, stream.close = parcels.get, lambda: None
    receiver.following._send = synced.put
    follow = threading.Thread(target=receiver.following._follow, args=(stream,), daemon=True)
    follow.start()
    with pytest.raises(queue.Empty):
        synced.get(timeout=0.05)
    receiver.following.expect(Expect(7, [1]))
    assert synced.get(timeout=10) == Synced(0, 7)
    receiver.following.expect(Expect(8, []))
    parcels.put(receiver.parcel(7))
    follow.join(10)
    assert not follow.is_alive(), "its session is over"


def test_a_joiner_follows_the_layers_that_its_stage_has_at_that_time():
    receiver = Receiver()
    receiver.participant.generation = -1
    receiver.following.expect(Expect(7, MOVED[1]))
    assert take(receiver.following, receiver.parcel(7)), "layer 1 alone: the donor sends no other units"
    assert [*receiver.worker.stage.layout.layers] == MOVED[1] and receiver.arrived()
