"""Detects stuck workers from their reported activities. A worker must make progress; it is not enough that it answers.

    sign = Sign(Activity("works", "F", 20, (1, 3)), seconds=10.2, quiet=10.1)
    verdict = judge({Worker(1, 2): sign, ...}, Patience(suspicion=10.0, lease=600.0))
    verdict.stuck       # {Worker(1, 2): Stuck("F of micro-batch 1.3 in step 20", 10.2)}: workers to kill
    verdict.deadlock    # workers that will wait forever although none is stuck; a new generation is needed
    verdict.graph       # the wait-for graph, a networkx DiGraph; each node contains its sign
    verdict.no_disk     # all readers of training data if none of their disks answers; no reader is stuck in that case

An edge leads from a waiting worker to each worker that it waits for. A root is a worker without an outgoing edge: it
works, or the message that it waits for has already arrived. Only a root can be stuck, and it is stuck if it exceeds its
limit:

    starts, or runs its first op of a kind (which may compile)    `lease`, or `suspicion` if its process is suspended
    works on an op                                                `suspicion`, or ten times the op's profiled time
    waits for a message that has arrived in its process           `suspicion`
    is silent, or does not answer a new generation                `suspicion`

These limits apply if the main thread neither ran nor was ready to run in that time. If it ran, or waited for a core on
a busy machine, they are ten times as long. A wait for the device does not count as running, although the CPU spins.
A worker whose message has not arrived is never stuck, but several can be deadlocked, because a message or an all-reduce
was lost. This is assumed if a worker and all workers that it can reach in the graph have waited for longer than
`suspicion` (for a message or a sum, also longer than ten times its profiled time). With TCP, the wait for a message, a
sum or a copy counts from the arrival of the last bytes, so a slow network does not count as a deadlock.

If no disk with training data answers, no reader is stuck, and the job waits for the disks. As soon as one disk answers,
the limits apply again.

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
    """Time limits of the table above, in seconds."""

    suspicion: float
    lease: float


@dataclass(frozen=True)
class Sign:
    """The vital signs of one worker. Times are in seconds.

    seconds     time since the worker's activity started, or since bytes of the message that it waits for last arrived
    quiet       time since its main thread last ran or was ready to run
    delivered   time since the message that it waits for arrived in its process; None: not arrived
    silent      time since its last message
    unanswered  time since the announcement of a generation that it has not answered; None: it has answered
    expected    profiled time of its op, or of the message or sum that it waits for; None: unknown
    reading     age of its oldest unfinished read of training data; 0: none is unfinished; None: it reads no files
    path        the file of that read; "" if it reads no files
    delayed     time of the activity in which its main thread was ready to run but had no core
    lacks       if it waits for a sum: the workers whose messages are missing, if they are known
    suspended   whether its process is suspended, for example by SIGSTOP
    member      whether it is a member of the current generation; otherwise it is starting or catching up
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
    path: str = ""
    delayed: float = 0.0
    lacks: tuple[Worker, ...] = ()
    suspended: bool = False

    def waits(self, suspicion: float) -> bool:
        """Whether the worker waits for something that has not arrived. False if the worker is silent or has not
        answered, because its reported activity is then out of date."""
        answers = self.unanswered is None and self.silent <= suspicion
        return self.activity.kind == "waits" and self.delivered is None and answers

    def to_json(self) -> dict[str, Any]:
        activity = self.activity
        shown = ("seconds", "quiet", "delivered", "silent", "unanswered", "delayed", "reading", "path", "suspended")
        about = {name: getattr(self, name) for name in shown} | {"lacks": [str(worker) for worker in self.lacks]}
        does = activity.at_start() if activity.kind == "starts" else str(activity)
        return {"does": does, "kind": activity.kind, "what": activity.what, "first": activity.first, **about}


class Stuck(NamedTuple):
    where: str
    seconds: float  # time since the last progress


class Verdict(NamedTuple):
    stuck: dict[Worker, Stuck]
    deadlock: list[Worker]
    graph: nx.DiGraph
    no_disk: list[Worker]


def judge(signs: Mapping[Worker, Sign], patience: Patience, coordinator_works: bool = False) -> Verdict:
    """Finds stuck and deadlocked workers.

    coordinator_works: whether the coordinator is planning, or waiting for a majority or a joiner. Workers that wait
        for a message from the coordinator then do not count as deadlocked.
    """
    graph = waiting(signs, patience.suspicion, coordinator_works)
    stuck = {w: found for w, sign in signs.items() if not graph.out_degree(w) and (found := _stuck(sign, patience))}
    no_disk = _readers_without_disk(signs, patience.suspicion)
    for worker in no_disk:
        if signs[worker].activity.what == "data":
            stuck.pop(worker, None)
    deadlock = [] if stuck else _deadlock(graph, signs, patience.suspicion)
    return Verdict(stuck, deadlock, graph, no_disk)


def read_limit(suspicion: float) -> float:
    """Seconds after which a read counts as waiting for its disk. Disks are probed at the same interval. At most a
    quarter of `suspicion`, so that other workers have probed their disks before a reader counts as stuck."""
    return min(1.0, suspicion / 4)


def _readers_without_disk(signs: Mapping[Worker, Sign], suspicion: float) -> list[Worker]:
    """All workers that read training data from files, if all of them wait for their disks; otherwise none."""
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
    """The members that `worker` waits for."""
    members = {w: s for w, s in signs.items() if s.member and w != worker}
    if awaited.peer is not None:
        return [w for w in members if w == awaited.peer]
    return [w for w, sign in members.items() if _OWES[awaited.what](worker, awaited.step, w, sign)]


def _owes_sum(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    """Whether `other` is a peer that may not have finished the sum."""
    return other.stage == worker.stage and not _has_voted(step, sign)


def _owes_vote(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    return not _has_voted(step, sign)


def _has_voted(step: int, sign: Sign) -> bool:
    """Whether the worker has voted on `step`. If so, it waits for the commit of this step, or works on a later step."""
    awaits_commit = sign.activity.kind == "waits" and sign.activity.what == "commit"
    return sign.activity.step > step or (awaits_commit and sign.activity.step >= step)


def _owes_answer(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    """Whether `other` delays the orders and plans, which arrive once all workers have answered the announcement of the
    generation."""
    return sign.unanswered is not None


def _owes_meeting(worker: Worker, step: int, other: Worker, sign: Sign) -> bool:
    """Whether `other` may be missing in a group, which waits until all its members connect. Only the group knows its
    missing members, so every worker that is not connecting counts as missing."""
    comes = sign.activity.kind == "waits" and sign.activity.what == "links"
    return sign.unanswered is not None or not comes


_OWES: dict[str, Callable[[Worker, int, Worker, Sign], bool]] = {
    "sum": _owes_sum,
    "copy": _owes_sum,
    "commit": _owes_vote,
    "orders": _owes_answer,
    "plan": _owes_answer,
    "links": _owes_meeting,
    "tensor": lambda *_: False,  # never called, because `Activity.peer` is set for a tensor
}


def _stuck(sign: Sign, patience: Patience) -> Stuck | None:
    """The first limit that this root of the graph exceeds; None if it exceeds none."""
    busy = sign.activity.kind in ("works", "starts")
    quiet = sign.seconds if sign.activity.kind == "device" else sign.quiet
    limit = _limit(sign, patience)
    starts = sign.activity.kind == "starts"
    lasting: list[tuple[str, float | None, float]] = [
        (str(sign.activity), sign.seconds if busy or sign.activity.kind == "device" else None, limit),
        (f"{sign.activity}, although it has arrived", sign.delivered, limit),
        (f"{sign.activity}, without a heartbeat", sign.silent, patience.lease if starts else patience.suspicion),
        (f"{sign.activity}, without an answer to the new generation", sign.unanswered, patience.suspicion),
    ]
    found = [
        Stuck(where, seconds)
        for where, seconds, most in lasting
        if seconds is not None and seconds > most and (quiet > most or seconds > BUSY * most)
    ]
    return found[0] if found else None


def _limit(sign: Sign, patience: Patience) -> float:
    """Limit on the duration of the worker's activity, in seconds."""
    if sign.activity.kind == "starts" or sign.activity.first:
        return patience.suspicion if sign.suspended else patience.lease
    if sign.activity.kind == "waits":
        return patience.suspicion
    return _wait(sign, patience.suspicion)


def _wait(sign: Sign, suspicion: float) -> float:
    """Limit on an op or a wait in seconds: `suspicion`, or a multiple of its profiled time if that is longer."""
    return max(suspicion, PROFILED * (sign.expected or 0.0))


def _deadlock(graph: nx.DiGraph, signs: Mapping[Worker, Sign], suspicion: float) -> list[Worker]:
    """Members that have waited for longer than `_wait`, if all workers that they can reach in the graph have too."""
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
