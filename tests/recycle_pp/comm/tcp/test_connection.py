"""Messages over one connection: matched by generation and tag in any order, until the peer is gone."""

import socket
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.comm.tcp.connection import FRAME, Connection, ConnectionLost
from recycle_pp.comm.waiting import Pool

pytestmark = pytest.mark.timeout(60)
LARGE = 8_000_000  # floats: more than the kernel buffers for a connection


def two_ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


@pytest.fixture
def ends():
    here, there = (Connection(sock, Pool()) for sock in two_ends())
    yield here, there
    here.close()
    there.close()


def done(job, seconds: float = 10.0):
    """The error of the job, or None if it succeeds."""
    assert job.wait(seconds), "not finished"
    return job.error


def of(number: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(number))


@settings(max_examples=30)
@given(data=st.data())
def test_every_message_reaches_its_tensor_in_any_order_of_sends_and_receives(data):
    messages = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([0, 1, 1000, 100_000])), max_size=12)
    )
    sizes: dict = {}
    for generation, tag, size in messages:
        sizes.setdefault((generation, tag), []).append(size)
    receives = data.draw(st.permutations([key for key, each in sizes.items() for _ in each]))
    late = data.draw(st.integers(0, len(receives)))  # receives posted after all sends
    here, there = (Connection(sock, Pool()) for sock in two_ends())
    turn = {key: iter(each) for key, each in sizes.items()}
    buffers: dict = {key: [] for key in sizes}
    jobs = []

    def post(key):
        buffer = torch.empty(next(turn[key]))
        buffers[key].append(buffer)
        jobs.append(there.receive(buffer, *key))

    for key in receives[late:]:
        post(key)
    sent: dict = {key: [] for key in sizes}
    for number, (generation, tag, size) in enumerate(messages):
        sent[generation, tag].append(of(number, size))
        jobs.append(here.send(sent[generation, tag][-1], generation, tag))
    for key in receives[:late]:
        post(key)
    assert [done(job) for job in jobs] == [None] * len(jobs)
    for key in sizes:
        assert all(map(torch.equal, buffers[key], sent[key]))
    here.close()
    there.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_dtype_arrive_bit_by_bit(ends, dtype):
    tensor, buffer = torch.ones(3, 5).to(dtype), torch.zeros(3, 5).to(dtype)
    done(ends[0].send(tensor, 0, 1))
    assert done(ends[1].receive(buffer, 0, 1)) is None and torch.equal(tensor, buffer)


def test_data_beyond_the_kernels_buffer_is_sent_in_order_by_another_thread(ends):
    start = time.perf_counter()
    jobs = [ends[0].send(of(k, LARGE), 0, 1) for k in range(3)]
    jobs.append(ends[0].send(of(7), 0, 1))
    assert time.perf_counter() - start < 2  # no send waits for the receiver; allows for a busy machine
    buffers = [torch.empty(LARGE) for _ in range(3)] + [torch.empty(4)]
    jobs += [ends[1].receive(buffer, 0, 1) for buffer in buffers]
    assert [done(job, 30) for job in jobs] == [None] * 8
    assert [buffer[-1].item() for buffer in buffers] == [0, 1, 2, 7]


def test_messages_of_an_ended_generation_are_read_and_dropped(ends):
    here, there = ends
    posted = there.receive(torch.empty(4), 3, 1)
    here.send(of(1), 3, 2)
    there.end(3)
    here.send(of(2, LARGE), 3, 1)
    here.send(of(3), 4, 1)
    buffer = torch.empty(4)
    assert done(there.receive(buffer, 4, 1)) is None and buffer.tolist() == [3.0] * 4
    assert isinstance(done(there.receive(torch.empty(4), 3, 1)), ConnectionLost)
    assert not posted.wait(0.01)  # only the end of the generation ends the wait
    assert not there._posted and not there._early


def test_a_message_of_another_size_is_an_error_and_the_next_one_arrives(ends):
    here, there = ends
    posted = there.receive(torch.empty(5), 0, 1)
    here.send(of(1), 0, 1)
    here.send(of(2), 0, 1)
    assert "received 16 bytes, expected 20" in str(done(posted))
    buffer = torch.empty(4)
    assert done(there.receive(buffer, 0, 1)) is None and buffer[0] == 2
    here.send(of(1), 0, 2)
    here.send(of(1), 0, 3)
    done(there.receive(torch.empty(4), 0, 3))  # the other message has arrived, too
    assert "received 16 bytes, expected 20" in str(done(there.receive(torch.empty(5), 0, 2)))


@pytest.mark.parametrize("after", [0, 5, FRAME.size, FRAME.size + 8])
def test_all_operations_fail_when_the_peer_dies_in_the_middle_of_a_frame(after):
    mine, theirs = two_ends()
    connection = Connection(mine, Pool())
    jobs = [connection.receive(torch.empty(4), 0, tag) for tag in (1, 2)]
    theirs.sendall((FRAME.pack(0, 1, 16) + bytes(16))[:after])
    theirs.close()
    assert all(isinstance(done(job), ConnectionLost) for job in jobs)
    assert isinstance(done(connection.receive(torch.empty(4), 0, 3)), ConnectionLost)
    assert isinstance(done(connection.send(torch.empty(4), 0, 3)), ConnectionLost)


def test_messages_that_arrived_before_the_end_can_still_be_received():
    mine, theirs = two_ends()
    connection = Connection(mine, Pool())
    theirs.sendall(FRAME.pack(0, 1, 16) + bytes(of(9).numpy().tobytes()))
    theirs.close()
    assert isinstance(done(connection.receive(torch.empty(4), 0, 2)), ConnectionLost)
    buffer = torch.empty(4)
    assert done(connection.receive(buffer, 0, 1)) is None and buffer[0] == 9


def test_a_send_to_a_paused_peer_ends_with_the_connection():
    mine, theirs = two_ends()  # no thread reads from `theirs`
    connection = Connection(mine, Pool())
    jobs = [connection.send(of(1, LARGE), 0, 1) for _ in range(2)]
    assert not jobs[0].wait(0.2)
    connection.close()
    assert all(isinstance(done(job), ConnectionLost) for job in jobs)
    theirs.close()


def test_an_invalid_frame_ends_the_connection():
    mine, theirs = two_ends()
    connection = Connection(mine, Pool())
    job = connection.receive(torch.empty(4), 0, 1)
    theirs.sendall(FRAME.pack(0, 1, -5))
    assert "invalid message size: -5 bytes" in str(done(job))
    theirs.close()


def test_a_closed_connection_leaves_no_thread():
    others = set(threading.enumerate())  # threads of earlier tests may still be ending
    here, there = (Connection(sock, Pool()) for sock in two_ends())
    ours = set(threading.enumerate()) - others
    here.close()
    there.close()
    for thread in ours:
        thread.join(10)
    assert len(ours) == 2 and not any(thread.is_alive() for thread in ours)
    assert here._socket.fileno() == there._socket.fileno() == -1


def arrives(connection, count):
    """Waits until this number of bytes has arrived. False if there are more."""
    deadline = time.monotonic() + 10
    while connection.received < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return connection.received == count


def test_the_received_bytes_grow_while_a_long_message_arrives():
    near, far = two_ends()
    here = Connection(near, Pool())
    data = torch.zeros(LARGE)
    pending = here.receive(data, 0, 1)
    far.sendall(FRAME.pack(0, 1, data.nbytes))
    for sent in range(FRAME.size, FRAME.size + 3000, 1000):
        assert arrives(here, sent)
        far.sendall(bytes(1000))
    assert not pending.wait(0)
    far.sendall(bytes(data.nbytes - 3000))
    assert done(pending) is None and here.received == FRAME.size + data.nbytes
    here.close()
    far.close()
