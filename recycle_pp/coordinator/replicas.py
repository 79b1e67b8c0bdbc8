"""Whether all who hold the same parameters hold the same bits: compared at every checkpoint and at the end.

    replicas = Replicas(step, live)        # a commit has brought a checkpoint: all who live say what they hold
    replicas.say(worker, message); replicas.died(worker)
    replicas.verdict()                     # a sentence, once all peers of a stage have spoken and one differs
    difference({worker: {name: digest}})   # the same of what all have said at the end

A bit that flips in one worker's memory changes nothing that the votes compare: the sums are taken over the results of
all, right and wrong ones. It shows only here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recycle_schedules import Worker

from recycle_pp.wire.messages.workers import Digests


class Replicas:
    """silent: who has still to speak."""

    def __init__(self, step: int = 0, live: Collection[Worker] = ()) -> None:
        self.silent = set(live)
        self._step = step  # steps done
        self._said: dict[Worker, Mapping[str, str]] = {}

    def say(self, worker: Worker, message: Digests) -> None:
        """What belongs to another step counts no more."""
        if message.step == self._step and worker in self.silent:
            self.silent.discard(worker)
            self._said[worker] = message.digests

    def died(self, worker: Worker) -> None:
        """It need not speak; what it has said still counts."""
        self.silent.discard(worker)

    def verdict(self) -> str | None:
        """None while nobody differs, or while one of the stage has still to speak: three know more than two."""
        silent = {worker.stage for worker in self.silent}
        found = difference({worker: of for worker, of in self._said.items() if worker.stage not in silent})
        return None if found is None else f"{found} after {self._step} steps"


def difference(digests: Mapping[Worker, Mapping[str, str]]) -> str | None:
    """Who holds another value of which parameter than the others, in words; None if nobody does."""
    holders: dict[str, dict[str, list[Worker]]] = {}
    for worker in sorted(digests):
        for name, digest in digests[worker].items():
            holders.setdefault(name, {}).setdefault(digest, []).append(worker)
    wrong = [name for name, by_digest in holders.items() if len(by_digest) > 1]
    if not wrong:
        return None
    of = wrong[0] if len(wrong) == 1 else f"{wrong[0]} and {len(wrong) - 1} more"
    groups = sorted(holders[wrong[0]].values(), key=len)
    if len(groups[-1]) == len(groups[-2]):  # nobody can tell which of them is right
        return f"workers {_names([w for group in groups for w in group])} hold different weights ({of})"
    others = sorted(worker for group in groups[:-1] for worker in group)
    verb = "worker {} holds" if len(others) == 1 else "workers {} hold"
    return f"{verb.format(_names(others))} other weights than {_names(groups[-1])} ({of})"


def _names(workers: Collection[Worker]) -> str:
    *most, last = map(str, sorted(workers))
    return f"{', '.join(most)} and {last}" if most else last
