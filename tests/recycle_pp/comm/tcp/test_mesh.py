"""Members connect to each other, and reject other connections."""

import json
import socket
import threading
import time

import pytest
import torch

from recycle_pp.comm.handshakes import PENDING
from recycle_pp.comm.tcp import mesh as mesh_module
from recycle_pp.comm.tcp.connection import ConnectionLost
from recycle_pp.comm.tcp.mesh import HELLO, SECRET, SURE, Mesh
from recycle_pp.comm.tcp.reachability import Reachability
from recycle_pp.comm.waiting import Generation, LinkBroken, Pool
from tests.recycle_pp.comm.idle import still_open

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def meshes():
    made = [Mesh(rank, 4, "127.0.0.1", Pool()) for rank in range(3)]  # the fourth member is missing
    yield made
    for mesh in made:
        mesh.close()


def link(meshes) -> None:
    for mesh in meshes:
        mesh.link({other.rank: other.address for other in meshes if other is not mesh})
    for mesh in meshes:
        for other in meshes:
            assert other is mesh or mesh.linked(other.rank).wait(10)


def test_each_pair_has_one_connection_and_a_missing_member_none(meshes):
    link(meshes)
    pairs = [(frm, to) for frm in meshes for to in meshes if frm is not to]
    for frm, to in pairs:
        frm[to.rank].send(torch.full((1,), 10.0 * frm.rank + to.rank), 0, 1)
    for frm, to in pairs:
        buffer = torch.empty(1)
        assert to[frm.rank].receive(buffer, 0, 1).wait(10) and buffer.item() == 10 * frm.rank + to.rank
    assert meshes[0].linked(3) is None
    with pytest.raises(KeyError):
        meshes[0][3]


def closes(mesh: Mesh, hello: bytes) -> bool:
    host, port, _ = json.loads(mesh.address)
    with socket.create_connection((host, port), 10) as sock:
        sock.sendall(hello)
        try:
            sock.shutdown(socket.SHUT_WR)
            return sock.recv(1) == b""
        except OSError:  # the mesh closed the connection before it had read the whole hello
            return True


def test_a_connection_without_the_secret_is_closed(meshes):
    secret = bytes.fromhex(json.loads(meshes[0].address)[2])
    for hello in (b"", b"GET / HTTP/1.1\r\n\r\n" + bytes(20), HELLO.pack(1, bytes(SECRET)), HELLO.pack(9, secret)):
        assert closes(meshes[0], hello)
    link(meshes)  # none of the rejected connections has taken a member's place


def test_refused_connections_are_retried_and_reported_after_a_while(meshes):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    cut = threading.Event()
    reachability = Reachability(1.0, lambda ranks: cut.set() if ranks == [0] else None)
    made = [Mesh(1, 4, "127.0.0.1", Pool(), reachability) for _ in range(2)]
    host, _, secret = json.loads(meshes[0].address)
    begun = time.monotonic()
    for mesh in made:  # a mesh is replaced when links are renewed, but the timer of `reachability` keeps running
        mesh.link({0: json.dumps([host, port, secret]).encode()})
        job = mesh.linked(0)
        assert not job.wait(0.7)
        mesh.close()
    assert cut.wait(5) and 0.9 < time.monotonic() - begun < 3
    last = Mesh(1, 4, "127.0.0.1", Pool(), reachability)
    last.link({0: meshes[0].address})
    assert last.linked(0).wait(10) and reachability.failing(0) == 0
    last.close()


@pytest.mark.parametrize(("host", "tried"), [("127.0.0.2", True), ("127.0.0.1", False)])
def test_with_an_unreachable_member_all_on_its_machine_are_tried_unless_it_is_this_machine(host, tried, monkeypatch):
    """If each of 96 processes on a busy machine tried all others there, they would stay too busy to answer."""
    ports = []

    class Attempts(mesh_module.Attempts):
        def __init__(self, selector, address, reached):
            ports.append(address[1])
            super().__init__(selector, address, reached)

    with socket.create_server((host, 0)) as closed:
        gone = json.dumps([host, closed.getsockname()[1], "00"]).encode()
    peer, mesh = Mesh(1, 3, host, Pool()), Mesh(2, 3, "127.0.0.1", Pool())
    peer.link({2: mesh.address})
    mesh.link({0: gone, 1: peer.address})
    assert mesh.linked(1).wait(10)
    monkeypatch.setattr(mesh_module, "Attempts", Attempts)
    time.sleep(2 * SURE + 0.5)
    assert (json.loads(peer.address)[1] in ports) == tried
    mesh.close()
    peer.close()


def test_a_thousand_idle_connections_occupy_no_thread_and_block_no_member(meshes, descriptors):
    host, port, _ = json.loads(meshes[0].address)
    before = threading.active_count()
    idle = [socket.create_connection((host, port), 10) for _ in range(1000)]
    assert threading.active_count() <= before  # a thread of an earlier test may end
    link(meshes)
    deadline = time.monotonic() + 10
    while still_open(idle) > PENDING:
        assert time.monotonic() < deadline, still_open(idle)
        time.sleep(0.05)
    for sock in idle:
        sock.close()


def test_the_end_of_a_generation_does_not_mark_a_pending_connection_as_made(meshes):
    """Otherwise the next generation would use a connection that does not exist."""
    meshes[0].link({1: meshes[1].address})  # this end waits for the other to connect
    generation = Generation(0)
    threading.Timer(0.05, generation.end).start()
    with pytest.raises(LinkBroken, match="aborted"):
        generation.wait(meshes[0].linked(1))
    assert not meshes[0].linked(1).wait(0.05)
    meshes[1].link({0: meshes[0].address})
    assert Generation(1).wait(meshes[0].linked(1), 10) and meshes[0][1]


def test_a_closed_mesh_breaks_the_connections_of_its_peers(meshes):
    link(meshes)
    job = meshes[1][0].receive(torch.empty(1), 0, 1)
    meshes[0].close()
    assert job.wait(10) and isinstance(job.error, ConnectionLost)
    other = meshes[1][2].receive(torch.empty(1), 0, 1)
    meshes[2][1].send(torch.ones(1), 0, 1)
    assert other.wait(10) and other.error is None
