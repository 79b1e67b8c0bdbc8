"""Facts about Gloo that `comm.torch_internals` relies on, one per test. A failure names the fact that has changed."""

import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.torch_internals import (
    MAX_TAG,
    address_key,
    answer_for_missing,
    gloo_backend,
    listening_address,
    shutdown_connections,
)

from .torch_facts import Member, connected_pair, everybody_sums, fact, outcome_of, pair, sockets, wait_for

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def group():
    return connected_pair()


# -- Gloo: listening addresses -----------------------------------------------------------------------------------------


@fact("the constructor of a lazy Gloo back end waits for no other member and opens only its listener")
def test_a_lazy_back_end_waits_for_no_member():
    before = sockets()
    member = Member(dist.HashStore(), 0, 3)
    assert len(sockets() - before) == 1
    del member


@fact("a Gloo back end publishes its listening address under '0/<rank>', in the format that listening_address reads")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_back_end_publishes_its_address(host):
    store = dist.HashStore()
    try:
        backend = gloo_backend(store, 0, 1, host, 5.0)
    except RuntimeError:
        pytest.skip("this machine has no IPv6")
    address = listening_address(store.get(address_key(0)))
    assert address[0] == host
    socket.create_connection(address).close()
    del backend


@pytest.mark.parametrize("value", [b"", b"\x02", b"\x02" + bytes(7) + b"vm" + bytes(200), bytes(300)])
def test_an_invalid_gloo_address_is_rejected(value):
    with pytest.raises(ValueError, match="not the address of a Gloo group"):
        listening_address(value)


# -- Gloo: connections -------------------------------------------------------------------------------------------------


@fact("a receive from any source starts every connection of a lazy Gloo back end and waits for none")
def test_all_connections_are_started_at_once():
    store = dist.HashStore()
    members = [Member(store, rank, 3) for rank in range(3)]
    before = sockets()
    for member in members:
        member.connect()
    deadline = time.monotonic() + 5
    while len(sockets() - before) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(sockets() - before) == 6  # both ends of three connections


@fact("posting a receive on a lazy Gloo back end blocks until the peer has used the same pair")
def test_posting_a_receive_connects_and_blocks():
    low, high = sorted(pair(), key=lambda member: socket.htons(member.address[1]))
    posting = outcome_of(lambda: low.backend.recv([torch.empty(4)], high.rank, 5))
    time.sleep(0.2)
    assert not posting
    high.connect()
    assert wait_for(posting)[0] is None


@fact("in a Gloo group the member with the higher address, compared bytewise, connects to the other")
def test_the_higher_address_connects():
    low, high = sorted(pair(), key=lambda member: socket.htons(member.address[1]))
    low.connect()
    time.sleep(0.1)
    assert shutdown_connections(low.address, {high.address}) == 0
    high.connect()
    time.sleep(0.1)
    assert shutdown_connections(high.address, {low.address}) >= 1


@fact("each connection of a Gloo group has the listening address of one member at exactly one end")
def test_the_connections_of_a_group_can_be_identified(group):
    store = dist.HashStore()
    others = [Member(store, rank, 2) for rank in range(2)]
    for member in others:
        member.connect()
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        control, _ = server.accept()
        assert shutdown_connections(group[0].address, group[0].peers()) == 1
        client.sendall(b"still here")
        assert control.recv(100) == b"still here"
        client.close()
        control.close()
    socket.create_connection(group[0].address).close()  # Gloo's listener answers
    everybody_sums(others)


# -- Gloo: messages ----------------------------------------------------------------------------------------------------


@fact("Gloo sends messages with any tag up to 2**31 - 1 and keeps the order of those with the same tag")
@pytest.mark.parametrize("tag", [0, MAX_TAG - 1])
def test_messages_of_one_tag_keep_their_order(group, tag):
    buffers = [torch.empty(1) for _ in range(5)]
    receives = [group[1].backend.recv([buffer], 0, tag) for buffer in buffers]
    sends = [group[0].backend.send([torch.full((1,), float(k))], 1, tag) for k in range(5)]
    for work in [*receives, *sends]:
        work.wait()
    assert [buffer.item() for buffer in buffers] == [0, 1, 2, 3, 4]


@fact("a Gloo message may never arrive if the sender drops its work object")
def test_a_send_is_lost_with_its_work(group):
    group[0].backend.send([torch.ones(4)], 1, 5)  # drops the work object
    time.sleep(0.1)
    receiving = group[1].backend.recv([torch.empty(4)], 0, 5)
    result = outcome_of(receiving.wait)
    time.sleep(0.5)
    lost = not result
    shutdown_connections(group[0].address, group[0].peers())
    assert lost


@fact("is_completed() of a Gloo message is False until wait() is called")
def test_only_waiting_completes_a_message(group):
    buffer = torch.zeros(4)
    receiving = group[1].backend.recv([buffer], 0, 5)
    group[0].backend.send([torch.ones(4)], 1, 5).wait()
    time.sleep(0.1)
    assert not receiving.is_completed() and buffer.sum() == 4
    receiving.wait()


# -- Gloo: ending blocked operations -----------------------------------------------------------------------------------


@fact("Gloo has no abort: abort() and shutdown() of a back end do not end blocked operations")
def test_an_abort_does_not_end_a_blocked_operation(group):
    result = group[0].blocks_in_a_receive()
    for name in ("abort", "shutdown"):
        try:
            getattr(group[0].backend, name)()
        except (RuntimeError, AttributeError):
            continue
    time.sleep(0.3)
    blocked = not result
    shutdown_connections(group[0].address, group[0].peers())
    assert blocked


@fact("a blocked Gloo operation raises RuntimeError within milliseconds when its connection is shut down")
def test_a_blocked_operation_raises_when_its_connection_is_shut_down(group):
    result = group[0].blocks_in_a_receive()
    start = time.monotonic()
    shutdown_connections(group[0].address, group[0].peers())
    error, at = wait_for(result)
    assert error is not None and at - start < 0.5


@fact("Gloo's handshake is the peer's rank in eight bytes, and a wait fails if the connection closes after it")
def test_a_wait_for_a_member_that_never_connects_can_be_failed():
    """The thread waits while it posts a receive, and there is no socket to shut down."""
    low, _ = sorted(pair(), key=lambda member: socket.htons(member.address[1]))
    result = outcome_of(lambda: low.backend.recv([torch.empty(4)], 1 - low.rank, 5))
    time.sleep(0.2)
    assert not result and shutdown_connections(low.address, low.peers()) == 0
    answer_for_missing(low.address, [1 - low.rank])
    error, _ = wait_for(result)
    if error is None:  # the receive was posted just before the connection closed
        result = outcome_of(lambda: low.backend.recv([torch.empty(4)], 1 - low.rank, 6).wait())
        assert wait_for(result)[0] is not None


SHUT_A_LISTENER = """
import socket, time, torch.distributed as dist
from recycle_pp.comm.torch_internals import _sockets, address_key, gloo_backend, listening_address
store = dist.HashStore()
backend = gloo_backend(store, 0, 2, "127.0.0.1", 5.0)
for sock in _sockets():
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.shutdown(socket.SHUT_RDWR)
time.sleep(1)
print("alive")
"""


@fact("shutting down Gloo's listening socket ends the process")
def test_a_listener_must_not_be_shut_down():
    done = subprocess.run([sys.executable, "-c", SHUT_A_LISTENER], capture_output=True, text=True, timeout=50)
    assert done.returncode != 0 and "alive" not in done.stdout


@fact("Gloo finds its members through a store written in Python")
def test_gloo_uses_a_store_of_ours():
    stores: list[ControlStore] = []

    def publish(key, value):
        for store in stores:
            store.deliver(key, value)

    stores += [ControlStore(publish) for _ in range(2)]
    members = [Member(dist.PrefixStore("7/world", store), rank, 2) for rank, store in enumerate(stores)]
    for member in members:
        member.connect()
    everybody_sums(members)
