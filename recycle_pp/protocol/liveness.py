"""Detects stuck workers from their reported activities. A worker is live if it makes progress, not if it answers.

    sign = Sign(Activity("works", "F", 20, (1, 3)), seconds=10.2, quiet=10.1)
    verdict = judge({Worker(1, 2): sign, ...}, Patience(suspicion=10.0, lease=600.0))
    verdict.stuck       # {Worker(1, 2): Stuck("F of micro-batch 1.3 in step 20", 10.2)}: to be killed
    verdict.deadlock    # waits that will never end although no worker is stuck: renew the generation
    verdict.graph       # the wait-for graph, a networkx DiGraph; its nodes have the signs
    verdict.no_disk     # all readers of training data, if all their disks are silent; then none of them is stuck

An edge leads from a waiting worker to a worker that it waits for. So a culprit is a root: it has no outgoing edge,
because it works, or because what it waits for has already arrived. A root is stuck if it exceeds its limit:

    starts, or runs its first op of a kind (which may compile)    `lease`
    works on an op                                                `suspicion`, or ten times its profiled time
    waits for a message that has arrived in its process           `suspicion`
    is silent, or does not answer a new generation                `suspicion`

Exceeding the limit counts only if the main thread neither ran nor wanted to run meanwhile. A thread that runs, or waits
for a core on a busy machine, has ten times the limit. A wait for the device does not count as running, although the
processor spins. A waiting worker is never stuck while it can reach a root that works within its limit. If it cannot,
and all workers that it reaches have waited for longer than `suspicion` (for a message: than ten times its link's time),
a message or an all-reduce was lost.

A silent disk is not the fault of its reader. While the disks of all readers of training data are silent, no reader is
stuck, and the job waits for the disks. If one disk answers, the limits apply.

Pure: no clock, no sockets. All times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import networkx as nx
from recycle_schedules import Worker

from recycle_pp.wire.messages.activity import BUSY, Activity

PROFILED = 10  # limit of an op, as a multiple of its profiled duration
COORDINATOR = "coordinator"


class Patience(NamedTuple):
    suspicion: float
    lease: float


@dataclass(frozen=True)
class Sign:
    """The current knowledge about one worker. Times are in seconds.

    seconds     since its activity started
    quiet       since its main thread last ran or was ready to run
    delivered   since the message that it waits for arrived in its process; None: not arrived
    silent      since its last message
    unanswered  since the announcement of a generation that it has not answered; None: no such generation
    expected    profiled time of its op, or of a message on its link; None: unknown
    reading     since its oldest unfinished read of training data started; 0: no read; None: it reads no files
    member      whether it is a member of the current generation; otherwise it starts or catches up
    """

    activity: Activity
    seconds: float
    quiet: float = 0.0
    delivered: float | None = None
    silent: float = 0.0
    unanswered: float | None = None
    expected: float | None = None
    member: bool = True
    reading: float | None = None

    def waits(self, suspicion: float) -> bool:
        """Whether it waits for something that has not arrived. False if its information is out of date."""
        answers = self.unanswered is None and self.silent <= suspicion
        return self.activity.kind == "waits" and self.delivered is None and answers

    def to_json(self) -> dict[str, Any]:
        about = {name: getattr(self, name) for name in ("seconds", "quiet", "delivered", "silent", "unanswered")}
        return {"does": str(self.activity), "kind": self.activity.kind, **about}


class Stuck(NamedTuple):
    where: str
    seconds: float  # since the last progress


class Verdict(NamedTuple):
    stuck: dict[Worker, Stuck]
    deadlock: list[Worker]
    graph: nx.DiGraph
    no_disk: list[Worker]


def judge(signs: Mapping[Worker, Sign], patience: Patience, coordinator_works: bool = False) -> Verdict:
    """coordinator_works: the coordinator plans, or waits for a majority or a joiner. Workers that wait for its messages
    then wait for that."""
    graph = waiting(signs, patience.suspicion, coordinator_works)
    stuck = {w: found for w, sign in signs.items() if not graph.out_degree(w) and (found := _stuck(sign, patience))}
    no_disk = _readers_without_disk(signs, patience.suspicion)
    for worker in no_disk:
        if signs[worker].activity.what == "data":
            stuck.pop(worker, None)
    deadlock = [] if stuck else _deadlock(graph, signs, patience.suspicion)
    return Verdict(stuck, deadlock, graph, no_disk)


def read_limit(suspicion: float) -> float:
    """Seconds after which a read counts as waiting for its disk, and the interval of disk probes. At most a quarter of
    `suspicion`, so that other workers have probed their disks before a reader would be stuck."""
    return min(1.0, suspicion / 4)


def _readers_without_disk(signs: Mapping[Worker, Sign], suspicion: float) -> list[Worker]:
    """All workers that read training data from files, if the reads of all of them wait; otherwise none."""
    readers = {w: sign.reading for w, sign in signs.items() if sign.reading is not None}
    waiting = [w for w, seconds in readers.items() if seconds > read_limit(suspicion)]
    return waiting if len(waiting) == len(readers) else []


def waiting(signs: Mapping[Worker, Sign], suspicion: float, coordinator_works: bool = False) -> nx.DiGraph:
    """The wait-for graph: an edge from each waiting worker to each worker that it waits for."""
    graph = nx.DiGraph()
    for worker, sign in signs.items():
        graph.add_node(worker, sign=sign)
    for worker, sign in signs.items():
        if sign.member and sign.waits(suspicion):
            graph.add_edges_from((worker, giver) for giver in _givers(worker, sign.activity, signs))
            if coordinator_works and sign.activity.what in ("orders", "plan", "commit", "links"):
                graph.add_edge(worker, COORDINATOR)
    return graph


def _givers(worker: Worker, awaited: Activity, signs: Mapping[Worker, Sign]) -> Iterable[Worker]:
    members = {w: s for w, s in signs.items() if s.member and w != worker}
    if awaited.peer is not None:
        return [w for w in members if w == awaited.peer]
    return [w for w, sign in members.items() if _OWES[awaited.what](worker, awaited.step, w, sign)]


def _owes_sum(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    """A peer that may not have started the sum, or not finished it."""
    return other.stage == worker.stage and not _has_voted(step, sign)


def _owes_vote(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    return not _has_voted(step, sign)


def _has_voted(step: int, sign: Sign) -> bool:
    """It has voted on that step: it waits for the commit, or works on a later step."""
    awaits_commit = sign.activity.kind == "waits" and sign.activity.what == "commit"
    return sign.activity.step > step or (awaits_commit and sign.activity.step >= step)


def _owes_answer(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    """Orders and plans arrive when all workers have answered, or have sent what the coordinator needs for planning."""
    return sign.unanswered is not None


def _owes_meeting(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    """Connecting a group waits for the workers that have not come, which are known only to the group."""
    comes = sign.activity.kind == "waits" and sign.activity.what == "links"
    return sign.unanswered is not None or not comes


_OWES: dict[str, Callable[[Worker, int, Worker, Sign], bool]] = {
    "sum": _owes_sum,
    "copy": _owes_sum,
    "commit": _owes_vote,
    "orders": _owes_answer,
    "plan": _owes_answer,
    "links": _owes_meeting,
    "tensor": lambda *_: False,  # a tensor always has a named sender
}


def _stuck(sign: Sign, patience: Patience) -> Stuck | None:
    """For a root: the first limit that it exceeds, or None."""
    busy = sign.activity.kind in ("works", "starts")
    quiet = sign.seconds if sign.activity.kind == "device" else sign.quiet
    limit = _limit(sign, patience)
    starts = sign.activity.kind == "starts"
    lasting: list[tuple[str, float | None, float]] = [
        (str(sign.activity), sign.seconds if busy or sign.activity.kind == "device" else None, limit),
        (f"{sign.activity}, which has arrived", sign.delivered, limit),
        (f"{sign.activity}, without a sign of life", sign.silent, patience.lease if starts else patience.suspicion),
        (f"{sign.activity}, without an answer to a new generation", sign.unanswered, patience.suspicion),
    ]
    found = [
        Stuck(where, seconds)
        for where, seconds, most in lasting
        if seconds is not None and seconds > most and (quiet > most or seconds > BUSY * most)
    ]
    return found[0] if found else None


def _limit(sign: Sign, patience: Patience) -> float:
    if sign.activity.kind == "starts" or sign.activity.first:
        return patience.lease
    if sign.activity.kind == "waits":
        return patience.suspicion
    return _wait(sign, patience.suspicion)


def _wait(sign: Sign, suspicion: float) -> float:
    return max(suspicion, PROFILED * (sign.expected or 0.0))


def _deadlock(graph: nx.DiGraph, signs: Mapping[Worker, Sign], suspicion: float) -> list[Worker]:
    """Members that have waited for longer than `suspicion`, as have all workers that they reach."""
    return [
        worker
        for worker, sign in signs.items()
        if sign.member
        and all(
            other != COORDINATOR
            and signs[other].waits(suspicion)
            and signs[other].seconds > _wait(signs[other], suspicion)
            for other in (worker, *nx.descendants(graph, worker))
        )
    ]
