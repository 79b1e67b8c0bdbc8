"""Connections to a running job without its token are rejected and do not disturb the job."""

import contextlib
import random
import socket
import struct

import psutil
import pytest

from recycle_pp.comm.transfer import TransferError
from recycle_pp.comm.transfer import connect as connect_transfer
from recycle_pp.wire.authentication import Refused
from recycle_pp.wire.connection import Channel
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.handshake import Response, WorkerHello
from recycle_pp.wire.messages.states import StatePart
from recycle_pp.wire.messages.supervisors import Death, Died

from .harness import Case

HELLO = WorkerHello(rank=0, incarnation=0, moved=False)
FORGED = Died(0, Death("signal", "SIGKILL", at=0.0), asked=False)


def payloads():
    """Garbage, truncated messages, wrong lengths, other protocols, deeply nested and forged messages."""
    rng = random.Random(5)
    yield from (rng.randbytes(n) for n in (1, 3, 4, 5, 100, 70000))
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."  # a pickle
    yield struct.pack(">I", 0xFFFFFFFF)
    yield struct.pack(">I", 1 << 20) + b"x" * 1000
    yield struct.pack(">I", 5) + b"{}{}{"
    yield struct.pack(">I", 60000) + b"\x91" * 60000
    yield encode(FORGED)
    yield encode(Response(bytes(32), encode(HELLO)[4:], bytes(32))) + encode(FORGED)
    yield encode(Response(["x"], {"a": 1}, None))


def ports(job):
    """All ports on which processes of the job listen."""
    found = set()
    for process in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found


def attack(address, payload):
    with contextlib.suppress(OSError), socket.create_connection(address, 2) as sock:
        sock.settimeout(0.05)
        sock.sendall(payload)
        with contextlib.suppress(OSError):
            sock.recv(1 << 16)


def coordinator_port(job):
    (found,) = {
        c.laddr for c in psutil.Process(job.supervisors()[0]).net_connections("tcp") if c.status == psutil.CONN_LISTEN
    }
    return found


@pytest.mark.slow  # quick counterpart: the garbage tests of each reader in tests/recycle_pp/wire
def test_garbage_at_every_port_changes_nothing(runs):
    attacked = []

    def fuzz(job):
        job.wait_for_event("started", 60)
        for address in sorted(ports(job)):
            assert address[0] == "127.0.0.1", "a job on one node must listen on loopback only"
            attacked.append(address)
            for payload in payloads():
                attack(address, payload)

    case = Case("under attack", "2x2", steps=60, deaths=0, bound=90)
    outcome = runs.of(case, "attacks", meanwhile=fuzz)
    runs.check_exact(outcome)
    assert len(attacked) >= 5, "expected the coordinator's port, and one of each worker for state streams"
    assert not outcome.all("plan_adopted")[1:], "the attack caused a new generation"


@pytest.mark.slow  # quick counterpart: tests/recycle_pp/wire/test_authentication.py
def test_a_wrong_token_and_a_flood_are_rejected(runs):
    def flood(job):
        job.wait_for_event("started", 60)
        host, port = coordinator_port(job)
        for _ in range(5):
            with pytest.raises(Refused):
                Channel.connect(host, port, "0" * 64, HELLO)
        held = []
        for _ in range(200):  # connections that send nothing
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((host, port), 2))
        for address in ports(job) - {(host, port)}:
            with pytest.raises(TransferError), connect_transfer(address, "0" * 64, timeout=2.0) as stream:
                stream.send(StatePart(session=0, step=0, start=0, stop=1), {})
        for sock in held:
            sock.close()

    case = Case("under a flood", "2x2", steps=60, deaths=0, bound=90)
    outcome = runs.of(case, "attacks", meanwhile=flood)
    runs.check_exact(outcome)
    assert "refused a connection from 127.0.0.1: its RECYCLE_TOKEN differs from this job's" in outcome.output
