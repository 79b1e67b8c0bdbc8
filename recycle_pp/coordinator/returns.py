"""Starts the workers of a lost or new node once the node can connect to the nodes of all live workers.

returns = Returns(state)
returns.newcomer(rank)              # a new node has replaced a lost one
returns.cut_off(rank, hosts)        # the worker left because of a cut link; its supervisor is still connected
returns.reconnected(rank)           # the rank's supervisor was lost and has reconnected
returns.probed(rank, message)       # the supervisor's answer to a Probe
returns.cut                         # rank -> message for users: the nodes that the rank's node cannot reach

A worker with a cut link delays all others for `control.suspicion` and must then leave again. So before a worker starts,
its supervisor probes the nodes of all live workers (`Probe`), every `AGAIN_SECONDS`, until it can reach all of them.
The delay before the first probe doubles each time the worker has to leave, because supervisors may be able to connect
when workers are not, for instance behind a firewall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from recycle_pp.telemetry.events.coordinators import LinkRestored, NodeJoined
from recycle_pp.wire.connection import Peer
from recycle_pp.wire.messages.supervisors import Probe, Probed, Target

from .ranks import Rank
from .state import JobState

AGAIN_SECONDS = 3.0  # between two probes
LONGEST_SECONDS = 600.0  # limit on the delay before the first probe after a cut


class Returns:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self._events: dict[int, type[NodeJoined | LinkRestored] | None] = {}  # waiting rank -> the event of its start
        self._cuts: Counter[int] = Counter()  # rank -> number of times that its worker had to leave
        self.cut: dict[int, str] = {}  # waiting rank -> sentence about the nodes that it cannot reach

    def newcomer(self, rank: Rank) -> None:
        self._begin(rank, NodeJoined, 0.0)

    def reconnected(self, rank: Rank) -> None:
        self._begin(rank, None, 0.0)

    def cut_off(self, rank: Rank, hosts: Sequence[str]) -> None:
        """Starts the worker again once its node can connect. hosts: nodes with a cut link to the rank's node."""
        self._cuts[rank.number] += 1
        self._begin(rank, LinkRestored, min(LONGEST_SECONDS, AGAIN_SECONDS * 2 ** (self._cuts[rank.number] - 1)))
        self.cut.setdefault(rank.number, f"{rank.host} cannot reach {' and '.join(hosts)}")

    def probed(self, rank: Rank, message: Probed) -> None:
        if not self._waits(rank, rank.supervisor):
            return
        if not message.unreachable:
            self._start(rank)
            return
        self._state.timers.after(AGAIN_SECONDS, self._probe, rank, rank.supervisor)
        sentence = f"{rank.host} cannot reach {' and '.join(message.unreachable)}"
        if sentence not in self.cut.values():  # print it only once for all workers of a node
            self._state.recorder.say(f"{sentence}: its workers start once the network between them works")
        self.cut[rank.number] = sentence

    def _begin(self, rank: Rank, event: type[NodeJoined | LinkRestored] | None, seconds: float) -> None:
        self._events[rank.number] = event
        self.cut.pop(rank.number, None)
        if seconds:
            self._state.timers.after(seconds, self._probe, rank, rank.supervisor)
        else:
            self._probe(rank, rank.supervisor)

    def _probe(self, rank: Rank, supervisor: Peer | None) -> None:
        if not self._waits(rank, supervisor):
            return
        nodes = {
            (other.host, other.place.host): Target(other.host or "", other.place.host, other.place.port)
            for other in self._state.roster
            if other.alive and other.place is not None and other.supervisor is not None
        }
        targets = [target for (host, _), target in sorted(nodes.items()) if host != rank.host]
        if targets:
            rank.send(Probe(targets))
        else:
            self._start(rank)

    def _start(self, rank: Rank) -> None:
        self.cut.pop(rank.number, None)
        if event := self._events.pop(rank.number):
            self._state.recorder.event(event(worker=str(rank.role), rank=rank.number, host=rank.host))
        rank.spawn()

    def _waits(self, rank: Rank, supervisor: Peer | None) -> bool:
        """Whether this supervisor still has to start the worker."""
        if rank.number not in self._events or self._state.lifecycle.over:
            return False
        if rank.supervisor is not supervisor:  # a newer supervisor has this rank, and gets its own probes
            return False
        if rank.alive or supervisor is None:
            del self._events[rank.number]
            self.cut.pop(rank.number, None)
            return False
        return True
