"""Holds back the messages that start a generation until the generation is agreed.

    gate = AgreementGate(agreement, lease, deliver)
    gate.announce(7, places)       # requests agreement, while the workers report
    gate.send(out)                 # holds back `Adopt` and plans until the agreement, delivers the rest at once

The gate prevents two sides of a partition from committing the same step in different generations. The agreement runs
while the workers report, so it adds no delay. Each `Adopt` carries the term of the agreement that allowed its
generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from recycle_pp.protocol.events import Send
from recycle_pp.wire.messages.generations import Adopt, SteadyPlan

from .agreement import Agreement, Deposed, LostMajority, Place
from .leader_lease import LeaderLease

_BEGINS = (Adopt, SteadyPlan)  # messages without which a worker cannot start a generation


class AgreementGate:
    """Holds back the messages that start a generation. Revokes the lease if another supervisor leads or no majority
    answers.

    deliver(out): sends messages; called in the event loop
    """

    def __init__(self, agreement: Agreement, lease: LeaderLease, deliver: Callable[[Sequence[Send]], None]) -> None:
        self._agreement = agreement
        self._lease = lease
        self._deliver = deliver
        self._held: list[Send] = []
        self._generation: int | None = None
        self._term = 0  # term of the newest agreement
        self._agreeing: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether an agreement is pending and messages are held back."""
        return self._agreeing is not None

    def announce(self, generation: int, places: Mapping[int, Place]) -> None:
        """Requests agreement on this generation. Older generations become void, agreed or not."""
        if generation != self._generation:
            self.close()
            self._generation = generation
            self._agreeing = asyncio.create_task(self._agree(generation, places))

    def send(self, out: Sequence[Send]) -> None:
        if self._agreeing is None:  # already agreed
            self._deliver([_with_term(send, self._term) for send in out])
            return
        self._held += [send for send in out if isinstance(send.message, _BEGINS)]
        self._deliver([send for send in out if not isinstance(send.message, _BEGINS)])

    def close(self) -> None:
        if self._agreeing is not None:
            self._agreeing.cancel()
        self._held = []
        self._agreeing = None

    async def _agree(self, generation: int, places: Mapping[int, Place]) -> None:
        try:
            self._term = await self._agreement.agree(generation, places)
            await self._lease.wait()  # this process may have been suspended since the majority answered
        except (LostMajority, Deposed):
            self._lease.revoke()
            return
        self._agreeing = None
        held = self._held
        self._held = []
        self._deliver([_with_term(send, self._term) for send in held])


def _with_term(send: Send, term: int) -> Send:
    if not isinstance(send.message, Adopt):
        return send
    return Send(send.to, msgspec.structs.replace(send.message, term=term))
