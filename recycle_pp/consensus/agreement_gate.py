"""Holds back what a generation begins with until the agreement lets the generation stand.

    gate = AgreementGate(agreement, deliver, refused, deposed)
    gate.announce(7, places)       # asks for agreement, while the workers report
    gate.send(out)                 # delivers at once what needs no agreement, and the rest when there is one

So no step can be committed in two generations that do not know of each other, and agreeing costs no time of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from recycle_pp.protocol.job import Send
from recycle_pp.wire.messages.workers import Adopt, SteadyPlan

from .agreement import Agreement, Deposed, LostMajority, Place

_BEGINS = (Adopt, SteadyPlan)  # without these messages nobody can do anything in a generation


class AgreementGate:
    """deliver(out): sends messages. refused(reason): no majority, this side has to stop. deposed(): another supervisor
    coordinates. All three are called in the event loop."""

    def __init__(
        self,
        agreement: Agreement,
        deliver: Callable[[Sequence[Send]], None],
        refused: Callable[[str], None],
        deposed: Callable[[], None],
    ) -> None:
        self._agreement, self._deliver, self._refused, self._deposed = agreement, deliver, refused, deposed
        self._held: list[Send] = []
        self._generation: int | None = None
        self._agreeing: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Messages are held back until a membership is agreed."""
        return self._agreeing is not None

    def announce(self, generation: int, places: Mapping[int, Place]) -> None:
        """Asks for agreement on this generation. An older one is void, whether it was agreed or not."""
        if generation != self._generation:
            self.close()
            self._generation = generation
            self._agreeing = asyncio.create_task(self._agree(generation, places))

    def send(self, out: Sequence[Send]) -> None:
        held = [send for send in out if self._agreeing is not None and isinstance(send.message, _BEGINS)]
        self._held += held
        self._deliver([send for send in out if not isinstance(send.message, _BEGINS)] if held else out)

    def close(self) -> None:
        if self._agreeing is not None:
            self._agreeing.cancel()
        self._held, self._agreeing = [], None

    async def _agree(self, generation: int, places: Mapping[int, Place]) -> None:
        try:
            await self._agreement.agree(generation, places)
        except LostMajority as lost:
            self._refused(f"the coordinator has lost the majority of the supervisors: {lost}")
            return
        except Deposed:
            self._deposed()
            return
        self._agreeing, held, self._held = None, self._held, []
        self._deliver(held)
