"""Decides from the samples of a device what happens to its worker. Pure.

    history = History.begin(sample)
    history = history.add(sample)                  # after every check
    findings = judge(history)

There are four actions: note, slow, drain and kill (`wire.messages.health.Finding`). A note needs one check that shows
the problem, and any other action needs two. For instance, a worker is drained if two successive checks count more
memory errors than the first check did. Three problems need only one check: a lost GPU, XID 79, and a recovery action
that the driver asks for. Memory errors from before the first check are only noted, because otherwise an old count would
drain the worker in every new job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from recycle_pp.wire.messages.health import Action, Finding

from . import xids
from .sample import Sample

LOOKS = 6  # number of remembered checks; a minute, with the default of control.health
TWICE = 2  # number of checks that must show a problem before an action is taken
OFTEN = 3  # a note is written once an error counter has risen this many times within the remembered checks
MATTERS = 1.1  # a worker gets less work once its clock is slower than usual by this factor
MOST = 4.0  # limit on the factor of a throttled worker
WORKS = 50.0  # least utilization in per cent at which a clock counts as usual, because idle devices lower their clock
HOT = 90.0  # degrees Celsius; GPUs that are this hot for long fail more often


@dataclass(frozen=True)
class History:
    """The samples of one device.

    first      the first sample
    recent     the newest samples, oldest first, at most LOOKS
    free       newest clocks in MHz at which the device was busy and not throttled, at most LOOKS. The load of a host
               is unknown, so for a host all clocks at which it was not throttled count
    throttled  whether the device counts as throttled: true once `recent` has TWICE throttled samples, until it has none
    """

    first: Sample
    recent: tuple[Sample, ...]
    free: tuple[float, ...] = ()
    throttled: bool = False

    @classmethod
    def begin(cls, sample: Sample) -> History:
        return cls(sample, ()).add(sample)

    @property
    def newest(self) -> Sample:
        return self.recent[-1]

    @property
    def usual(self) -> float | None:
        """The usual clock in MHz of the device at work; None: not seen yet."""
        return median(self.free) if self.free else None

    def add(self, sample: Sample) -> History:
        recent = (*self.recent, sample)[-LOOKS:]
        works = sample.busy is None or sample.busy >= WORKS
        free = (sample.clock,) if sample.clock is not None and works and not sample.throttle else ()
        looks = sum(bool(of.throttle) for of in recent)
        return replace(
            self,
            recent=recent,
            free=(*self.free, *free)[-LOOKS:],
            throttled=looks >= (1 if self.throttled else TWICE),
        )


def judge(history: History) -> list[Finding]:
    """The findings after the newest check."""
    rules = (_lost, _recovery, _xid, _ecc, _remap, _throttle, _nvlink, _nic, _temperature, _disk)
    asked = rules[:1] if history.newest.lost else rules  # a lost GPU reports nothing else
    found = ((rule.__name__[1:], rule(history)) for rule in asked)
    return [Finding(history.newest.device, signal, *verdict) for signal, verdict in found if verdict]


class Verdict(NamedTuple):
    action: Action
    detail: str
    factor: float = 1.0


# -- the rules, one for each signal; a rule returns None if it finds no fault ----------------------------------


def _lost(history: History) -> Verdict | None:
    return Verdict("kill", "the GPU no longer answers") if history.newest.lost else None


def _recovery(history: History) -> Verdict | None:
    wanted = history.newest.recovery
    return Verdict("drain", f"the driver asks for {wanted}") if wanted else None


def _xid(history: History) -> Verdict | None:
    seen = [[xids.of(code) for code in sample.xids] for sample in history.recent]
    codes = dict.fromkeys(xid for look in seen for xid in look)
    if not codes:
        return None
    text = ", ".join(xid.text() for xid in codes)
    if xids.OFF_THE_BUS in (xid.code for xid in codes):
        return Verdict("kill", text)
    looks = sum(any(xid.drains for xid in look) for look in seen)
    return Verdict("drain" if looks >= TWICE else "note", text)


def _ecc(history: History) -> Verdict | None:
    before = history.first.uncorrected
    if before is not None:
        new = [(sample.uncorrected or 0) - before for sample in history.recent]
        if new[-1] > 0:
            return Verdict(_if_twice("drain", [n > 0 for n in new]), f"{_errors(new[-1])} not corrected")
        if before > 0:
            return Verdict("note", f"{_errors(before)} not corrected, before this job started")
    if _rises([sample.corrected for sample in history.recent]) >= OFTEN:
        newest, oldest = history.newest.corrected or 0, history.recent[0].corrected or 0
        return Verdict("note", f"{_errors(newest - oldest)} corrected in the last minute")
    return None


def _remap(history: History) -> Verdict | None:
    if history.newest.remap_failed:
        failed = [sample.remap_failed for sample in history.recent]
        return Verdict(_if_twice("kill", failed), "a row of its memory is broken and could not be replaced")
    if history.newest.remap_pending:
        return Verdict("note", "rows of its memory will be replaced at the next reset")
    return None


def _throttle(history: History) -> Verdict | None:
    if not history.throttled:
        return None
    slowed = [sample for sample in history.recent if sample.throttle]
    why = " and ".join(sorted({reason for sample in slowed for reason in sample.throttle}))
    clocks = [sample.clock for sample in slowed if sample.clock]
    usual = history.usual or history.newest.top_clock
    if not clocks or not usual:
        return Verdict("note", f"throttled by {why}")
    clock = median(clocks)
    factor = min(usual / clock, MOST)
    text = f"throttled by {why}: {clock:.0f} MHz instead of {usual:.0f}"
    return Verdict("slow", text, round(factor, 2)) if factor >= MATTERS else Verdict("note", text)


def _nvlink(history: History) -> Verdict | None:
    before = history.first.links
    down = [before is not None and sample.links is not None and sample.links < before for sample in history.recent]
    if down[-1]:
        return Verdict(_if_twice("drain", down), f"{history.newest.links} of {before} NVLinks are active")
    if _rises([sample.link_errors for sample in history.recent]) >= OFTEN:
        return Verdict("note", "its NVLinks repeat packets")
    return None


def _nic(history: History) -> Verdict | None:
    down = history.first.ports - history.newest.ports
    if down:
        return Verdict("note", f"network port {', '.join(sorted(down))} is down")
    if _rises([sample.link_downs for sample in history.recent]):
        return Verdict("note", "a network port was down in the last minute")
    if _rises([sample.port_errors for sample in history.recent]) >= OFTEN:
        newest, oldest = history.newest.port_errors or 0, history.recent[0].port_errors or 0
        return Verdict("note", f"network ports counted {newest - oldest} damaged packets in the last minute")
    return None


def _temperature(history: History) -> Verdict | None:
    hot = [(sample.temperature or 0.0) >= HOT for sample in history.recent]
    return Verdict("note", f"{history.newest.temperature:.0f} C") if hot[-1] and sum(hot) >= TWICE else None


def _disk(history: History) -> Verdict | None:
    lines = dict.fromkeys(line for sample in history.recent for line in sample.disk)
    return Verdict("note", f"the kernel reports: {list(lines)[-1]}") if lines else None


def _if_twice(action: Action, looks: list[bool]) -> Action:
    """The action if the newest TWICE checks show the problem; otherwise "note".

    looks: whether each check shows the problem, oldest check first
    """
    return action if len(looks) >= TWICE and all(looks[-TWICE:]) else "note"


def _rises(counts: list[int | None]) -> int:
    """Number of times that a counter rose from one check to the next. None: unknown in that check."""
    return sum(a is not None and b is not None and b > a for a, b in pairwise(counts))


def _errors(count: int) -> str:
    return f"{count} memory error{'s' * (count != 1)}"
