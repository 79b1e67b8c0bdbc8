"""Messages between a worker and the coordinator: all of them, and the first one to a new coordinator.

    message = channel.recv(TO_WORKER)      # on a worker
    async for message in peer.listen(FROM_WORKER): ...

The others are in `lifecycle`, `generations`, `steps` and `saving`. `protocol` defines the reactions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import msgspec
from recycle_schedules import Worker

from . import lifecycle, saving  # noqa: F401  # adds their messages to the table
from .generations import FIRST, Attempt
from .steps import Commit
from .table import COORDINATOR, MESSAGES, WORKER, Message, Vocabulary, sent

LASTING = tuple(cls for cls, rule in MESSAGES.items() if rule.lasting)


if TYPE_CHECKING:
    Lasting = Message
else:
    Lasting = Union[LASTING]  # noqa: UP007


@sent(WORKER, COORDINATOR)
class State(Message, frozen=True):
    """The first message to a new coordinator: the input of `protocol.takeover.find`.

    generation  newest announced generation; -1 before the first
    agreed      (term, number) of the newest agreed generation, whose `Adopt` has arrived; (-1, -1) before the first
    members     of the agreed generation
    base        of the announced generation, if its links are up; else None
    commit      newest one
    attempt     at the next step
    said        last message of each lasting kind
    """

    generation: int = -1
    members: list[Worker] = msgspec.field(default_factory=list)
    base: int | None = None
    committed: int = -1
    commit: Commit | None = None
    said: list[Lasting] = msgspec.field(default_factory=list)
    attempt: Attempt = FIRST
    agreed: tuple[int, int] = (-1, -1)


TO_WORKER, FROM_WORKER = Vocabulary(COORDINATOR, WORKER), Vocabulary(WORKER, COORDINATOR)
