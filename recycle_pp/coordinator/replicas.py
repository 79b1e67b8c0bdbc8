"""Compares the parameters of a stage's workers bit by bit, at every checkpoint and at the end of the job.

    replicas = Replicas(step, live)        # live: member -> worker; each of these members sends its digests
    replicas.add(member, message); replicas.died(member)
    replicas.verdict()                     # a sentence, if a stage's digests are complete and differ
    difference({worker: {name: digest}})   # like `verdict`, for the digests at the end of the job

Votes cannot detect a flipped bit in one worker's parameters, because all peers use the same sums of gradients.
This comparison can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from recycle_schedules import Worker

from recycle_pp.wire.messages.members import Member
from recycle_pp.wire.messages.saving import Digests


class Replicas:
    """The digests of one checkpoint. silent: members whose digests are missing."""

    def __init__(self, step: int = 0, live: Mapping[Member, Worker] = MappingProxyType({})) -> None:
        self.silent = set(live)
        self._step, self._workers = step, live  # step: number of completed steps
        self._digests: dict[Worker, Mapping[str, str]] = {}

    def add(self, member: Member, message: Digests) -> None:
        """Records digests. Ignores digests of another step."""
        if message.step == self._step and member in self.silent:
            self.silent.discard(member)
            self._digests[self._workers[member]] = message.digests

    def died(self, member: Member) -> None:
        """Stops waiting for the member's digests. Digests that have arrived still count."""
        self.silent.discard(member)

    def verdict(self) -> str | None:
        """A sentence about the difference; None if there is none. Ignores a stage until all its digests have arrived,
        because only a majority shows which digest is wrong."""
        silent = {self._workers[member].stage for member in self.silent}
        found = difference({worker: of for worker, of in self._digests.items() if worker.stage not in silent})
        return None if found is None else f"{found} after {self._step} steps"


def difference(digests: Mapping[Worker, Mapping[str, str]]) -> str | None:
    """Describes the workers whose parameters differ from those of their peers; None if all agree."""
    holders: dict[str, dict[str, list[Worker]]] = {}
    for worker in sorted(digests):
        for name, digest in digests[worker].items():
            holders.setdefault(name, {}).setdefault(digest, []).append(worker)
    wrong = [name for name, by_digest in holders.items() if len(by_digest) > 1]
    if not wrong:
        return None
    of = wrong[0] if len(wrong) == 1 else f"{wrong[0]} and {len(wrong) - 1} more"
    groups = sorted(holders[wrong[0]].values(), key=len)
    if len(groups[-1]) == len(groups[-2]):  # no majority, so either group may be right
        return f"workers {_names([w for group in groups for w in group])} hold different weights ({of})"
    others = sorted(worker for group in groups[:-1] for worker in group)
    verb = "worker {} holds" if len(others) == 1 else "workers {} hold"
    return f"{verb.format(_names(others))} different weights than {_names(groups[-1])} ({of})"


def _names(workers: Collection[Worker]) -> str:
    *most, last = map(str, sorted(workers))
    return f"{', '.join(most)} and {last}" if most else last
