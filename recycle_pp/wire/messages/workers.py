"""The vocabularies of all messages between a worker and the coordinator, and the first message to a new coordinator.

    message = channel.recv(TO_WORKER)                      # on a worker
    async for message in peer.listen(FROM_WORKER): ...     # on the coordinator

The other messages are in `lifecycle`, `generations`, `steps` and `saving`. `protocol` defines the reactions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import msgspec

from . import lifecycle, saving  # noqa: F401  # adds the messages of these modules to the table
from .generations import FIRST, Attempt
from .members import Assignment
from .steps import Commit
from .table import COORDINATOR, MESSAGES, WORKER, Message, Vocabulary, sent
from .units import Layout

LASTING = tuple(cls for cls, rule in MESSAGES.items() if rule.lasting)


if TYPE_CHECKING:
    Lasting = Message
else:
    Lasting = Union[LASTING]  # noqa: UP007


class Followed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An understudy's copy of the state of another stage.

    session  see `Expect`
    step     newest committed step in the copy
    early    later step whose gradient has arrived -> generation of its newest gradient
    """

    stage: int
    session: int
    step: int
    early: dict[int, int]


@sent(WORKER, COORDINATOR)
class State(Message, frozen=True):
    """A worker's first message to a new coordinator, or to the same one after a reconnection. A new coordinator
    restores the job from these messages (`protocol.takeover.find`).

    generation  newest announced generation; -1 before the first
    agreed      (term, number) of the newest agreed generation, whose `Adopt` has arrived; (-1, -1) before the first
    members     member of the agreed generation -> the worker that it plays
    base        `Announce.base` of the announced generation if its links are up, else None
    committed   newest committed step; -1 before the first
    commit      newest commit message; None before the first
    attempt     current attempt at the next step
    layout      the layers of every stage in the agreed generation; empty before the first
    understudy  the worker's copy of another stage, if it is an understudy and all units have arrived; else None
    said        the worker's last message of each lasting kind (`table.Rule`)
    """

    generation: int = -1
    members: Assignment = msgspec.field(default_factory=dict)
    base: int | None = None
    committed: int = -1
    commit: Commit | None = None
    said: list[Lasting] = msgspec.field(default_factory=list)
    attempt: Attempt = FIRST
    agreed: tuple[int, int] = (-1, -1)
    layout: Layout = msgspec.field(default_factory=dict)
    understudy: Followed | None = None


TO_WORKER, FROM_WORKER = Vocabulary(COORDINATOR, WORKER), Vocabulary(WORKER, COORDINATOR)
