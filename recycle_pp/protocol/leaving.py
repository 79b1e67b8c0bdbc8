"""Who of those whose machines are taken away may go with a commit.

    leavers({...}, live, copies=2)

A worker leaves if a peer stays. Of sharded state one of a stage leaves at a time: the copies that it holds are made
again before the next one goes; the only copies never leave.
"""

from __future__ import annotations

from collections.abc import Collection

from recycle_schedules import Worker


def leavers(leaving: Collection[Worker], live: Collection[Worker], copies: int = 0) -> set[Worker]:
    """copies: of each block of sharded state; 0: everybody has all of it."""
    stay = {w.stage for w in live if w not in leaving}
    found = [w for w in sorted(leaving, reverse=True) if w in live and w.stage in stay]
    if not copies:
        return set(found)
    return set({w.stage: w for w in found}.values()) if copies > 1 else set()
