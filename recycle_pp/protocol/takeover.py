"""Reconstructs the job on a new coordinator, from the states of the workers.

    found = find({member: participant.state(linked=True), ...})      # all reachable processes
    outcome = job.handle(CoordinatorReplaced(found))                 # job: a new Job with the same settings

The last coordinator may have died after it sent a message to only some of the workers, so a message that one worker has
received counts for all. The newest agreed generation, by term and number, determines the members. Announced generations
that were never agreed do not count, because a suspended or replaced coordinator may have announced them. The job's
newest commit is the newest one of any member. Members that lack this commit receive it again.

A member may have died since that generation was agreed, and its number may belong to a new process already. The new
process has not been in any generation, and the member counts as dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from recycle_pp.wire.messages.generations import FIRST, Attempt
from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.units import Layout
from recycle_pp.wire.messages.workers import Followed, State

from .understudy import reaches


@dataclass(frozen=True)
class Found:
    """The job, according to its workers.

    generation  newest announced generation, agreed or not; -1 before the first
    members     member of the newest agreed generation -> the worker that it plays
    live        members that were reached
    replaced    dead members whose new process was reached
    committed   newest committed step
    commit      message of the newest commit; None before the first commit
    behind      members that lack the newest commit
    informed    members that have received, or will receive, a commit message; not those that have only received
                parameters
    base        generation of the links between all live members; None if links must be rebuilt
    attempt     newest attempt at the step after `committed`
    begun       whether any generation was agreed
    layout      the layers of every stage; empty before the first generation
    understudies  live member -> its copy of another stage; only copies that are in the state after step `committed`, or
                will be once the member receives `commit`
    """

    generation: int
    members: Assignment
    live: frozenset[Member]
    committed: int
    commit: Commit | None
    behind: frozenset[Member]
    informed: frozenset[Member]
    base: int | None
    attempt: Attempt = FIRST
    begun: bool = True
    layout: Layout = field(default_factory=dict)
    understudies: dict[Member, Followed] = field(default_factory=dict)
    replaced: frozenset[Member] = frozenset()


def find(states: Mapping[Member, State]) -> Found:
    """The job that these workers run.

    states: process -> its `Participant.state`, for every reachable process. Some of these are not members, because they
        were removed or are still catching up
    """
    newest = max(states.values(), key=lambda state: state.agreed, default=State())
    generation, members = max((state.generation for state in states.values()), default=-1), newest.members
    begun = newest.agreed >= (0, 0)
    reached = {member: states[member] for member in members.keys() & states.keys()}
    replaced = frozenset(member for member, state in reached.items() if begun and state.generation < 0)
    live = {member: state for member, state in reached.items() if member not in replaced}
    committed = max((state.committed for state in live.values()), default=-1)
    commits = [s.commit for s in live.values() if s.commit and s.commit.step == committed]
    behind = {w: s for w, s in live.items() if s.committed < committed}
    if not commits and behind:
        # Only rejoined workers have this step. They received its parameters, but other members need its commit message,
        # which is lost. So the job continues from the step of those other members.
        known = {"generation": generation, "agreed": newest.agreed, "members": newest.members, "layout": newest.layout}
        found = find({member: msgspec.structs.replace(state, **known) for member, state in behind.items()})
        return replace(found, replaced=replaced)
    commit = commits[0] if commits else None
    followed = {member: s.understudy for member, s in live.items() if s.understudy is not None}
    bases = {state.base if state.generation == generation else None for state in live.values()}
    return Found(
        generation=generation,
        members=members,
        live=frozenset(live),
        committed=committed,
        commit=commit,
        behind=frozenset(behind),
        informed=frozenset(w for w, s in live.items() if w in behind or s.commit is not None),
        base=bases.pop() if len(bases) == 1 else None,
        attempt=max((state.attempt for state in live.values() if state.committed == committed), default=FIRST),
        begun=begun,
        layout=newest.layout,
        understudies={member: of for member, of in followed.items() if reaches(of, committed, commit)},
        replaced=replaced,
    )
