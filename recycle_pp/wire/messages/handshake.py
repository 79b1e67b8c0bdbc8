"""The start of a connection: mutual authentication (see `wire.authentication`), and the hello that it covers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .table import CANDIDATE, CLIENT, LISTENER, SERVER, SUPERVISOR, WORKER, Message, Vocabulary, sent

Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]


@sent(SERVER, CLIENT)
class Challenge(Message, frozen=True):
    nonce: Nonce


@sent(CLIENT, SERVER)
class Response(Message, frozen=True):
    nonce: Nonce
    hello: bytes  # the body of a message, see the hellos
    proof: bytes


@sent(SERVER, CLIENT)
class Accepted(Message, frozen=True):
    proof: bytes


@sent(SUPERVISOR, LISTENER)
class SupervisorHello(Message, frozen=True):
    """rank: -1 for a new node, which is assigned one. host, pid: for log lines. agent: torchrun's; None for a new
    node. agent_ranks: number of ranks that the agent started."""

    rank: int
    host: str
    pid: int
    agent: int | None = None
    agent_ranks: int = 1


@sent(WORKER, LISTENER)
class WorkerHello(Message, frozen=True):
    """moved: another coordinator has welcomed it before, so its `State` is its first message."""

    rank: int
    incarnation: int
    moved: bool


@sent(CANDIDATE, LISTENER)
class CandidateHello(Message, frozen=True):
    """A candidate or leader of the supervisors' agreement, with questions for this supervisor's voter."""


TO_SERVER, TO_CLIENT = Vocabulary(CLIENT, SERVER), Vocabulary(SERVER, CLIENT)
HELLOS = Vocabulary(None, LISTENER)
