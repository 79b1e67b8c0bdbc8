"""All launched processes of a job, by rank.

roster = Roster(settings, assignment)     # assignment(): the job's assignment
rank = roster.enter(3)                    # adds rank 3, when its supervisor has connected
roster.deliver(out)                       # sends the protocol's messages to workers
roster.publish(key, value)                # sends a value to all workers within milliseconds
roster.complete, roster.places()          # whether all supervisors have connected once; addresses of the connected ones
rank = roster.free(live)                  # a rank whose node is lost, for a node that joins
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.protocol.events import Send
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.agreement import Place
from recycle_pp.wire.messages.lifecycle import StoreValues
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.table import Message

from .ranks import Rank

_TOGETHER_SECONDS = 0.001  # time to collect published values into one message


class Roster:
    def __init__(self, settings: Settings, assignment: Callable[[], Assignment]) -> None:
        self._parallel, self._assignment = settings.parallel, assignment
        self._ranks: dict[Member, Rank] = {}
        self._published: list[tuple[str, bytes]] = []  # (key, value), not sent yet

    def __iter__(self) -> Iterator[Rank]:
        """All ranks by number, including those whose node is lost."""
        return iter([self._ranks[number] for number in sorted(self._ranks)])

    def __getitem__(self, number: int) -> Rank:
        return self._ranks[number]

    def __contains__(self, number: int) -> bool:
        return number in self._ranks

    def enter(self, number: Member) -> Rank:
        return self._ranks.setdefault(number, Rank(number, self._assignment))

    @property
    def complete(self) -> bool:
        return len(self._ranks) == self._parallel.pipelines * self._parallel.stages

    def places(self) -> dict[int, Place]:
        """The addresses of connected supervisors, by rank."""
        return {rank.number: rank.place for rank in self if rank.supervisor and rank.place}

    def agents(self) -> set[int]:
        """The numbers of the launch's torchrun agents that will end with the job.

        Leaves out
        - the agents of nodes that joined later,
        - agents with a lost supervisor, because they have failed or wait for a suspended process,
        - agents without a live worker, because they may be cut off from the agents' store.
        """
        connected = Counter(rank.agent for rank in self)
        living = {hello.agent: hello.agent_ranks for rank in self if rank.alive and (hello := rank.hello) is not None}
        return {agent for agent, ranks in living.items() if agent is not None and connected[agent] == ranks}

    def free(self, live: Collection[Worker]) -> Rank | None:
        """A rank whose node is lost, from the stage with the fewest live workers; None if no node is lost."""
        crowd = Counter(worker.stage for worker in live)
        free = [rank for rank in self if rank.supervisor is None and rank.incarnation >= 0]
        return min(free, key=lambda rank: (crowd[rank.role.stage], rank.number), default=None)

    def deliver(self, out: Iterable[Send]) -> None:
        encoded: Message | None = None
        for to, message in out:
            if message is not encoded:  # encode an object only once, because many workers get the same one
                encoded = message
                frame = encode(message)
            if to in self and (worker := self[to].worker) is not None:
                worker.send_frame(frame)

    def broadcast(self, message: Message) -> None:
        self.deliver(Send(rank.number, message) for rank in self)

    def publish(self, key: str, value: bytes) -> None:
        """Sends a value of the workers' store to all workers, batched with the values of the next millisecond.

        Without batching, 1000 workers that publish values at the start would cause a million messages."""
        if not self._published:
            asyncio.get_running_loop().call_later(_TOGETHER_SECONDS, self._publish)
        self._published.append((key, value))

    def _publish(self) -> None:
        values = self._published
        self._published = []
        self.broadcast(StoreValues(values))
