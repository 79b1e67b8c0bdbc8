"""Decides what the samples of a device mean for its worker: a pure function of what was seen, look by look.

    history = History.begin(sample)
    history = history.add(sample)                  # after every look
    findings = judge(history)

An action has four rungs: note, slow, drain, kill (`wire.messages.health.Finding`). One look is never enough for more
than a note, with three exceptions: a lost GPU, XID 79 and the driver's recovery action. A counter that has risen must
still be higher in the next look. What was there before the first look is only noted, so that an old count does not
drain every new job.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from recycle_pp.wire.messages.health import Action, Finding

from . import xids
from .sample import Sample

LOOKS = 6  # looks that are remembered: a minute
TWICE = 2  # looks that must agree
OFTEN = 3  # pairs of looks between which a counter of corrected errors must rise
MATTERS = 1.1  # a clock that is lower by less costs the worker no work
MOST = 4.0  # limit on the factor of a throttled worker
WORKS = 50.0  # per cent; the clock of an idle device says nothing about its speed
HOT = 90.0  # degrees Celsius: GPUs that run above it for long fail more often


@dataclass(frozen=True)
class History:
    """
    first      the first sample
    recent     the newest samples, oldest first, at most LOOKS
    usual      the clock of the device at work and not throttled, in MHz; None: not seen yet
    throttled  whether the device is throttled: after TWICE such looks, until LOOKS without
    """

    first: Sample
    recent: tuple[Sample, ...]
    usual: float | None = None
    throttled: bool = False

    @classmethod
    def begin(cls, sample: Sample) -> History:
        return cls(sample, ()).add(sample)

    @property
    def newest(self) -> Sample:
        return self.recent[-1]

    def add(self, sample: Sample) -> History:
        recent = (*self.recent, sample)[-LOOKS:]
        runs_free = sample.clock is not None and not sample.throttle and (sample.busy or 0.0) >= WORKS
        looks = sum(bool(of.throttle) for of in recent)
        return replace(
            self,
            recent=recent,
            usual=sample.clock if runs_free else self.usual,
            throttled=looks >= (1 if self.throttled else TWICE),
        )


def judge(history: History) -> list[Finding]:
    """Everything that is wrong after the newest look."""
    rules = (_lost, _recovery, _xid, _ecc, _remap, _throttle, _nvlink, _nic, _temperature, _disk)
    asked = rules[:1] if history.newest.lost else rules  # a lost GPU reports nothing else
    found = ((rule.__name__[1:], rule(history)) for rule in asked)
    return [Finding(history.newest.device, signal, *verdict) for signal, verdict in found if verdict]


class Verdict(NamedTuple):
    action: Action
    detail: str
    factor: float = 1.0


# -- the rules, one for each signal: None if nothing is wrong --------------------------------------------------


def _lost(history: History) -> Verdict | None:
    return Verdict("kill", "the GPU does not answer any more") if history.newest.lost else None


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
        return Verdict("note", "rows of its memory are replaced at the next reset")
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
    return None


def _temperature(history: History) -> Verdict | None:
    hot = [(sample.temperature or 0.0) >= HOT for sample in history.recent]
    return Verdict("note", f"{history.newest.temperature:.0f} C") if hot[-1] and sum(hot) >= TWICE else None


def _disk(history: History) -> Verdict | None:
    lines = dict.fromkeys(line for sample in history.recent for line in sample.disk)
    return Verdict("note", f"the kernel reports: {list(lines)[-1]}") if lines else None


def _if_twice(action: Action, looks: list[bool]) -> Action:
    """The action if the newest looks agree, else a note."""
    return action if len(looks) >= TWICE and all(looks[-TWICE:]) else "note"


def _rises(counts: list[int | None]) -> int:
    """Number of pairs of looks between which the count rose."""
    return sum(a is not None and b is not None and b > a for a, b in pairwise(counts))


def _errors(count: int) -> str:
    return f"{count} memory error{'s' * (count != 1)}"
