"""Breaking a Gloo group's connections: all of them, and no others."""

import os
import socket
import stat
import threading
import time

import pytest
import torch
import torch.distributed as dist

from recycle_pp.comm.gloo.abort import answer_for_the_missing, gloo_address, nowhere, shutdown_sockets
from recycle_pp.comm.gloo.mesh import MAX_SLOT, gloo_backend

pytestmark = pytest.mark.timeout(60)


class Member:
    """One rank of a Gloo group; several live in this process, as threads would."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.store, self.rank, self.size = store, rank, size
        self.backend = gloo_backend(store, rank, size, "127.0.0.1", 60.0)
        self.address = gloo_address(store.get(f"0/{rank}"))

    def peers(self) -> set:
        return {gloo_address(self.store.get(f"0/{k}")) for k in range(self.size)} - {self.address}

    def connect(self) -> None:
        self.kick = self.backend.recv_anysource([torch.empty(1)], MAX_SLOT)


@pytest.fixture
def group():
    store = dist.HashStore()
    members = [Member(store, rank, 2) for rank in range(2)]
    for member in members:
        member.connect()
    works = [member.backend.allreduce([torch.ones(1)]) for member in members]
    for work in works:
        work.wait()
    return members


def sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def outcome_of(function) -> list:
    """Runs it in a thread; the list gets its error, or None, and the time."""
    result: list = []

    def run() -> None:
        try:
            function()
            result.append((None, time.monotonic()))
        except RuntimeError as error:
            result.append((error, time.monotonic()))

    threading.Thread(target=run, daemon=True).start()
    return result


def wait_for(result: list, seconds: float = 5.0) -> tuple:
    deadline = time.monotonic() + seconds
    while not result and time.monotonic() < deadline:
        time.sleep(0.001)
    assert result, "still blocked"
    return result[0]


def test_who_blocks_in_a_receive_raises_within_milliseconds(group):
    receive = group[0].backend.recv([torch.empty(4)], 1, 5)
    result = outcome_of(receive.wait)
    time.sleep(0.1)
    start = time.monotonic()
    assert shutdown_sockets(group[0].address, group[0].peers()) == 1
    error, at = wait_for(result)
    assert error is not None and at - start < 0.5


def test_other_connections_and_all_listeners_stay(group):
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        control, _ = server.accept()
        shutdown_sockets(group[0].address, group[0].peers())
        client.sendall(b"still here")
        assert control.recv(100) == b"still here"
        socket.create_connection(server.getsockname()).close()
        socket.create_connection(group[0].address).close()  # and Gloo's own listener answers
        client.close()
        control.close()


def test_another_group_of_the_same_process_stays(group):
    store = dist.HashStore()
    others = [Member(store, rank, 2) for rank in range(2)]
    for member in others:
        member.connect()
    shutdown_sockets(group[0].address, group[0].peers())
    works = [member.backend.allreduce([torch.ones(1)]) for member in others]
    for work in works:
        work.wait()


def test_who_waits_for_a_member_that_never_connects_raises_too():
    """It waits inside the posting of a receive; there is no socket that could be shut."""
    store = dist.HashStore()
    low, high = sorted((Member(store, k, 2) for k in range(2)), key=lambda member: socket.htons(member.address[1]))
    del high  # the one with the higher address, byte by byte, would have connected
    result = outcome_of(lambda: low.backend.recv([torch.empty(4)], 1 - low.rank, 5))
    time.sleep(0.2)
    assert not result and shutdown_sockets(low.address, low.peers()) == 0
    answer_for_the_missing(low.address, [1 - low.rank])
    error, _ = wait_for(result)
    assert error is None or isinstance(error, RuntimeError)
    if error is None:  # the post went through just before the connection closed
        result = outcome_of(lambda: low.backend.recv([torch.empty(4)], 1 - low.rank, 6).wait())
        assert wait_for(result)[0] is not None


def test_no_socket_is_opened_to_a_member_that_does_not_exist():
    store = dist.HashStore()
    member = Member(store, 0, 3)
    for rank in (1, 2):
        store.set(f"0/{rank}", nowhere(store.get("0/0")))
    before = sockets()
    member.connect()
    time.sleep(0.1)
    assert sockets() == before


@pytest.mark.parametrize("value", [b"", b"\x02", b"\x02" + bytes(7) + b"vm" + bytes(200), bytes(300)])
def test_what_is_no_gloo_address_is_refused(value):
    with pytest.raises(ValueError, match="not the address of a Gloo group"):
        gloo_address(value)


def test_addresses_of_both_families_are_read():
    for host in ("127.0.0.1", "::1"):
        store = dist.HashStore()
        try:
            gloo_backend(store, 0, 1, host, 5.0)
        except RuntimeError:
            pytest.skip("this machine has no IPv6")
        address = gloo_address(store.get("0/0"))
        assert address[0] == host and 0 < address[1] < 65536
