"""The table `MESSAGES` of all classes of messages in a job. Each class is frozen and typed, and has one entry.

    @sent(WORKER, COORDINATOR, of_generation=True)
    class Vote(Message, frozen=True):                      # travels with "type": "vote"
        generation: int
        ...

    MESSAGES[Vote]                              # Rule(sender="worker", receiver="coordinator", ...)
    from_worker = Vocabulary(WORKER, COORDINATOR)
    message = from_worker.decode(body)          # raises Malformed if no message of this pair has such a kind or fields
    if is_void(message, generation): ...

A receiver dispatches through its own dict from class to function (`_handlers`). The classes are in the other files of
this folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeVar, Union

import msgspec

from recycle_pp.wire.frames import Malformed

SUPERVISOR = "supervisor"
WORKER = "worker"
COORDINATOR = "coordinator"
OPERATOR = "operator"  # a user's command, recycle_pp.ctl
LISTENER = "listener"  # any supervisor on its port; the first message of a connection to it is a hello
CLIENT, SERVER = "client", "server"  # the two ends in the handshake
# The roles in the supervisors' agreement. A leader sends the same messages as a candidate does.
CANDIDATE, VOTER = "candidate", "voter"
DONOR, JOINER = "donor", "joiner"  # sender and receiver of state


def kind(message: object) -> str:
    """The kind of a message, from the name of its class: SaveFailed -> save_failed"""
    return _kind(type(message).__name__)


def _kind(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag=_kind, forbid_unknown_fields=True):
    """The base class of messages. The decorator `sent` adds a subclass to the table."""


class Rule(NamedTuple):
    """The entry of a message class in `MESSAGES`.

    sender         role of the sender
    receiver       role of the receiver
    of_generation  whether a message is valid only in the generation that its field `generation` names
    lasting        whether a message survives the loss of the coordinator: the sender repeats its last message of each
                   lasting kind to the next coordinator
    """

    sender: str
    receiver: str
    of_generation: bool = False
    lasting: bool = False


MESSAGES: dict[type[Message], Rule] = {}

_M = TypeVar("_M", bound=type[Message])


def sent(sender: str, receiver: str, *, of_generation: bool = False, lasting: bool = False) -> Callable[[_M], _M]:
    """A decorator that adds a class to the table. With `of_generation` the class needs a field `generation`."""

    def enter(cls: _M) -> _M:
        assert not of_generation or "generation" in cls.__struct_fields__, cls
        MESSAGES[cls] = Rule(sender, receiver, of_generation, lasting)
        return cls

    return enter


def is_void(message: Message, generation: int) -> bool:
    """Whether the message belongs to a generation other than the current one. generation: the current one."""
    return MESSAGES[type(message)].of_generation and message.generation != generation  # type: ignore[attr-defined]


def is_lasting(message: Message) -> bool:
    return MESSAGES[type(message)].lasting


class Vocabulary:
    """The classes of messages from one role to another. If `sender` is None, any role may be the sender."""

    def __init__(self, sender: str | None, receiver: str) -> None:
        self._sender, self._receiver = sender, receiver

    @property
    def types(self) -> tuple[type[Message], ...]:
        return tuple(
            cls
            for cls, rule in MESSAGES.items()
            if rule.receiver == self._receiver and self._sender in (None, rule.sender)
        )

    def decode(self, body: bytes) -> Message:
        """The message in the body of a frame. Raises Malformed if it is not a complete and correctly typed message of
        this vocabulary. May be called from any thread."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            sender = self._sender or "client"
            raise Malformed(f"not a message of a {sender} to a {self._receiver}: {error}") from error

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder:
        return msgspec.msgpack.Decoder(Union[self.types])  # noqa: UP007  # a variable number of types
