"""In state streams, the joiner receives the donor's exact bits, and each end notices the death of the other."""

import socket
import struct
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.comm import handshakes
from recycle_pp.comm.handshakes import PENDING
from recycle_pp.comm.transfer import Receiver, Stream, TransferError, connect
from recycle_pp.wire.frames import encode, encode_body
from recycle_pp.wire.messages.states import Parcel, StatePart, StepGradient, TensorHeader
from recycle_pp.wire.messages.supervisors import Kill
from tests.recycle_pp.comm.idle import still_open
from tests.recycle_pp.wire.any_message import any_message

TOKEN = "token of this job"
ABOUT = StatePart(session=1, step=3, units=[(0, 0, 1)], of=1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.fixture
def streams():
    """A donor's end and a joiner's end."""
    receiver = Receiver("127.0.0.1", TOKEN)
    accepted: list[Stream] = []
    accepting = threading.Thread(target=lambda: accepted.append(receiver.accept(10)))
    accepting.start()
    donor = connect(receiver.address, TOKEN)
    accepting.join(10)
    receiver.close()
    yield donor, accepted[0]
    donor.close()
    accepted[0].close()


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4),
    dtype=st.sampled_from(DTYPES),
    about=any_message(StatePart) | any_message(StepGradient),
)
def test_tensors_arrive_bit_by_bit(shapes, dtype, about):
    tensors = {f"layers.{k}.weight": (torch.randn(shape) * 9).to(dtype) for k, shape in enumerate(shapes)}
    left, right = socket.socketpair()
    donor, joiner = Stream(left, 5), Stream(right, 5)
    donor.send(about, tensors)
    got_about, got = joiner.receive()
    assert got_about == about and list(got) == list(tensors)
    assert all(got[name].dtype == dtype and torch.equal(got[name], tensors[name]) for name in tensors)
    donor.close()
    joiner.close()


def test_a_big_tensor_streams_both_ways_at_once(streams):
    donor, joiner = streams
    tensor = torch.arange(6_000_000, dtype=torch.float32)
    sending = [threading.Thread(target=end.send, args=(ABOUT, {"x": tensor})) for end in streams]
    for thread in sending:
        thread.start()
    for end in (donor, joiner):
        assert torch.equal(end.receive()[1]["x"], tensor)
    for thread in sending:
        thread.join(10)


def test_a_tensor_that_is_not_contiguous_arrives_unchanged(streams):
    donor, joiner = streams
    tensor = torch.arange(6.0).reshape(2, 3).t()
    donor.send(ABOUT, {"x": tensor})
    assert torch.equal(joiner.receive()[1]["x"], tensor)


@pytest.mark.parametrize("when", ["before", "in the midst"])
def test_a_receiver_notices_a_dead_donor_at_once(streams, when):
    donor, joiner = streams
    if when == "in the midst":
        donor._socket.sendall(encode(Parcel(ABOUT, [TensorHeader("x", "float32", [1000])])) + bytes(100))
    donor.close()
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"closed|reset"):
        joiner.receive()
    assert time.monotonic() - start < 2


def test_a_donor_notices_a_dead_joiner(streams):
    donor, joiner = streams
    joiner.close()
    with pytest.raises(TransferError):
        for _ in range(50):
            donor.send(ABOUT, {"x": torch.zeros(100_000)})


def test_close_wakes_a_receiving_thread(streams):
    _, joiner = streams
    errors: list[BaseException] = []

    def receive():
        try:
            joiner.receive()
        except TransferError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    time.sleep(0.05)
    joiner.close()
    thread.join(5)
    assert len(errors) == 1


def test_closing_the_receiver_wakes_an_accepting_thread():
    receiver = Receiver("127.0.0.1", TOKEN)
    threading.Timer(0.05, receiver.close).start()
    start = time.monotonic()
    with pytest.raises(TransferError, match="no peer has connected"):
        receiver.accept(30)
    assert time.monotonic() - start < 5


def test_a_client_without_the_token_is_rejected_and_does_not_disturb_others():
    receiver = Receiver("127.0.0.1", TOKEN)
    accepted: list[Stream] = []
    accepting = threading.Thread(target=lambda: accepted.append(receiver.accept(20)))
    accepting.start()
    with pytest.raises(TransferError):
        connect(receiver.address, "another token").receive()
    with socket.create_connection(receiver.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
    with connect(receiver.address, TOKEN) as donor:
        accepting.join(10)
        donor.send(ABOUT, {})
        assert accepted[0].receive() == (ABOUT, {})
    accepted[0].close()
    receiver.close()


def test_a_thousand_idle_connections_do_not_keep_a_donor_out(descriptors):
    """Strangers connect before the donor or with it, or stop in the middle of their handshake."""
    receiver = Receiver("127.0.0.1", TOKEN)
    idle = [socket.create_connection(receiver.address, 10) for _ in range(100)]
    idle[0].sendall(struct.pack(">I", 60_000) + b"half")
    accepted: list[Stream] = []
    accepting = threading.Thread(target=lambda: accepted.append(receiver.accept(30)))
    accepting.start()
    idle += [socket.create_connection(receiver.address, 10) for _ in range(900)]
    begun = time.monotonic()
    with connect(receiver.address, TOKEN) as donor:
        accepting.join(30)
        assert time.monotonic() - begun < 2
        donor.send(ABOUT, {})
        assert accepted[0].receive() == (ABOUT, {})
    assert still_open(idle) <= PENDING
    accepted[0].close()
    receiver.close()
    assert still_open(idle) == 0
    for sock in idle:
        sock.close()


def test_idle_connections_are_closed(monkeypatch):
    monkeypatch.setattr(handshakes, "SECONDS", 0.2)
    receiver = Receiver("127.0.0.1", TOKEN)
    idle = [socket.create_connection(receiver.address, 10) for _ in range(5)]
    with pytest.raises(TransferError, match="no peer has connected"):
        receiver.accept(1)
    assert still_open(idle) == 0
    receiver.close()


def test_a_proof_cannot_be_reflected_to_its_sender():
    """An end that echoes the joiner's messages has not proved that it knows the token."""
    receiver = Receiver("127.0.0.1", TOKEN)
    refused: list[BaseException] = []

    def accept():
        try:
            receiver.accept(2)
        except TransferError as error:
            refused.append(error)

    accepting = threading.Thread(target=accept)
    accepting.start()
    with socket.create_connection(receiver.address) as mirror:
        while data := mirror.recv(64):
            try:
                mirror.sendall(data)
            except OSError:
                break
    accepting.join(10)
    assert len(refused) == 1
    receiver.close()


@pytest.mark.parametrize(
    "header",
    [
        b"no message",
        b"{}",
        encode_body(Parcel(ABOUT, [TensorHeader("x", "object", [1])])),
        encode_body(Parcel(ABOUT, [TensorHeader("x", "float32", [-1])])),
        encode_body(Parcel(ABOUT, [TensorHeader("x", "float32", [1 << 50])])),
        encode_body(Parcel(ABOUT, [TensorHeader("x", "float32", ["1"])])),
        encode_body(Parcel(Kill(3), [])),
        encode_body(Kill(3)),
    ],
)
def test_an_invalid_header_ends_the_stream(streams, header):
    donor, joiner = streams
    donor._socket.sendall(struct.pack(">I", len(header)) + header)
    with pytest.raises(TransferError, match="invalid header"):
        joiner.receive()


def test_an_oversize_header_is_not_read(streams):
    donor, joiner = streams
    donor._socket.sendall(struct.pack(">I", 1 << 31))
    with pytest.raises(TransferError, match="2147483648 bytes"):
        joiner.receive()


def test_an_unsupported_dtype_is_named():
    left, right = socket.socketpair()
    with Stream(left, 5) as donor, right, pytest.raises(ValueError, match="cannot transfer dtype complex64"):
        donor.send(ABOUT, {"x": torch.zeros(2, dtype=torch.complex64)})
