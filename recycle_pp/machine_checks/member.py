"""One machine's part in a survey of several: it checks itself, measures its links, and waits for the exit code.

    code = take_part(launched, token, look)      # machine 0 sends the same exit code to all machines

Raises ValueError, with one sentence, if machine 0 cannot be reached, has a different token or ends too early.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from recycle_pp.linux.addresses import interface_of
from recycle_pp.wire.authentication import Refused
from recycle_pp.wire.connection import Channel
from recycle_pp.wire.launch import joined
from recycle_pp.wire.messages.machines import (
    TO_MACHINE,
    AskClock,
    GpusFound,
    Judged,
    Judgement,
    MachineClock,
    MachineFound,
    MachineHello,
    ProbeLink,
)

from .check import Check
from .launched import Launched
from .link import answering, probe

WAIT = 60.0  # seconds in which machine 0 must answer, because machines may start one after another
LONGEST = 600.0  # maximum seconds without a message from machine 0, while other machines measure their links
AGAIN = 0.3  # seconds between two attempts to connect


class Look(NamedTuple):
    """The results of this machine's own checks.

    checks         the checks that involve no other machine
    writes, reads  bytes per second to the run folder and from the data; None: unknown
    gpus           a summary for each kind of GPU
    """

    checks: list[Check]
    writes: float | None
    reads: float | None
    gpus: Sequence[GpusFound] = ()


def take_part(launched: Launched, token: str, look: Callable[[], Look]) -> int:
    hello = MachineHello(launched.number, socket.gethostname())
    with answering(token) as port:
        channel = _connect(launched, token, hello)
        address = channel.local_host
        checks, writes, reads, gpus = look()
        found = [Judgement(*check) for check in checks]
        channel.send(MachineFound(address, interface_of(address), port, writes, reads, found, list(gpus)))
        try:
            return _serve(channel, token, hello)
        except OSError as error:
            at = joined(launched.address, launched.port)
            raise ValueError(f"machine 0 at {at} has left: {error}; it has died, or a job runs there") from error


def _serve(channel: Channel, token: str, hello: MachineHello) -> int:
    while True:
        match channel.recv(TO_MACHINE, LONGEST):
            case AskClock():
                channel.send(MachineClock(time.time()))
            case ProbeLink() as other:
                channel.send(probe(other.address, other.port, token, hello))
            case Judged(code):
                return code


def _connect(launched: Launched, token: str, hello: MachineHello) -> Channel:
    deadline = time.monotonic() + WAIT
    at = joined(launched.address, launched.port)
    while True:
        try:
            return Channel.connect(launched.address, launched.port, token, hello)
        except Refused as error:
            raise ValueError(f"machine 0 at {at} refuses: {error}; check that both use one RECYCLE_TOKEN") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(f"machine 0 at {at} has not answered for {WAIT:.0f} s: {error}") from error
        time.sleep(AGAIN)
