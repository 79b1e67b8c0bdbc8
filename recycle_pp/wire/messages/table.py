"""Every message of a job is a frozen, typed class with one entry in one table: `MESSAGES`.

    @sent(WORKER, COORDINATOR, of_generation=True)
    class Vote(Message, frozen=True):                      # travels with "type": "vote"
        generation: int
        ...

    MESSAGES[Vote]                              # Rule(sender="worker", receiver="coordinator", ...)
    from_worker = Vocabulary(WORKER, COORDINATOR)
    message = from_worker.decode(body)          # Malformed, one sentence: unknown kind, field or type for this pair
    if is_void(message, generation): ...

A receiver dispatches through its own dict from class to function (`_handlers`). The classes are in the other files of
this folder: `handshake`, `supervisors`, `agreement`, `states`, and `workers` with `lifecycle`, `generations`, `steps`,
`saving`.
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
LISTENER = "listener"  # every supervisor on its port; the first message of a connection is a hello
CLIENT, SERVER = "client", "server"  # in the handshake
# in the supervisors' agreement; a leader sends the same messages as a candidate
CANDIDATE, VOTER = "candidate", "voter"
DONOR, JOINER = "donor", "joiner"  # of a state


def kind(message: object) -> str:
    """The name of a message's class: SaveFailed -> save_failed"""
    return _kind(type(message).__name__)


def _kind(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag=_kind, forbid_unknown_fields=True):
    """A message. `sent` adds subclasses to the table."""


class Rule(NamedTuple):
    """sender, receiver: roles.

    of_generation  belongs to its `generation`: void after the announcement of a newer one
    lasting        survives the loss of the coordinator: the last one of each kind is repeated to the successor
    """

    sender: str
    receiver: str
    of_generation: bool = False
    lasting: bool = False


MESSAGES: dict[type[Message], Rule] = {}

_M = TypeVar("_M", bound=type[Message])


def sent(sender: str, receiver: str, *, of_generation: bool = False, lasting: bool = False) -> Callable[[_M], _M]:
    """Adds the class to the table. A message of a generation has a field `generation`."""

    def enter(cls: _M) -> _M:
        assert not of_generation or "generation" in cls.__struct_fields__, cls
        MESSAGES[cls] = Rule(sender, receiver, of_generation, lasting)
        return cls

    return enter


def is_void(message: Message, generation: int) -> bool:
    """Whether it belongs to another generation than `generation`, the current one."""
    return MESSAGES[type(message)].of_generation and message.generation != generation  # type: ignore[attr-defined]


def is_lasting(message: Message) -> bool:
    return MESSAGES[type(message)].lasting


class Vocabulary:
    """The messages from one role to another. sender None: from any role."""

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
        """The message in a frame. Any thread. Malformed if it is not a complete and correctly typed message of
        these."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            sender = self._sender or "client"
            raise Malformed(f"not a message of a {sender} to a {self._receiver}: {error}") from error

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder:
        return msgspec.msgpack.Decoder(Union[self.types])  # noqa: UP007  # a variable number of types
