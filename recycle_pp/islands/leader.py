"""The duties of an island's leader, one of its workers: the lease, the removal of old objects, and reports about all
islands.

    leader = Leader(settings, send)
    if first_holder_of_the_first_unit:                      # so an island has one leader, and a dead one is replaced
        leader.renew(store, state, step)                    # before and after every transfer; raises StoreError
        leader.maintain(store, view, state)                 # raises StoreError
        leader.report(view, closings, generation)
    leader.leave(store)                                     # when the job ends; raises StoreError

Used by the thread of a `Client`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from recycle_pp.config.settings import Settings
from recycle_pp.storage.store import Absent, Store, StoreError
from recycle_pp.wire.messages.islands import IslandsSeen, OuterState
from recycle_pp.wire.messages.lifecycle import CannotRun
from recycle_pp.wire.messages.table import Message

from . import objects, rounds

PRUNE_SECONDS = 50.0  # between two removals of old objects
SUMS = 10  # checksums are kept for this many times as many rounds as deltas


class Leader:
    def __init__(self, settings: Settings, send: Callable[[Message], None]) -> None:
        """send: sends a message to the coordinator"""
        assert settings.islands.name is not None
        self._me, self._keep, self._owner = (
            settings.islands.name,
            settings.islands.keep,
            objects.owner(settings.run.dir),
        )
        self._send = send
        self._renewed = self._pruned = 0.0
        self._past: set[str] = set()  # islands whose objects this leader has deleted
        self._reported: tuple[int, IslandsSeen] | None = None  # generation, message

    def renew(self, store: Store, state: OuterState, step: int) -> None:
        """Renews the lease if this is due. If another job holds it, stops this job instead, and raises StoreError.

        state  the position of the island
        step   number of committed steps
        """
        now = time.monotonic()
        if now - self._renewed >= rounds.RENEW_SECONDS or not self._renewed:
            about = {"owner": self._owner, "step": step, "round": state.applied, "time": time.time()}
            if self._has_lost(store):  # both would train on the same samples
                reason = f"islands.name={self._me} is now used by another job in {store.url}; choose a different name"
                self._send(CannotRun(reason))
                raise StoreError(reason)
            store.put(objects.lease_path(self._me), json.dumps({"name": self._me, **about}).encode())
            self._renewed = now

    def leave(self, store: Store) -> None:
        """Deletes the lease, unless another job holds it."""
        if not self._has_lost(store):
            store.delete([objects.lease_path(self._me)])

    def _has_lost(self, store: Store) -> bool:
        """Whether another job holds the lease. The admission does not notice this if both start together, or if this
        job was cut off from the store until its lease expired."""
        try:
            owner = objects.owner_in(store.get(objects.lease_path(self._me)))
        except Absent:
            return False
        return owner not in (None, self._owner)

    def maintain(self, store: Store, view: objects.View, state: OuterState) -> None:
        """Deletes old objects if this is due. state: the position of the island"""
        now = time.monotonic()
        if now - self._pruned >= PRUNE_SECONDS:
            self._prune(store, view, state.applied)
            self._pruned = now

    def _prune(self, store: Store, view: objects.View, applied: int) -> None:
        """Deletes objects that no island needs any longer, and records which islands they were from."""
        first = rounds.prunable(view, applied, self._keep)
        first_sums = min(first, applied - SUMS * self._keep)
        old = [
            path
            for number in [*view.delivered, *(number for number, _ in view.partial)]
            if number < first
            for path in store.list(f"rounds/{number:06d}")
            if path.endswith(".delta")
        ]
        names = {path.split("/")[2] for path in old}
        for number, of_islands in view.sums.items():
            if number < first_sums:
                old += [part.path for parts in of_islands.values() for part in parts]
        for name in sorted(names - self._past):
            store.put(objects.past_path(name), b"")
        self._past |= names
        # Delete the objects of incomplete snapshots too, which a dead worker may have left.
        of_snapshots = ((path, objects.round_of(path)) for path in store.list("theta"))
        old += [path for path, after in of_snapshots if after is not None and after < first]
        store.delete(old)

    def report(self, view: objects.View, closings: rounds.Closings, generation: int) -> None:
        """Reports to the coordinator which islands are live and which rounds are closed, if that has changed."""
        live = {*rounds.alive(view.leases), self._me}
        closed = {
            number: {name: share.samples for name, share in sorted(of.items())} for number, of in closings.items()
        }
        seen = IslandsSeen(sorted(live), sorted(view.leases.keys() - live), closed)
        if self._reported != (generation, seen):
            self._send(seen)
            self._reported = generation, seen
