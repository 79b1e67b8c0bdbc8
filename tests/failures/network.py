"""Simulated machines, made of namespaces, and a network between them: a switch in user space that can inject faults.

    with Network() as network:
        a, b = network.machine("a"), network.machine("b")
        a.run(["ping", "-c1", b.address])        # subprocess.Popen on that machine
        network.cut(a, b)                        # drops packets in both directions; one_way=True: from a to b only
        network.reset(a, b, seconds=0.3)         # answers TCP packets between a and b with resets, for 0.3 s
        network.heal()                           # ends cuts and resets; delays and losses continue
        network.weather(delay=0.02, loss=0.01, reorder=0.1)  # one-way delay in seconds; shares of packets
        network.weather(rate=1e6)                # bytes per second on each directed link
        network.far(b, 0.05)                     # adds a one-way delay, seconds, between b and all others
        b.kill()                                 # kills all its processes at once

A machine is a network, process and mount namespace. One process, the holder (`machine.py`), keeps them alive. When it
dies, the kernel kills all other processes in the namespaces, so a test leaves no process behind, however it ends.
Besides loopback, a machine has one interface: a TUN device, connected to the switch. A cut drops packets silently.
Resets look like those of a firewall (`iptables -j REJECT --reject-with tcp-reset`). Bridges, tc netem and iptables are
not needed.
"""

from __future__ import annotations

import heapq
import math
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from recycle_pp.linux.processes import children_of, pid_namespace, process_status

_HOLDER = Path(__file__).with_name("machine.py")
_PREFIX = "10.77.0."
_TCP, _ACK, _RST, _SYN, _FIN = 6, 0x10, 0x04, 0x02, 0x01
_QUEUE = 0.2  # length of a slow link's queue, seconds; a full queue drops packets
_OVERTAKEN = 0.01  # seconds; a reordered packet is delayed by up to this or the link's delay, if longer

TOOLS = ("unshare", "nsenter", "setpriv")


def missing() -> str | None:
    """Why machines cannot be made here; None if they can."""
    if not all(map(shutil.which, TOOLS)):
        return f"needs {', '.join(TOOLS)} (apt-get install util-linux)"
    try:
        with Network() as network:
            network.machine("try")
    except (OSError, RuntimeError) as error:
        return f"needs root, namespaces and /dev/net/tun: {error}"
    return None


class Machine:
    """A simulated machine.

    address  numeric IPv4 address
    holder   id of the process that keeps its namespaces alive
    """

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
        self.holder = children_of(self._outer.pid)[0]
        self._started: list[subprocess.Popen[Any]] = []

    def run(self, command: Sequence[str | Path], **how: Any) -> subprocess.Popen[Any]:
        """Starts a command on this machine."""
        inside = ["nsenter", f"--target={self.holder}", "--net", "--pid", "--mount", "--uts"]
        inside += ["setpriv", "--pdeathsig=KILL"]  # the command, a child of nsenter, must die with it
        process = subprocess.Popen([*inside, *map(str, command)], **how)
        self._started.append(process)
        return process

    def processes(self) -> dict[int, psutil.Process]:
        """All processes of this machine except its holder, by their process ids inside the machine."""
        found = {}
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if process.pid == self.holder or pid_namespace(process.pid) != pid_namespace(self.holder):
                    continue
                found[int(process_status(process.pid)["NSpid"].split()[-1])] = process
        return found

    def path(self, path: str) -> Path:
        """The host's path of a file on this machine, which must be alive."""
        return Path(f"/proc/{self.holder}/root{path}")

    def kill(self) -> None:
        """Kills all processes of the machine. Their connections are reset, unless a cut drops the packets."""
        self._outer.kill()
        self._outer.wait()
        assert self._outer.stderr is not None
        self._outer.stderr.close()
        for process in self._started:
            process.wait()


class Network:
    def __init__(self) -> None:
        self.machines: list[Machine] = []
        self._cut: set[tuple[int, int]] = set()  # (from, to), numbers of machines
        self._reset: dict[tuple[int, int], float] = {}  # (from, to) -> end of the resets
        self._delay, self._loss, self._reorder, self._rate = 0.0, 0.0, 0.0, math.inf
        self._free: dict[tuple[int, int], float] = {}  # (from, to) -> time when its queue will be empty
        self._far: dict[int, float] = {}  # additional delay, seconds, by machine number
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
        """Drops all packets between a and the others (default: all others). one_way: only from a to them."""
        self._cut |= set(self._between(a, others, one_way))

    def reset(self, a: Machine, *others: Machine, seconds: float = math.inf) -> None:
        """Answers all TCP packets between a and the others (default: all others) with resets. Returns at once.

        A connection on which data is sent during this time breaks at the sender. New connections are refused.
        """
        until = time.monotonic() + seconds
        self._reset = {**self._reset, **dict.fromkeys(self._between(a, others), until)}

    def heal(self) -> None:
        """Ends all cuts and resets."""
        self._cut, self._reset = set(), {}

    def weather(self, delay: float = 0.0, loss: float = 0.0, reorder: float = 0.0, rate: float = math.inf) -> None:
        """Delays, drops and reorders packets.

        delay    seconds one way
        loss     share of dropped packets
        reorder  share of packets with an additional random delay of up to `delay`, or up to 10 ms if that is longer,
                 so that later packets overtake them
        rate     bytes per second on each directed link
        """
        self._delay, self._loss, self._reorder, self._rate = delay, loss, reorder, rate

    def far(self, machine: Machine, delay: float) -> None:
        """Adds a delay, seconds one way, to all packets from and to this machine."""
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

    def _between(self, a: Machine, others: Sequence[Machine], one_way: bool = False) -> list[tuple[int, int]]:
        """Directed links between a and the others, as pairs of numbers."""
        numbers = [other.number for other in others or self.machines if other is not a]
        return [(a.number, n) for n in numbers] + [(n, a.number) for n in numbers if not one_way]

    def _switch(self) -> None:
        """Forwards IPv4 packets between TUN devices by destination."""
        late: list[tuple[float, int, int, bytes]] = []  # (due, sequence number, destination, packet)
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
                link = wires[descriptor].number, to
                if to not in to_wire or link in self._cut:
                    continue
                if self._reset.get(link, 0.0) > time.monotonic():
                    if answer := _reset_of(packet):
                        _write(descriptor, answer)
                    continue
                queue = self._queued(link, len(packet))
                if queue > _QUEUE or self._random.random() < self._loss:
                    continue
                if delay := queue + self._lateness(*link):
                    heapq.heappush(late, (time.monotonic() + delay, order, to, packet))
                    order += 1
                else:
                    _write(to_wire[to], packet)
            while late and late[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(late)
                _write(to_wire[to], packet)

    def _queued(self, link: tuple[int, int], count: int) -> float:
        """Adds a packet of `count` bytes to the queue of a link, unless it is full. Returns the seconds until the
        packet has left it."""
        now = time.monotonic()
        leaves = max(now, self._free.get(link, 0.0)) + count / self._rate
        if leaves - now <= _QUEUE:
            self._free[link] = leaves
        return leaves - now

    def _lateness(self, a: int, b: int) -> float:
        """Delay of the next packet from a to b, seconds."""
        delay = self._delay + self._far.get(a, 0.0) + self._far.get(b, 0.0)
        if self._random.random() < self._reorder:
            delay += self._random.uniform(0, max(delay, _OVERTAKEN))
        return delay


def _read(wire: int) -> bytes:
    with suppress(OSError):  # the machine was killed
        return os.read(wire, 1 << 16)
    return b""


def _write(wire: int, packet: bytes) -> None:
    with suppress(OSError):  # a lost packet: the machine was killed, or the device's queue is full
        os.write(wire, packet)


def _reset_of(packet: bytes) -> bytes | None:
    """The reset that answers an IPv4 packet (RFC 9293, 3.5.2). None if the packet is not TCP or is itself a reset."""
    if packet[9] != _TCP:
        return None
    begin = 4 * (packet[0] & 0xF)
    source, target, sequence, acknowledged = struct.unpack_from("!HHII", packet, begin)
    offset, flags = 4 * (packet[begin + 12] >> 4), packet[begin + 13]
    if flags & _RST:
        return None
    if flags & _ACK:
        numbers = acknowledged, 0, _RST
    else:
        length = len(packet) - begin - offset + bool(flags & _SYN) + bool(flags & _FIN)
        numbers = 0, (sequence + length) % (1 << 32), _RST | _ACK
    seq, ack, flag = numbers
    tcp = struct.pack("!HHIIBBHHH", target, source, seq, ack, 5 << 4, flag, 0, 0, 0)
    addresses = packet[16:20] + packet[12:16]  # from the target to the source
    check = _checksum(addresses + struct.pack("!BBH", 0, _TCP, len(tcp)) + tcp)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 0, 0, 64, _TCP, 0) + addresses
    ip = ip[:10] + struct.pack("!H", _checksum(ip)) + ip[12:]
    return ip + tcp[:16] + struct.pack("!H", check) + tcp[18:]


def _checksum(data: bytes) -> int:
    """The internet checksum (RFC 1071) of an even number of bytes."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
