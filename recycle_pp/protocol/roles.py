"""Assigns new roles to ranks when a stage has lost all its workers.

    roles = fill_stages({0: Worker(0, 0), 1: Worker(0, 1)}, present={0, 2, 3}, stages=2)

The last resort of the recovery contract: workers of other stages take over, and all load the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from recycle_schedules import Worker


def fill_stages(roles: Mapping[int, Worker], present: Collection[int], stages: int) -> dict[int, Worker]:
    """New roles for all ranks, so that every stage has a present rank. Moves as few ranks as possible.

    roles    rank -> its current role, a bijection onto all D * P workers
    present  ranks that can take part
    Raises ValueError if fewer ranks are present than there are stages.
    """
    if len(present) < stages:
        raise ValueError(f"live workers: {len(present)}, fewer than the {stages} stages")
    new = dict(roles)
    while lost := [s for s in range(stages) if not any(new[r].stage == s for r in present)]:
        size = [sum(new[r].stage == s for r in present) for s in range(stages)]
        richest = size.index(max(size))
        mover = max((r for r in present if new[r].stage == richest), key=lambda r: new[r])
        vacant = Worker(new[mover].pipeline, lost[0])
        absent = next(r for r, role in new.items() if role == vacant)
        new[mover], new[absent] = vacant, new[mover]
    return new
