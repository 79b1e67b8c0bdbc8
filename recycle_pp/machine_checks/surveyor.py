"""The part of machine 0: it collects the results of each machine, and makes every pair of machines measure its link.

    with Surveyor(count=3, port=29501, token=token) as surveyor:     # raises OSError if the port is in use
        survey = surveyor.run()          # a `Survey`; machines that did not connect in time are in `missing`
        surveyor.end(code)               # all machines end with this exit code

Pairs are measured in rounds, so that no machine takes part in two measurements at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import NamedTuple

from recycle_pp.linux.addresses import listening
from recycle_pp.wire.connection import Channel
from recycle_pp.wire.messages.machines import (
    FROM_MACHINE,
    AskClock,
    Judged,
    LinkProbed,
    MachineClock,
    MachineFound,
    MachineHello,
    ProbeLink,
)

WAIT = 60.0  # seconds for all machines to connect
CHECK_SECONDS = 300.0  # time for a machine to check itself; a GPU that hangs in an exercise takes two minutes
PROBE_SECONDS = 120.0  # limit on the measurement of one link
CLOCKS = 5  # number of times that a machine is asked for its time; the fastest answer counts


class Machine(NamedTuple):
    """A machine that has connected.

    host    name of the machine
    found   results of the machine's checks; None: it did not answer in time
    offset  seconds by which the machine's clock is ahead of that of machine 0
    """

    host: str
    found: MachineFound | None
    offset: float = 0.0


class Survey(NamedTuple):
    """The results of all machines and links.

    machines  number -> Machine
    missing   numbers of machines that did not connect
    links     (from, to) -> the measured link
    """

    machines: dict[int, Machine]
    missing: list[int]
    links: dict[tuple[int, int], LinkProbed]


class Surveyor(AbstractContextManager["Surveyor"]):
    def __init__(self, count: int, port: int, token: str, wait: float = WAIT) -> None:
        self._count, self._token, self._wait = count, token, wait
        self._server = listening(port)
        self._come = threading.Condition()
        self._channels: dict[int, Channel] = {}
        self._hosts: dict[int, str] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        self._server.close()

    def run(self) -> Survey:
        with self._come:
            self._come.wait_for(lambda: len(self._channels) == self._count, self._wait)
            numbers = sorted(self._channels)
        with ThreadPoolExecutor(max(1, len(numbers))) as pool:
            machines = dict(zip(numbers, pool.map(self._machine, numbers), strict=True))
            links: dict[tuple[int, int], LinkProbed] = {}
            for pairs in rounds([number for number in numbers if machines[number].found]):
                for both in pool.map(lambda pair: self._pair(machines, *pair), pairs):
                    links |= both
        return Survey(machines, [n for n in range(self._count) if n not in machines], links)

    def end(self, code: int) -> None:
        for channel in self._channels.values():
            with suppress(OSError):
                channel.send(Judged(code))

    def _accept(self) -> None:
        with suppress(OSError):  # the server is closed
            while True:
                sock, _ = self._server.accept()
                threading.Thread(target=self._welcome, args=(sock,), daemon=True).start()

    def _welcome(self, sock: socket.socket) -> None:
        with suppress(OSError):  # not a machine of this survey
            channel, hello = Channel.accept(sock, self._token)
            if not isinstance(hello, MachineHello) or not 0 <= hello.number < self._count:
                return channel.close()
            with self._come:
                self._channels[hello.number], self._hosts[hello.number] = channel, hello.host
                self._come.notify()

    def _machine(self, number: int) -> Machine:
        channel, host = self._channels[number], self._hosts[number]
        try:
            found = channel.recv(FROM_MACHINE, CHECK_SECONDS)
            assert isinstance(found, MachineFound)
            return Machine(host, found, min(_clock(channel) for _ in range(CLOCKS))[1])
        except OSError:
            return Machine(host, None)

    def _pair(self, machines: dict[int, Machine], a: int, b: int) -> dict[tuple[int, int], LinkProbed]:
        return {(one, other): self._probe(one, machines[other].found) for one, other in ((a, b), (b, a))}

    def _probe(self, number: int, other: MachineFound | None) -> LinkProbed:
        assert other is not None
        channel = self._channels[number]
        try:
            channel.send(ProbeLink(other.address, other.port))
            link = channel.recv(FROM_MACHINE, PROBE_SECONDS)
            assert isinstance(link, LinkProbed)
            return link
        except OSError as error:
            channel.close()  # otherwise a late answer would be taken for the answer to the next probe
            return LinkProbed(0.0, 0.0, f"it did not report: {error}")


def rounds(numbers: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yields all pairs of the numbers in rounds, so that no number is in two pairs of a round."""
    players: list[int | None] = [*numbers, *([None] * (len(numbers) % 2))]
    for _ in players[1:]:
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        players = [players[0], players[-1], *players[1:-1]]


def _clock(channel: Channel) -> tuple[float, float]:
    """(seconds of the round trip, seconds by which the machine's clock is ahead)"""
    begun, now = time.monotonic(), time.time()
    channel.send(AskClock())
    answer = channel.recv(FROM_MACHINE, PROBE_SECONDS)
    assert isinstance(answer, MachineClock)
    trip = time.monotonic() - begun
    return trip, answer.time - now - trip / 2
