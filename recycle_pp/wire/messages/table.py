"""Every message of a job is a frozen, typed class with one entry in one table: `MESSAGES`.

    @sent(WORKER, COORDINATOR, of_generation=True)
    class Vote(Message, frozen=True):                      # travels with "type": "vote"
        generation: int
        ...

    MESSAGES[Vote]                              # Rule(sender="worker", receiver="coordinator", ...)
    from_worker = Vocabulary(WORKER, COORDINATOR)
    message = from_worker.decode(body)          # Malformed, one sentence: no such kind, field or type between the two
    if is_void(message, generation): ...

A receiver looks up what to do in a dict from class to function of its own (`handlers`). The classes stand in the files
beside this one, by conversation: `handshake`, `supervisors`, `workers`, `agreement`, `states`.
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
LISTENER = "listener"  # what every supervisor is on its port: whoever connects says hello first
CLIENT, SERVER = "client", "server"  # of the handshake
CANDIDATE, VOTER = "candidate", "voter"  # of the supervisors' agreement; a leader asks as a candidate does
DONOR, JOINER = "donor", "joiner"  # of a state


def _kind(name: str) -> str:
    """SaveFailed -> save_failed"""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, tag=_kind, forbid_unknown_fields=True):
    """A message; subclasses get their entry in the table from `sent`."""


class Rule(NamedTuple):
    """sender, receiver: roles.

    of_generation  belongs to its `generation`: void once a newer one is announced
    lasting        outlives a lost coordinator: its successor is told the last one of the kind again
    """

    sender: str
    receiver: str
    of_generation: bool = False
    lasting: bool = False


MESSAGES: dict[type[Message], Rule] = {}

_M = TypeVar("_M", bound=type[Message])


def sent(sender: str, receiver: str, *, of_generation: bool = False, lasting: bool = False) -> Callable[[_M], _M]:
    """Enters the class into the table. What is of a generation says of which."""

    def enter(cls: _M) -> _M:
        assert not of_generation or "generation" in cls.__struct_fields__, cls
        MESSAGES[cls] = Rule(sender, receiver, of_generation, lasting)
        return cls

    return enter


def is_void(message: Message, generation: int) -> bool:
    """It belongs to another generation than this, the present one."""
    return MESSAGES[type(message)].of_generation and message.generation != generation  # type: ignore[attr-defined]


def is_lasting(message: Message) -> bool:
    return MESSAGES[type(message)].lasting


class Vocabulary:
    """What one role may say to another. sender None: anybody."""

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
        """Any thread. Malformed where it is none of them, whole and with the right types."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            sender = self._sender or "client"
            raise Malformed(f"no message of a {sender} to a {self._receiver}: {error}") from error

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder:
        return msgspec.msgpack.Decoder(Union[self.types])  # noqa: UP007  # as many as there are
