"""Machines and a network between them, on one machine: namespaces, and a switch in user space that can be told to fail.

    with Network() as network:
        a, b = network.machine("a"), network.machine("b")
        a.run(["ping", "-c1", b.address])        # subprocess.Popen in that machine
        network.cut(a, b)                        # in both directions; one_way=True: what a sends to b
        network.heal()
        network.weather(delay=0.02, loss=0.01)   # seconds one way, share of packets
        network.far(b, 0.05)                     # seconds one way between b and all others
        b.kill()                                 # everything that runs on it, at once

A machine is a network, process and mount namespace, held by one process (`machine.py`): when that dies the kernel
ends all others in it and takes the namespaces away, so nothing can stay behind, however a test ends. Its only interface
beside loopback is a TUN device, whose other end is the switch: a packet that is dropped there leaves no trace, as on a
network that fails, and no reset answers it. The kernel's own means (bridges, tc netem) are not needed.
"""

from __future__ import annotations

import heapq
import os
import random
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_HOLDER = Path(__file__).with_name("machine.py")
_PREFIX = "10.77.0."


TOOLS = ("unshare", "nsenter", "setpriv")


def missing() -> str | None:
    """Why there can be no machines here; None if there can."""
    if not all(map(shutil.which, TOOLS)):
        return f"needs {', '.join(TOOLS)} (apt-get install util-linux)"
    try:
        with Network() as network:
            network.machine("try")
    except (OSError, RuntimeError) as error:
        return f"needs namespaces and /dev/net/tun, as root: {error}"
    return None


class Machine:
    """address: numeric; holder: the process id that stands for all of its namespaces."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number, self.address = name, number, f"{_PREFIX}{number}"
        ours, theirs = socket.socketpair()
        namespaces = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        command = [
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            *namespaces,
            sys.executable,
            "-I",
            "-S",
            str(_HOLDER),
            self.address,
            name,
        ]
        with ours, theirs:
            self._outer = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            theirs.close()
            ready, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
        if not ready:
            _, errors = self._outer.communicate()
            raise RuntimeError(errors.strip().splitlines()[-1])
        self.wire = descriptors[0]
        self.holder = int(Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text())
        self._started: list[subprocess.Popen[Any]] = []

    def run(self, command: Sequence[str | Path], **how: Any) -> subprocess.Popen[Any]:
        """Starts a command on this machine."""
        inside = ["nsenter", f"--target={self.holder}", "--net", "--pid", "--mount", "--uts"]
        inside += ["setpriv", "--pdeathsig=KILL"]  # nsenter waits for a child: killed with it
        process = subprocess.Popen([*inside, *map(str, command)], **how)
        self._started.append(process)
        return process

    def kill(self) -> None:
        """Ends all its processes with SIGKILL; their connections are reset, unless the network was cut before."""
        self._outer.kill()
        self._outer.wait()
        assert self._outer.stderr is not None
        self._outer.stderr.close()
        for process in self._started:
            process.wait()


class Network:
    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self._cut: set[tuple[int, int]] = set()  # (from, to), by number
        self._delay, self._loss = 0.0, 0.0
        self._far: dict[int, float] = {}  # by number
        self._random = random.Random(7)
        self._wake, self._waker = os.pipe()
        self._over = False
        self._thread = threading.Thread(target=self._switch, name="switch", daemon=True)
        self._thread.start()

    def machine(self, name: str) -> Machine:
        """A new machine, connected to all others."""
        machine = Machine(name, len(self.machines) + 1)
        self.machines = [*self.machines, machine]
        os.write(self._waker, b"m")
        return machine

    def cut(self, a: Machine, *others: Machine, one_way: bool = False) -> None:
        """No packet passes any more between a and the others (one way: from a to them); by default all others."""
        for other in others or [m for m in self.machines if m is not a]:
            self._cut |= {(a.number, other.number)} | (set() if one_way else {(other.number, a.number)})

    def heal(self) -> None:
        self._cut = set()

    def weather(self, delay: float = 0.0, loss: float = 0.0) -> None:
        """delay: seconds that a packet takes one way; loss: the share of packets that do not arrive."""
        self._delay, self._loss = delay, loss

    def far(self, machine: Machine, delay: float) -> None:
        """delay: seconds more that every packet from and to this machine takes one way."""
        self._far = {**self._far, machine.number: delay}

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        for machine in self.machines:
            machine.kill()
        self._over = True
        os.write(self._waker, b"e")
        self._thread.join()
        for descriptor in (self._wake, self._waker, *(m.wire for m in self.machines)):
            os.close(descriptor)

    def _switch(self) -> None:
        """IPv4 packets from one TUN device to another, by their destination."""
        late: list[tuple[float, int, int, bytes]] = []  # (due, order, to, packet)
        order = 0
        while not self._over:
            wires = {m.wire: m for m in self.machines}
            to_wire = {m.number: m.wire for m in self.machines}
            wait = max(0.0, late[0][0] - time.monotonic()) if late else None
            readable, _, _ = select.select([self._wake, *wires], [], [], wait)
            for descriptor in readable:
                if descriptor == self._wake:
                    os.read(self._wake, 64)
                    continue
                packet = _read(descriptor)
                to = packet[19] if packet[:1] and packet[0] >> 4 == 4 else 0
                if to not in to_wire or (wires[descriptor].number, to) in self._cut:
                    continue
                if self._loss and self._random.random() < self._loss:
                    continue
                far = self._far
                if delay := self._delay + far.get(wires[descriptor].number, 0.0) + far.get(to, 0.0):
                    heapq.heappush(late, (time.monotonic() + delay, order, to, packet))
                    order += 1
                else:
                    _write(to_wire[to], packet)
            while late and late[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(late)
                _write(to_wire[to], packet)


def _read(wire: int) -> bytes:
    with suppress(OSError):  # its machine is gone
        return os.read(wire, 1 << 16)
    return b""


def _write(wire: int, packet: bytes) -> None:
    with suppress(OSError):  # its machine is gone, or its queue is full: a lost packet
        os.write(wire, packet)
