"""Maps members to workers. A member is a launched process with a number; a worker is a role W(d,s).

    assignment = initial(pipelines=2, stages=2)                         # member 3 plays worker 1.1
    assignment = refilled(assignment, present={0, 2}, stages=2)         # stage 1 has no live worker

    assignment = exchanged(assignment, 0, Worker(1, 1))                 # member 0 plays worker 1.1 from now on
    assignment = completed({0: Worker(1, 1)}, assignment, all)          # the same, if others may be outdated

The job owns the assignment and changes it only if a stage has no live worker left. Its understudy then takes over that
stage. If there is none, members of other stages do, and all members load the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recycle_schedules import Worker

from recycle_pp.wire.messages.members import Assignment, Member


def initial(pipelines: int, stages: int) -> Assignment:
    """Neighbouring members play neighbouring stages of one pipeline."""
    return {member: Worker(*divmod(member, stages)) for member in range(pipelines * stages)}


def refilled(assignment: Mapping[Member, Worker], present: Collection[Member], stages: int) -> Assignment:
    """An assignment in which every stage has a present member. Moves as few members as possible.

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
    """An assignment in which `member` plays `worker`. The member that has played it plays the other one's worker."""
    other = next(m for m, played in assignment.items() if played == worker)
    return {**assignment, other: assignment[member], member: worker}


def completed(known: Mapping[Member, Worker], others: Mapping[Member, Worker], all: Collection[Worker]) -> Assignment:
    """An assignment of all workers in which the members in `known` play these workers. Each other member plays its
    worker in `others`, or another one if that one is taken.

    others: all members, with a worker each, perhaps the same one for several of them
    """
    new = dict(known)
    for member, worker in sorted(others.items()):
        if worker not in new.values():
            new.setdefault(member, worker)
    free = sorted(set(all).difference(new.values()))
    return new | dict(zip(sorted(others.keys() - new.keys()), free, strict=True))
