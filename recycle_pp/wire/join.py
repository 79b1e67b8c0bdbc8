"""Lets a new or repaired node enter a running job: `torchrun ... -m recycle_pp.train +join=HOST:PORT`.

    place = find_place(["+join=10.0.0.1:29501"])           # None for the command line of an ordinary start
    entered = await enter(place, hello)                    # raises ValueError with a sentence for the user

HOST:PORT is the address of the coordinator, or of any other supervisor of the job, which redirects the node to the
coordinator. (`recycle_pp.train` also accepts the job's run folder, which contains the coordinator's address.) The node
runs with the job's settings. It takes the rank, and so the role, of a worker whose node is gone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from .authentication import Refused
from .connection import Peer, connect
from .launch import TOKEN_VARIABLE, Address, Launch, host_and_port
from .messages.handshake import SupervisorHello
from .messages.supervisors import TO_SUPERVISOR, CoordinatorHeartbeat, NoPlace, Redirect, SupervisorWelcome
from .messages.table import Message

ANSWER_SECONDS = 30.0  # time limit for the job's answer; the job may be electing a coordinator
AGAIN = 0.5  # seconds between two attempts


def find_place(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Address | None:
    """The address in `+join=HOST:PORT`, with the job's token; None without `+join`.

    Raises ValueError if `+join` is malformed or not the only argument."""
    given = [text.lstrip("+").removeprefix("join=") for text in arguments if text.lstrip("+").startswith("join=")]
    if not given:
        return None
    if len(arguments) > 1:
        raise ValueError("+join=HOST:PORT must be the only argument: a node that joins runs with the job's settings")
    host_and_port(given[0], "join", " of the job's coordinator, or its run folder")
    return Address.of_cluster(Launch(), given[0], environment)


class Entered(NamedTuple):
    """The connection to the coordinator, the coordinator's welcome, and its address."""

    peer: Peer
    welcome: SupervisorWelcome
    address: Address


class Surplus(ValueError):
    """Other processes of this node have taken all free ranks of the job."""


async def enter(address: Address, hello: SupervisorHello) -> Entered:
    """Requests a place in the job at `address`. Raises ValueError, with a sentence for the user, if that fails, and
    Surplus if only other processes of this node have got a place.

    hello: the first message of this node's supervisor; `enter` sets its rank to -1
    """
    here, loop = str(address), asyncio.get_running_loop()
    deadline, place = loop.time() + ANSWER_SECONDS, address
    while True:
        error = "the supervisor there does not know the coordinator yet"
        try:
            peer = await connect(place.host, place.port, place.token, msgspec.structs.replace(hello, rank=-1))
            answer = await _answer(peer)
        except Refused:
            raise ValueError(f"the job at {here} does not accept this {TOKEN_VARIABLE}") from None
        except OSError as failure:  # including ChannelClosed
            error = str(failure) or "no connection in time"
            if place != address:
                error = f"it names {place} as the coordinator, which this node cannot reach: {error}"
            place = address
        else:
            if isinstance(answer, SupervisorWelcome):
                return Entered(peer, answer, place)
            peer.close()
            if isinstance(answer, NoPlace):
                raise Surplus(answer.reason) if answer.surplus else ValueError(answer.reason)
            if isinstance(answer, Redirect) and answer.leader is not None:
                place = Address(answer.leader.host, answer.leader.port, address.token)
        if loop.time() > deadline:
            raise ValueError(f"no job answers at {here}: {error}")
        await asyncio.sleep(AGAIN)


async def _answer(peer: Peer) -> Message:
    """The job's answer to the hello. Raises OSError if the connection ends or is silent for ANSWER_SECONDS."""
    try:
        while True:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await peer.recv(TO_SUPERVISOR)
            if not isinstance(answer, CoordinatorHeartbeat):  # a heartbeat: a new coordinator is starting
                return answer
    except OSError:
        peer.abort()
        raise
