"""One member's end of a group. It starts operations and tracks whether the next generation can reuse the group.

    end = Endpoint("7/0.1-1.2", [1, 6], me, group, born=7, pair=True)
    end.open(generation)                                    # after all members have connected
    works = end.start(generation, lane, lambda backend: [backend.send([tensor], peer, tag)])
    end.close()                                             # later operations raise LinkBroken
    end.is_idle(ask=True)                                   # no operation is pending: publish end.counts
    kept = agreed([end], {1: counts, 6: counts})            # by member; the same result at every member

A group can be reused if no member has a pending operation and all members have the same counts. The counts are needed
because NCCL and Gloo may complete a short send before the other end has posted its receive.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recycle_pp.wire.messages.members import Member

from .waiting import Generation, Job, LinkBroken

Counts = Mapping[str, Sequence[int]]  # name of a group -> its counts


class Endpoint:
    """One member's end of a group.

    Methods may be called from any thread. They block only if an operation blocks.

    name     unique among all groups of the job, and the same on every member
    members  in the order of their ranks
    born     generation in which the group was built
    pair     whether the group is a pair of members of two stages; otherwise it is the group of a stage
    counts   number of operations started so far: [in lane 0, in lane 1]. The lane of a message is the rank of its
             sender, so both ends count it in the same lane. Sums and broadcasts are in lane 0
    """

    def __init__(self, name: str, members: Sequence[Member], me: Member, group: Any, born: int, pair: bool):
        self.name, self.members, self.rank, self.group, self.born = name, members, members.index(me), group, born
        self.pair = pair
        self.counts = [0, 0]
        self._lock = threading.Lock()  # never held during a call to the back end, which may hang
        self._connected = False
        self._generation: Generation | None = None
        self._starting = 0
        self._unfinished: set[Any] = set()

    @property
    def other(self) -> Member | None:
        """The member at the other end of a pair; None for the group of a stage."""
        return self.members[1 - self.rank] if self.pair else None

    def open(self, generation: Generation) -> None:
        """Allows operations of this generation."""
        with self._lock:
            self._connected, self._generation = True, generation

    def start(self, generation: Generation, lane: int, operation: Callable[[Any], list[Any]]) -> list[Any]:
        """Calls `operation` with the group's back end. Returns its results. Raises LinkBroken after `close`."""
        with self._lock:
            if self._generation is not generation:
                raise LinkBroken(generation.number, "aborted")
            self._starting += 1
            self.counts[lane] += 1
        finished = [work for work in tuple(self._unfinished) if _has_succeeded(work)]
        works = operation(self.group.backend)
        with self._lock:
            self._unfinished.difference_update(finished)
            self._unfinished.update(works)
            self._starting -= 1
        return works

    def close(self) -> bool:
        """Rejects later operations. Returns whether a thread is inside `start`, or an operation has raised there."""
        with self._lock:
            self._generation = None
            return self._starting > 0

    def is_idle(self, ask: bool) -> bool:
        """Whether all operations have succeeded. Call `close` first.

        ask: whether to query the device. If False, operations count as unfinished unless `start` has seen them end."""
        if not self._connected or self._starting:
            return False
        return all(ask and _has_succeeded(work) for work in tuple(self._unfinished))


def agreed(endpoints: Sequence[Endpoint], published: Mapping[Member, Counts]) -> list[Endpoint]:
    """The groups for which all members have published the same counts."""
    return [end for end in endpoints if all(published[member].get(end.name) == end.counts for member in end.members)]


def _has_succeeded(work: Any) -> bool:
    if isinstance(work, Job):
        return work.done and work.error is None
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return False
