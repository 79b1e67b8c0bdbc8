"""A new coordinator picks the job up where the last one left it, from what the workers say.

    found = find({worker: participant.state(linked=True), ...})      # of every worker that can be reached
    for send in job.take_over(found): ...                            # a fresh Job of the same shape

The last coordinator may have died between two messages of one kind: what one worker received counts for all. The
newest agreed generation, by term and number, has the members. Generations that were announced and never agreed do not
count: a coordinator that was suspended, or replaced, may have announced them. The newest commit of a member is the
job's, and members that lack it get the very same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from recycle_schedules import Worker

from recycle_pp.wire.messages.workers import FIRST, Attempt, Commit, State


@dataclass(frozen=True)
class Found:
    """What the workers know of the job.

    generation  newest announced one, agreed or not; -1 before the first
    members     of the newest agreed generation
    live        those of them that were found
    commit      newest one; None before the first
    behind      members that lack it
    told        members that have it or will get it, and did not get it as parameters
    base        of the links between all live members; None if links have to be made anew
    attempt     newest one at the step after `committed`
    begun       a generation was agreed, so there are members
    """

    generation: int
    members: frozenset[Worker]
    live: frozenset[Worker]
    committed: int
    commit: Commit | None
    behind: frozenset[Worker]
    told: frozenset[Worker]
    base: int | None
    attempt: Attempt = FIRST
    begun: bool = True


def find(states: Mapping[Worker, State]) -> Found:
    """States as `Participant.state` gives them. Who was given up, or still catches up, is none of the members."""
    newest = max(states.values(), key=lambda state: state.agreed, default=State())
    generation, members = max((state.generation for state in states.values()), default=-1), set(newest.members)
    live = {worker: states[worker] for worker in members & states.keys()}
    committed = max((state.committed for state in live.values()), default=-1)
    commits = [s.commit for s in live.values() if s.commit and s.commit.step == committed]
    # A worker that does not know yet that it is a member begins with the state of its first generation (sharded state).
    behind = {w: s for w, s in live.items() if s.committed < committed and s.generation >= 0}
    if not commits and behind:
        # Only workers that came back in that step have it, as parameters: of no use to those who must apply it.
        known = {"generation": generation, "agreed": newest.agreed, "members": newest.members}
        return find({worker: msgspec.structs.replace(state, **known) for worker, state in behind.items()})
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
        begun=newest.agreed >= (0, 0),
    )
