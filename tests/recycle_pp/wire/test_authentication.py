"""Mutual authentication: both ends prove that they know the token, and recorded messages are useless."""

import queue
import threading
from contextlib import suppress

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from recycle_pp.wire.authentication import Prover, Refused, Verifier, prove
from recycle_pp.wire.frames import Malformed, encode
from recycle_pp.wire.messages.handshake import (
    HELLOS,
    TO_CLIENT,
    TO_SERVER,
    Accepted,
    CandidateHello,
    Challenge,
    Response,
    WorkerHello,
)

from .echo import HELLO, TOKEN, admit

pytestmark = pytest.mark.timeout(60)


def handshake(client_token, server_token, hello=HELLO):
    """The client's hello, as admitted by the server. Client and server run in one thread each."""
    to_server, to_client, ends = queue.SimpleQueue(), queue.SimpleQueue(), {}

    def server():
        try:
            ends["hello"] = admit(server_token, to_client.put, lambda _: to_server.get(timeout=5))
        except Refused as refused:
            ends["refused"] = str(refused)
            to_client.put(Accepted(b""))  # as an impostor would

    thread = threading.Thread(target=server)
    thread.start()
    try:
        prove(client_token, hello, to_server.put, lambda _: to_client.get(timeout=5))
    finally:
        thread.join(5)
    return ends["hello"]


@given(st.text(), st.builds(WorkerHello, st.integers(-1, 999), st.integers(0, 99), st.booleans()))
def test_a_client_with_the_token_is_admitted_with_its_hello(token, hello):
    assert handshake(token, token, hello) == hello


@given(st.text(), st.text())
def test_both_ends_reject_another_token(one, other):
    assume(one != other)
    with pytest.raises(Refused, match="does not know the job's token"):
        handshake(one, other)


def test_a_response_replayed_from_another_connection_is_rejected():
    recorded = Prover(TOKEN, HELLO).respond(Verifier(TOKEN, HELLOS).challenge)
    with pytest.raises(Refused, match="its RECYCLE_TOKEN differs"):
        Verifier(TOKEN, HELLOS).judge(recorded)  # a new verifier has another challenge


def test_a_proof_covers_the_hello_and_cannot_be_reflected():
    verifier = Verifier(TOKEN, HELLOS)
    response = Prover(TOKEN, HELLO).respond(verifier.challenge)
    with pytest.raises(Refused, match="its RECYCLE_TOKEN differs"):
        verifier.judge(Response(response.nonce, encode(CandidateHello())[4:], response.proof))
    prover = Prover(TOKEN, HELLO)
    mine = prover.respond(Verifier(TOKEN, HELLOS).challenge)
    with pytest.raises(Refused, match="does not know the job's token"):
        prover.check(Accepted(mine.proof))  # reflected to the prover


@given(st.binary(max_size=300))
def test_a_garbage_handshake_raises_nothing_but_malformed(body):
    for vocabulary in (TO_SERVER, TO_CLIENT, HELLOS):
        with suppress(Malformed):
            vocabulary.decode(body)


def test_a_nonce_of_another_length_is_malformed():
    with pytest.raises(Malformed, match="length >= 32"):
        TO_CLIENT.decode(encode(Challenge(b"short"))[4:])
