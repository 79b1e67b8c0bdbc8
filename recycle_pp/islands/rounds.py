"""Decides the next action of an island from a listing of the store: wait, close the round, or apply rounds.

    view = View.of(store.objects(), fragments=1)
    decision = decide(view, closings, "oregon", Position(applied=12, sent=True), waited=3.0, patience=600.0)

    Wait()                                              # look again later
    Close(12, {"oregon": Share(1200, 6400), ...})       # create closed.json with this content, if it is absent
    Apply(snapshot=None, rounds=[12])                   # compute theta after these rounds

A round is closed by the object closed.json, which is created only if it is absent. If two islands close a round at the
same time, one succeeds, and the other reads the closed.json of the first. The set of islands in closed.json, and the
objects that these islands delivered, never change. Therefore all islands compute the same theta.

Pure: no store, no clock. The caller measures `waited`, and the store's clock gives the ages of leases, because the
clocks of islands may differ by hours.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .fragments import takes_part
from .objects import View

RENEW_SECONDS = 30.0  # between two renewals of a lease
GONE_SECONDS = 120.0  # age of a lease at which its island counts as gone


class Share(NamedTuple):
    """An island's part in a round. steps: number of its steps when it cut its delta. samples: see `Delivery`"""

    steps: int
    samples: int


class Position(NamedTuple):
    """The position of this island, see `OuterState`. sent: whether the island has cut its delta of round `applied`"""

    applied: int
    sent: bool


@dataclass(frozen=True)
class Wait:
    """Look again later."""


@dataclass(frozen=True)
class Close:
    """Close round `number` with these islands."""

    number: int
    islands: Mapping[str, Share]


@dataclass(frozen=True)
class Apply:
    """Compute theta.

    snapshot  number of rounds in the snapshot to begin with; None: begin with this island's theta
    rounds    numbers of the rounds to apply, ascending
    """

    snapshot: int | None
    rounds: tuple[int, ...]

    @property
    def applied(self) -> int:
        """Number of rounds in the resulting theta."""
        return self.rounds[-1] + 1 if self.rounds else self.snapshot or 0

    def of_layer(self, layer: int, fragments: int) -> Apply:
        """The same without the rounds that do not synchronise this layer."""
        return Apply(self.snapshot, tuple(number for number in self.rounds if takes_part(layer, number, fragments)))


Closings = Mapping[int, Mapping[str, Share]]
"""round -> island -> its share; the content of the files closed.json that this island has read"""


def decide(
    view: View, closings: Closings, me: str, at: Position, waited: float, patience: float
) -> Wait | Close | Apply:
    """
    closings  of the rounds in `view.closed` from round `at.applied` on, without those whose deltas were deleted
    me        name of this island
    waited    seconds since this island found its delta of round `at.applied` complete in the store
    patience  seconds after which a round is closed without the islands that are late
    """
    path = path_from(view, closings, me, at)
    if path is not None:
        return path
    delivered = view.delivered.get(at.applied, {})
    if at.applied in view.closed or not at.sent or me not in delivered:
        return Wait()
    late = alive(view.leases) - set(delivered)
    if late and waited < patience:
        return Wait()
    return Close(at.applied, {name: Share(of.steps, of.samples) for name, of in sorted(delivered.items())})


def path_from(view: View, closings: Closings, me: str, at: Position, goal: int | None = None) -> Apply | None:
    """The rounds by which theta of this island can advance; None if there are none.

    After the first round, stops before a round with a delta of this island. An island that restarts from an older
    checkpoint applies such a round only after it has repeated the steps in the delta (`protocol.outer_rounds`).

    goal: number of rounds in the resulting theta, if another worker of the island has computed it already
    """
    first, snapshot = at.applied, None
    if not _is_there(view, closings, first):  # deleted, or not closed yet
        ahead = [number for number in view.snapshots if number > first and (goal is None or number <= goal)]
        if not ahead:
            return None
        first = snapshot = max(ahead)
    rounds: list[int] = []
    while _is_there(view, closings, first) and (goal is None or first < goal):
        if me in closings[first] and (rounds or snapshot is not None):
            break
        rounds.append(first)
        first += 1
    return Apply(snapshot, tuple(rounds))


def own(closings: Closings, me: str, first: int, applied: int) -> dict[int, int]:
    """Round -> number of steps of this island's delta in it, see `OuterState.mine`. Only for the rounds from `first` on
    that theta after `applied` rounds contains."""
    return {number: of[me].steps for number, of in closings.items() if first <= number < applied and me in of}


def chosen(
    view: View, closings: Closings, me: str, at: Position, mine: Apply, goal: int, reported: int
) -> Apply | None:
    """The rounds that a worker applies, so that all workers of its island compute the same theta. None: look again
    later.

    mine      the rounds that this worker sees
    goal      number of rounds in the newest theta of another worker (`RoundGoal`); 0 if none is newer
    reported  number of rounds in the theta that this worker has reported; 0 without one
    """
    if at.applied < reported and goal <= reported:
        return None  # the commit that applies the reported theta may be on its way
    if goal <= at.applied or goal == mine.applied:
        return mine
    path = path_from(view, closings, me, at, goal)
    if path is not None and path.applied == goal:
        return path
    return mine if mine.applied > goal else None  # None: the listing lacks what another worker has seen


def _is_there(view: View, closings: Closings, number: int) -> bool:
    """Whether a round is closed, and all its deltas are in the listing. Old deltas are deleted."""
    return number in closings and all(
        view.delivery(number, name, share) is not None for name, share in closings[number].items()
    )


def alive(leases: Mapping[str, float]) -> set[str]:
    """Islands whose lease is not older than GONE_SECONDS, compared with the newest lease.

    leases: island -> time of its latest renewal, all by the same clock"""
    newest = max(leases.values(), default=0.0)
    return {name for name, renewed in leases.items() if newest - renewed <= GONE_SECONDS}


def prunable(view: View, applied: int, keep: int) -> int:
    """Number of the first round whose deltas must be kept. Older ones may be deleted, and older snapshots too.

    The files closed.json are never deleted, because a round without one could be closed again.

    Keeps the newest complete snapshot and all rounds from it on, and at least `keep` rounds."""
    newest = max(view.snapshots, default=0)
    return max(0, min(newest, applied - keep))


def closing_text(islands: Mapping[str, Share], by: str) -> bytes:
    """The content of closed.json. by: name of the island that closes the round"""
    shares = {name: {"steps": of.steps, "samples": of.samples} for name, of in sorted(islands.items())}
    return json.dumps({"islands": sorted(islands), "shares": shares, "by": by}).encode()


def closing_of(content: bytes) -> dict[str, Share]:
    """The shares in closed.json. Raises ValueError if the content is invalid."""
    try:
        shares = json.loads(content)["shares"]
        return {str(name): Share(int(of["steps"]), int(of["samples"])) for name, of in shares.items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not a description of a closed round: {error}") from None


def names(islands: Collection[str]) -> str:
    """Names in a sentence: "frankfurt and oregon"."""
    *most, last = sorted(islands)
    return f"{', '.join(most)} and {last}" if most else last
