"""The machines and the network that the tests of nodes stand on: what is cut is cut, and nothing of them stays."""

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
ASK = "import socket, sys; print(socket.create_connection((sys.argv[1], 5000), 1).recv(9).decode())"


def reaches(machine, other):
    ask = machine.run([sys.executable, "-c", ASK, other.address], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return ask.communicate()[0] == b"here\n"


def test_machines_reach_each_other_until_the_link_is_cut_and_again_when_it_is_healed():
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
        net.cut(a, c, one_way=True)  # its answers are lost
        assert not reaches(c, a) and reaches(b, a)


def test_a_packet_takes_the_time_that_it_is_told():
    with network.Network() as net:
        a, b = net.machine("a"), net.machine("b")
        a.run([sys.executable, "-c", ECHO], stderr=subprocess.DEVNULL)
        while not reaches(b, a):
            pass
        net.weather(delay=0.2)
        begun = time.monotonic()
        assert reaches(b, a)
        assert time.monotonic() - begun > 4 * 0.2, "two round trips: to connect, and to hear"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_of_machines_whose_test_was_killed(number):
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
