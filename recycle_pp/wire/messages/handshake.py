"""Messages at the start of a connection: the mutual authentication (see `wire.authentication`), and the hellos. A hello
introduces the client, and the authentication proves that the client sent it."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .table import CANDIDATE, CLIENT, LISTENER, OPERATOR, SERVER, SUPERVISOR, WORKER, Message, Vocabulary, sent

Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]


@sent(SERVER, CLIENT)
class Challenge(Message, frozen=True):
    nonce: Nonce


@sent(CLIENT, SERVER)
class Response(Message, frozen=True):
    nonce: Nonce
    hello: bytes  # the encoded hello, for instance a SupervisorHello
    proof: bytes


@sent(SERVER, CLIENT)
class Accepted(Message, frozen=True):
    proof: bytes


@sent(SERVER, CLIENT)
class OtherToken(Message, frozen=True):
    """The client's proof is wrong. A connection that ends without this message may succeed later."""


@sent(SUPERVISOR, LISTENER)
class SupervisorHello(Message, frozen=True):
    """The first message of a supervisor.

    rank         -1 for a new node, to which the coordinator assigns a rank
    host, pid    for log lines
    agent        index of the torchrun agent that started the supervisor; None for a new node
    agent_ranks  number of ranks that the agent started
    job_id       of the job that has welcomed the supervisor; "" before that
    launcher     process id of the launcher of a new node; 0 for other nodes
    """

    rank: int
    host: str
    pid: int
    agent: int | None = None
    agent_ranks: int = 1
    job_id: str = ""
    launcher: int = 0


@sent(WORKER, LISTENER)
class WorkerHello(Message, frozen=True):
    """The first message of a worker.

    moved   whether this or another coordinator has already welcomed the worker. If so, the next message is its `State`
    job_id  of the job to which its supervisor belongs
    """

    rank: int
    incarnation: int
    moved: bool
    job_id: str = ""


@sent(CANDIDATE, LISTENER)
class CandidateHello(Message, frozen=True):
    """The first message of a candidate or leader of the supervisors' agreement to another supervisor. Questions to the
    voter of that supervisor follow.

    job_id  of the job to which the sender belongs; "" if the sender asks nothing
    """

    job_id: str = ""


@sent(OPERATOR, LISTENER)
class OperatorHello(Message, frozen=True):
    """The first message of an operator's command (`ctl`). A request for the coordinator follows.

    job_id  of the job that the operator means; "" if the operator knows only the address
    """

    job_id: str = ""


TO_SERVER, TO_CLIENT = Vocabulary(CLIENT, SERVER), Vocabulary(SERVER, CLIENT)
HELLOS = Vocabulary(None, LISTENER)
