"""The simulated machines and network of the node tests: faults have the intended effects and leave nothing behind."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from . import network

_missing = network.missing()
pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(_missing is not None, reason=str(_missing))]
ECHO = """
import socket
with socket.create_server(("", 5000)) as server:
    while True:
        connection, _ = server.accept()
        connection.sendall(b"here")
        connection.close()
"""
KEEP = """
import socket
with socket.create_server(("", 5000)) as server:
    kept = []
    while True:
        kept.append(server.accept())
"""
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 5000), 1).recv(9).decode())"


def reaches(machine, other):
    ask = machine.run([sys.executable, "-c", ASK, other.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return ask.communicate()[0] == b"here\n"


def test_machines_cannot_reach_each_other_while_their_link_is_cut():
    with network.Network() as net:
        a, b, c = (net.machine(name) for name in "abc")
        for machine in (a, b):
            machine.run([sys.executable, "-c", ECHO], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not (reaches(c, a) and reaches(c, b)):
            assert time.monotonic() < deadline
        net.cut(a, b)
        assert not reaches(b, a) and not reaches(a, b)
        assert reaches(c, a) and reaches(c, b)
        net.heal()
        assert reaches(b, a)
        net.cut(a, c, one_way=True)  # the answers of a are lost
        assert not reaches(c, a) and reaches(b, a)


@pytest.mark.slow
def test_packets_are_delayed_as_configured():
    with network.Network() as net:
        a, b = net.machine("a"), net.machine("b")
        a.run([sys.executable, "-c", ECHO], stderr=subprocess.DEVNULL)
        while not reaches(b, a):
            pass
        net.weather(delay=0.2)
        begun = time.monotonic()
        assert reaches(b, a)
        assert time.monotonic() - begun > 4 * 0.2, "expected two round trips: connection and answer"


@pytest.mark.slow
def test_a_rejecting_link_refuses_new_connections_and_resets_active_ones():
    talk = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), 5) as connection:
    print("connected", flush=True)
    try:
        while connection.send(b"more"):
            time.sleep(0.01)
    except OSError as error:
        print(error.errno, flush=True)
"""
    with network.Network() as net:
        a, b = net.machine("a"), net.machine("b")
        a.run([sys.executable, "-c", KEEP], stderr=subprocess.DEVNULL)
        asked = [sys.executable, "-c", talk, a.address]
        how = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while (talker := b.run(asked, **how)).stdout.readline() != "connected\n":
            talker.communicate()
        net.reset(a, b, seconds=0.5)
        begun = time.monotonic()
        output, errors = talker.communicate()
        assert output in (f"{errno.ECONNRESET}\n", f"{errno.EPIPE}\n"), (output, errors)
        _, errors = b.run(asked, **how).communicate()
        assert time.monotonic() - begun < 0.45, "the machine is too slow for this test"
        assert "ConnectionRefusedError" in errors
        time.sleep(0.5)
        talker = b.run(asked, **how)
        assert talker.stdout.readline() == "connected\n", "the link does not work again"
        net.reset(a, b)
        talker.communicate()
        net.heal()
        assert b.run(asked, **how).stdout.readline() == "connected\n"


@pytest.mark.slow
def test_packets_are_reordered_and_lost_as_configured():
    count = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.bind(("", 5000))
    print("bound", flush=True)
    sock.settimeout(2)
    try:
        while True:
            print(int(sock.recv(9)), flush=True)
    except TimeoutError:
        pass
"""
    say = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    for number in range(500):
        sock.sendto(b"%d" % number, (sys.argv[1], 5000))
        time.sleep(0.001)
"""
    with network.Network() as net:
        a, b = net.machine("a"), net.machine("b")
        net.weather(delay=0.05, loss=0.05, reorder=0.1)
        counts = a.run([sys.executable, "-c", count], stdout=subprocess.PIPE, text=True)
        assert counts.stdout.readline() == "bound\n"
        b.run([sys.executable, "-c", say, a.address]).wait()
        came = [int(line) for line in counts.communicate()[0].split()]
    assert 450 < len(came) < 495, len(came)
    late = sum(after < before for before, after in itertools.pairwise(came))
    assert 15 < late < 100, late


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_the_machines_of_a_killed_test_leave_nothing_behind(number):
    script = """
import os, sys, time
from tests.failures.network import Network
with Network() as net:
    machine = net.machine("a")
    machine.run(["sleep", "1000"])
    print(machine.holder, flush=True)
    time.sleep(1000)
"""
    here = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script], cwd=here, stdout=subprocess.PIPE, text=True) as process:
        holder = psutil.Process(int(process.stdout.readline()))
        seen = psutil.Process(process.pid).children(recursive=True)
        assert holder in seen
        os.kill(process.pid, number)
    _, alive = psutil.wait_procs(seen, 10)
    assert alive == []
