"""Who is stuck, from what the workers say they do: liveness is progress, not a sign of life.

    sign = Sign(Activity("works", "F", 20, (1, 3)), seconds=10.2, quiet=10.1)
    verdict = judge({Worker(1, 2): sign, ...}, Patience(suspicion=10.0, lease=600.0))
    verdict.stuck       # {Worker(1, 2): Stuck("F of micro-batch 1.3 in step 20", 10.2)}: to be killed
    verdict.deadlock    # nobody is to blame, and some will wait for ever: the generation has to be renewed
    verdict.graph       # who waits for whom, a networkx DiGraph; its nodes hold the signs
    verdict.no_disk     # workers whose reads of training data all wait for their disks; then none of these is stuck

An edge leads from who waits to who has to give. So a culprit is a root: it has no edge of its own, because it works, or
because what it waits for is here already. Only a root can be stuck, and it is when it has taken longer than its limit:

    starts, or runs its first op of a kind (which may compile)    `lease`
    works on an op                                                `suspicion`, or ten times its profiled time
    waits for what has been delivered to its process              `suspicion`
    gives no sign of life, or does not answer a new generation    `suspicion`

and its main thread got no processor time meanwhile, though it asked for none either; a thread that runs, or that a busy
machine lets wait, has ten times that. Time in a wait for the device is no such time: a processor spins there. Who waits
is never stuck as long as a root that works, within its limit, can be reached from it; where none can, and everybody on
the way has waited for longer than `suspicion` (for a message: than ten times what its link takes), what they wait for
was lost (a message, an all-reduce).

A disk that does not answer is not the fault of its reader. While the disks of all readers of training data are silent,
no reader is stuck in a read, and the job waits as long as the disks do. If one disk answers, the limits hold.

Pure: no clock, no sockets. All times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import networkx as nx
from recycle_schedules import Worker

from recycle_pp.wire.messages.activity import BUSY, Activity

PROFILED = 10  # times an op's profiled duration, for its limit
COORDINATOR = "coordinator"


class Patience(NamedTuple):
    suspicion: float
    lease: float


@dataclass(frozen=True)
class Sign:
    """What is known of one worker now.

    seconds     since it began its activity
    quiet       since its main thread last ran on a processor, or wanted to
    delivered   since what it waits for was in its process; None: it is not
    silent      since it last said anything
    unanswered  since a generation was announced whose report it owes; None: it owes none
    expected    seconds that its op takes by the profile, or a message on the link that it waits on; None: not known
    reading     since its oldest read of training data began, 0 if none is under way; None: it reads no file
    member      of the present generation; else it only starts, or catches up
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
        """For something that is not here yet, as far as it can be believed."""
        answers = self.unanswered is None and self.silent <= suspicion
        return self.activity.kind == "waits" and self.delivered is None and answers

    def to_json(self) -> dict[str, Any]:
        about = {name: getattr(self, name) for name in ("seconds", "quiet", "delivered", "silent", "unanswered")}
        return {"does": str(self.activity), "kind": self.activity.kind, **about}


class Stuck(NamedTuple):
    where: str
    seconds: float  # since its last progress


class Verdict(NamedTuple):
    stuck: dict[Worker, Stuck]
    deadlock: list[Worker]
    graph: nx.DiGraph
    no_disk: list[Worker]


def judge(signs: Mapping[Worker, Sign], patience: Patience, coordinator_works: bool = False) -> Verdict:
    """coordinator_works: it plans, waits for a majority or for a joiner; who waits for its word waits for that."""
    graph = waiting(signs, patience.suspicion, coordinator_works)
    stuck = {w: found for w, sign in signs.items() if not graph.out_degree(w) and (found := _stuck(sign, patience))}
    no_disk = _readers_without_disk(signs, patience.suspicion)
    for worker in no_disk:
        if signs[worker].activity.what == "data":
            stuck.pop(worker, None)
    deadlock = [] if stuck else _deadlock(graph, signs, patience.suspicion)
    return Verdict(stuck, deadlock, graph, no_disk)


def read_limit(suspicion: float) -> float:
    """Seconds after which a read waits for its disk, and between two probes of a disk. Four times shorter than the
    suspicion: before the first reader would be stuck, the others have tried their disks."""
    return min(1.0, suspicion / 4)


def _readers_without_disk(signs: Mapping[Worker, Sign], suspicion: float) -> list[Worker]:
    """All workers that read training data from files, if the reads of all of them wait; else none."""
    readers = {w: sign.reading for w, sign in signs.items() if sign.reading is not None}
    waiting = [w for w, seconds in readers.items() if seconds > read_limit(suspicion)]
    return waiting if len(waiting) == len(readers) else []


def waiting(signs: Mapping[Worker, Sign], suspicion: float, coordinator_works: bool = False) -> nx.DiGraph:
    """The graph of who waits for whom: an edge to each worker that has to give something."""
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
    """A peer that may not have begun the sum, or not ended it."""
    return other.stage == worker.stage and not _has_voted(step, sign)


def _owes_vote(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    return not _has_voted(step, sign)


def _has_voted(step: int, sign: Sign) -> bool:
    """Its vote of that step is out: it waits for the commit of it, or is further on."""
    awaits_commit = sign.activity.kind == "waits" and sign.activity.what == "commit"
    return sign.activity.step > step or (awaits_commit and sign.activity.step >= step)


def _owes_answer(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    """Orders and plans come when all have answered, or have given what the coordinator plans with."""
    return sign.unanswered is not None


def _owes_meeting(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    """Connections of groups wait for whoever has not come to them yet; who that is only they know."""
    comes = sign.activity.kind == "waits" and sign.activity.what == "links"
    return sign.unanswered is not None or not comes


_OWES: dict[str, Callable[[Worker, int, Worker, Sign], bool]] = {
    "sum": _owes_sum,
    "copy": _owes_sum,
    "commit": _owes_vote,
    "orders": _owes_answer,
    "plan": _owes_answer,
    "links": _owes_meeting,
    "tensor": lambda *_: False,  # always from somebody
}


def _stuck(sign: Sign, patience: Patience) -> Stuck | None:
    """Of a root: whatever has lasted too long, the longest first."""
    busy = sign.activity.kind in ("works", "starts")
    quiet = sign.seconds if sign.activity.kind == "device" else sign.quiet
    limit = _limit(sign, patience)
    starts = sign.activity.kind == "starts"
    lasting: list[tuple[str, float | None, float]] = [
        (str(sign.activity), sign.seconds if busy or sign.activity.kind == "device" else None, limit),
        (f"{sign.activity}, which has come", sign.delivered, limit),
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
    """Members that wait, from whom only such can be reached, for longer than `suspicion` all of them."""
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
