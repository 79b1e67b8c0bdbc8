"""Prints, at the start of a job that spans hosts, what is wrong with its machines.

    checks = StartChecks(state)
    checks.welcomed(3)                    # the coordinator sends its welcome to the supervisor of rank 3
    checks.registered(rank, clock)        # the answer has arrived; clock: time on the rank's machine when it was sent
    checks.checked(rank, message)         # the result of `machine_checks.quick`, a few seconds later

Versions are compared with those of rank 0's machine, clocks with the coordinator's. If several machines have the same
problem, one line names them. The difference between two clocks is known to within a few milliseconds, because the
machine reads its clock between the welcome and the answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from recycle_pp.telemetry.words import plural
from recycle_pp.wire.messages.machines import Judgement
from recycle_pp.wire.messages.supervisors import MachineChecked

from .ranks import Rank
from .state import JobState

CLOCK = 0.5  # maximum clock difference in seconds; the events of a job are sorted by the clocks of its machines
TOGETHER_SECONDS = 2.0  # time to collect the results of several machines before they are printed
NAMED = 4  # maximum number of machines named in one line


class StartChecks:
    def __init__(self, state: JobState) -> None:
        self._state = state
        self._welcomed: dict[int, float] = {}
        self._wrong_clocks: set[tuple[str, int | None] | None] = set()  # nodes whose wrong clock was printed
        self._first: MachineChecked | None = None  # result of rank 0's machine
        self._new: list[tuple[str, MachineChecked]] = []  # (name of a machine, its result); not printed yet
        # (name of a machine, its result); not compared with the result of rank 0's machine yet
        self._uncompared: list[tuple[str, MachineChecked]] = []

    def welcomed(self, number: int) -> None:
        self._welcomed[number] = time.time()

    def registered(self, rank: Rank, clock: float) -> None:
        """Checks a machine's clock. clock: time.time() on the rank's machine, read after the welcome arrived there."""
        ahead, behind = clock - time.time(), self._welcomed[rank.number] - clock
        if max(ahead, behind) > CLOCK and rank.node not in self._wrong_clocks:
            self._wrong_clocks.add(rank.node)
            self._state.recorder.say(
                f"the clock of {rank.host} is {max(ahead, behind):.1f} s {'ahead of' if ahead > 0 else 'behind'} that "
                "of the coordinator's machine, so their events are sorted wrongly; run chronyc makestep"
            )

    def checked(self, rank: Rank, message: MachineChecked) -> None:
        if rank.number == 0:
            self._first = message
        if not self._new:
            self._state.timers.after(TOGETHER_SECONDS, self._print)
        self._new.append((rank.host or f"rank {rank.number}", message))

    def _print(self) -> None:
        found: dict[tuple[str, str, str], dict[str, str]] = {}
        wrong = [(host, each) for host, message in self._new for each in message.wrong]
        self._uncompared += self._new
        self._new.clear()
        if self._first is not None:
            usual = self._first.versions
            wrong += [(host, each) for host, message in self._uncompared for each in _differences(message, usual)]
            self._uncompared.clear()
        for host, each in wrong:
            found.setdefault((each.name, each.limit, each.advice), {})[host] = each.value
        for (name, limit, advice), values in found.items():
            self._state.recorder.say(f"{name}: {_in_words(values)} (needed: {limit}); {advice}")


def _differences(message: MachineChecked, usual: Mapping[str, str]) -> list[Judgement]:
    """A Judgement for each version that differs from that in `usual`: package -> version on rank 0's machine."""
    advice = "install the version of rank 0's machine, or the workers' results may differ"
    return [
        Judgement(name, version, usual[name], "broken", advice)
        for name, version in message.versions.items()
        if usual.get(name, version) != version
    ]


def _in_words(values: dict[str, str]) -> str:
    """{"host1": "512", "host2": "512", "host3": "600"} -> "512 on host1 and host2, 600 on host3" """
    hosts: dict[str, list[str]] = {}
    for host, value in list(values.items())[:NAMED]:
        hosts.setdefault(value, []).append(host)
    text = ", ".join(f"{value} on {' and '.join(of)}" for value, of in hosts.items())
    more = len(values) - NAMED
    return f"{text}, and on {plural(more, 'more machine')}" if more > 0 else text
