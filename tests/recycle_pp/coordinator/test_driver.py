"""The driver adds the receiver's address to each donation, and records joiners."""

from types import SimpleNamespace

import pytest
from recycle_schedules import Worker

from recycle_pp.coordinator.driver import Driver
from recycle_pp.protocol.events import Send
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
