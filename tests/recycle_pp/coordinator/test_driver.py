"""The driver adds the receiver's address to each donation, and records joiners."""

import asyncio
from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.coordinator.driver import Driver
from recycle_pp.protocol.events import Send, WorkerReady
from recycle_pp.wire.messages.lifecycle import Donate

from .states import job_state


@pytest.mark.parametrize("member", [False, True], ids=["joiner", "member"])
def test_a_donation_has_the_address_of_its_receiver_and_only_a_joiner_gets_an_event(member):
    state, sent = job_state(), []
    driver = Driver(state, agreement=None)
    driver.agreement_gate = SimpleNamespace(send=sent.extend)
    for number in (0, 4, 8):
        state.roster.enter(number).address = ("host", number)
    state.job.live |= {0, 8} | ({4} if member else set())
    donation = Donate(4, Worker(1, 0), 7)
    driver.send([Send(0, donation), Send(8, donation)])
    assert [(send.to, send.message.address) for send in sent] == [(0, ("host", 4)), (8, ("host", 4))]
    assert state.recorder.events == ([] if member else ["joining"])


def test_savers_delete_no_checkpoint_that_is_being_written_or_uploaded():
    state = job_state()
    driver = Driver(state, SimpleNamespace(agree=asyncio.sleep))
    for number in range(9):
        state.roster.enter(number)
    driver.drive(WorkerReady(0))
    assert state.job.saving.in_use is None, "an earlier coordinator may have begun a save"
    state.storing.begin(10, ["stage-0-0-0123abcd"], False, False, [0])
    state.saving.begin(20, [0], False, [0])
    driver.drive(WorkerReady(1))
    assert state.job.saving.in_use == [10, 20]
