"""A new coordinator picks the job up where the last one left it, from what the workers say.

    found = find({worker: participant.state(linked=True), ...})      # of every worker that can be reached
    for send in job.take_over(found): ...                            # a fresh Job of the same shape

The last coordinator may have died between two messages of one kind: whatever it told anybody counts for all. The newest
generation that anybody knows says who is a member; the newest commit that a member has is the job's, and members that
lack it get the very same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from recycle_schedules import Worker

from recycle_pp.wire.messages.workers import FIRST, Attempt, Commit, State


@dataclass(frozen=True)
class Found:
    """generation: -1 if nobody is a member yet; commit: the newest one, None before the first; behind: who lacks it;
    told: who has been told of it, or will be, and did not get it as parameters; base: of the links that stand between
    all who live, None if they have to be made anew; attempt: the newest at the step after `committed`."""

    generation: int
    members: frozenset[Worker]
    live: frozenset[Worker]
    committed: int
    commit: Commit | None
    behind: frozenset[Worker]
    told: frozenset[Worker]
    base: int | None
    attempt: Attempt = FIRST


def find(states: Mapping[Worker, State]) -> Found:
    """States as `Participant.state` gives them. Who was given up, or still catches up, is none of the members."""
    newest = max(states.values(), key=lambda state: state.generation, default=State())
    generation, members = newest.generation, set(newest.members)
    live = {worker: states[worker] for worker in members & states.keys()}
    committed = max((state.committed for state in live.values()), default=-1)
    commits = [s.commit for s in live.values() if s.commit and s.commit.step == committed]
    # Who has not heard yet that it is a member begins with the state of its first generation (sharded state).
    behind = {w: s for w, s in live.items() if s.committed < committed and s.generation >= 0}
    if not commits and behind:
        # Only who came back in that step has it, as parameters: of no use to those who must apply it.
        return find({
            w: msgspec.structs.replace(state, generation=generation, members=newest.members)
            for w, state in behind.items()
        })  # fmt: skip
    bases = {state.base if state.generation == generation else None for state in live.values()}
    return Found(
        generation=generation,
        members=frozenset(members),
        live=frozenset(live),
        committed=committed,
        commit=commits[0] if commits else None,
        behind=frozenset(behind),
        told=frozenset(w for w, s in live.items() if w in behind or s.commit is not None),
        base=bases.pop() if len(bases) == 1 else None,
        attempt=max((state.attempt for state in live.values() if state.committed == committed), default=FIRST),
    )
