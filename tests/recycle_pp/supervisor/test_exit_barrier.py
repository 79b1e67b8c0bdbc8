"""The wait of torchrun's agents at their exit is shortened through their connections, or announced if it cannot be."""

import os
import socket
import subprocess
import sys

import pytest

from recycle_pp.supervisor import exit_barrier
from recycle_pp.supervisor.foreign_sockets import connections_to
from recycle_pp.wire.launch import Launch

LAUNCH = Launch(rank=2, world=6, local_rank=0, local_world=2, master_address="10.0.0.1", master_port=29500, agents=3)
TALK = """
import socket, sys
other = socket.socket()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    print("connected", flush=True)
    while True:
        keeps = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        connection.sendall(b"y" if keeps else b"n")
        if not connection.recv(1):
            break
"""


def test_a_connection_of_another_process_is_found_and_changed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        command = [sys.executable, "-c", TALK, str(port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"connected\n"
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1) == b"n"
                try:
                    (found,) = connections_to(process.pid, port)
                except PermissionError:
                    process.kill()
                    pytest.skip("needs the right to trace processes")
                found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                found.close()
                assert list(connections_to(process.pid, 1)) == []
                connection.sendall(b"?")
                assert connection.recv(1) == b"y"


@pytest.mark.parametrize(
    ("error", "printed"), [(TimeoutError(), True), (ConnectionRefusedError(), False), (None, False)]
)
def test_a_wait_that_cannot_be_shortened_is_announced_if_the_stores_machine_does_not_answer(
    error, printed, monkeypatch, capsys
):
    def refuse(pid, port):
        assert (pid, port) == (os.getppid(), 29500)
        raise PermissionError

    def connect(place, seconds):
        assert place == ("10.0.0.1", 29500)
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(exit_barrier, "connections_to", refuse)
    monkeypatch.setattr(exit_barrier.socket, "create_connection", connect)
    exit_barrier.limit_wait(LAUNCH)
    assert (
        "torchrun may wait up to 16 minutes for node 0: 10.0.0.1 does not answer" in capsys.readouterr().err
    ) == printed
