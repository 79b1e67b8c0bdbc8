"""A real etcd server for tests: one member, with its data in a folder. It is killed at the end of the block.

with EtcdServer(tmp_path) as server:
    server.endpoint                         # "127.0.0.1:PORT"
    server.stop(); server.start()           # restarts on the same port with the same data
"""

import shutil
import subprocess
import time

import pytest

from recycle_pp.testing.ports import free_ports

needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (apt-get install etcd-server)")


class EtcdServer:
    """One etcd process. machine: the simulated machine that runs it (tests/failures/network.py); None: this one."""

    def __init__(self, folder, machine=None):
        self._folder, self._machine = folder, machine
        self._host = "127.0.0.1" if machine is None else machine.address
        self._port, self._peers = (2379, 2380) if machine else (port := free_ports(2), port + 1)
        self.endpoint = f"{self._host}:{self._port}"
        self._log = folder / "etcd.log"
        self._process = None

    def start(self):
        client, peer = f"http://{self._host}:{self._port}", f"http://{self._host}:{self._peers}"
        command = ["etcd", "--data-dir", self._folder / "etcd", "--listen-client-urls", client]
        command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        start = subprocess.Popen if self._machine is None else self._machine.run
        self._log.touch()
        said = self._log.stat().st_size
        with open(self._log, "a") as log:
            self._process = start(list(map(str, command)), stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while "ready to serve client requests" not in self._log.read_text()[said:]:
            assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.05)

    def stop(self):
        self._process.kill()
        self._process.wait()

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.stop()
