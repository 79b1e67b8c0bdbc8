"""Maps members to workers. A member is a launched process with a number; a worker is a role W(d,s).

    assignment = initial(pipelines=2, stages=2)                         # member 3 plays worker 1.1
    assignment = refilled(assignment, present={0, 2}, stages=2)         # stage 1 has no live worker

    assignment = exchanged(assignment, 0, Worker(1, 1))                 # member 0 plays worker 1.1 from now on
    assignment = completed({0: Worker(1, 1)}, others, all)              # the same; `others` may use a worker twice
    assignment = spawned(orders, {0, 2}, pipelines=2, stages=2)         # used by a new coordinator

The job owns the assignment, and changes it only if a stage has no live worker left. If that stage has an understudy (a
member of another stage with an up-to-date copy of its state), the understudy takes it over. Otherwise members of other
stages take it over, and all members load the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recycle_schedules import Worker

from recycle_pp.wire.messages.members import Assignment, Member


def initial(pipelines: int, stages: int) -> Assignment:
    """The assignment at the start: consecutive members play consecutive stages of a pipeline."""
    return {member: Worker(*divmod(member, stages)) for member in range(pipelines * stages)}


def refilled(assignment: Mapping[Member, Worker], present: Collection[Member], stages: int) -> Assignment:
    """An assignment in which every stage has at least one present member. Moves as few present members as possible.

    assignment  member -> worker, a bijection onto all D * P workers
    present     members that can take part
    Raises ValueError if there are fewer present members than stages.
    """
    if len(present) < stages:
        raise ValueError(f"live workers: {len(present)}, fewer than the {stages} stages")
    new = dict(assignment)
    while lost := [s for s in range(stages) if not any(new[m].stage == s for m in present)]:
        size = [sum(new[m].stage == s for m in present) for s in range(stages)]
        richest = size.index(max(size))
        mover = max((m for m in present if new[m].stage == richest), key=lambda m: new[m])
        vacant = Worker(new[mover].pipeline, lost[0])
        absent = next(m for m, worker in new.items() if worker == vacant)
        new[mover], new[absent] = vacant, new[mover]
    return new


def exchanged(assignment: Mapping[Member, Worker], member: Member, worker: Worker) -> Assignment:
    """The assignment after `member` and the member that plays `worker` have exchanged their workers."""
    other = next(m for m, played in assignment.items() if played == worker)
    return {**assignment, other: assignment[member], member: worker}


def completed(known: Mapping[Member, Worker], others: Mapping[Member, Worker], all: Collection[Worker]) -> Assignment:
    """An assignment of all members. Members in `known` play their worker in `known`. Each other member plays its worker
    in `others`, or a free worker if that one is taken.

    known   member -> worker; no two members have the same worker
    others  member -> worker, for all members; several members may have the same worker
    all     all workers
    """
    new = dict(known)
    for member, worker in sorted(others.items()):
        if worker not in new.values():
            new.setdefault(member, worker)
    free = sorted(set(all).difference(new.values()))
    return new | dict(zip(sorted(others.keys() - new.keys()), free, strict=True))


def spawned(orders: Mapping[Member, Worker], live: Collection[Member], pipelines: int, stages: int) -> Assignment:
    """The assignment of a running job, reconstructed from the orders to start its processes.

    orders  member -> the worker in the newest order to start the member's process
    live    members whose processes run

    If several members were started as the same worker, the live one plays it, because the job has since assigned
    another worker to the others.
    """
    known: Assignment = {}
    for member in sorted(orders, key=lambda member: (member not in live, member)):
        if orders[member] not in known.values():
            known[member] = orders[member]
    workers = initial(pipelines, stages)
    return completed(known, {**workers, **orders}, workers.values())
