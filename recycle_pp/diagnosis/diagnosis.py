"""Names the cause of a run's newest stall or death.

    diagnosis = diagnose(evidence)            # `telemetry.evidence.gather` reads it
    diagnosis.verdict, diagnosis.worker, diagnosis.evidence, diagnosis.next, diagnosis.code

If the run is stalled now, the verdict comes from its newest report about waits, otherwise from its events. Pure: reads
no files and no clock.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import NamedTuple

from recycle_pp.telemetry.events.islands import RoundApplied, RoundAwaited
from recycle_pp.telemetry.events.job import Started
from recycle_pp.telemetry.events.recovery import Resumed
from recycle_pp.telemetry.evidence import Evidence
from recycle_pp.telemetry.words import names

from .advice import next_command
from .finding import BROKEN, WARNING, WELL, Finding, seconds
from .hardware import faults
from .incidents import SIGNALS, explain, newest, since_launch
from .waits import of_report, of_start

STALE = 10.0  # seconds without a heartbeat after which a coordinator counts as stuck, though its process exists
FRESH = 10.0  # seconds for which a report counts as current
LATE = 3.0  # a step that lasts this many times the usual time is late, but not before half of control.suspicion
STARTS = 60.0  # seconds after its start for which a run may have no heartbeat
SKEW = 3.0  # a first forward or backward that takes this many times the median of the others is skewed


class Diagnosis(NamedTuple):
    """The cause of a run's newest stall or death.

    verdict   one of `finding.CLASSES`
    worker    the worker that caused it, "1.2"; None if there is no single one
    evidence  sentences, the most important first
    next      the command to type next
    code      0: well. 1: a warning, the job continues or has ended. 2: broken
    ended     whether the job has ended
    """

    verdict: str
    worker: str | None
    evidence: list[str]
    next: str
    code: int
    ended: bool = False


def diagnose(evidence: Evidence) -> Diagnosis:
    found = _find(evidence)
    if evidence.damaged:
        said = [*found.evidence, *evidence.damaged]
        damaged = Finding("storage", None, evidence.damaged, WARNING, evidence.run)
        found = damaged if found.verdict == "well" else found._replace(evidence=said)
    said = [*found.evidence, *faults(since_launch(evidence.events), found.worker)]
    said = list(dict.fromkeys(said))  # without repetition: the proof of a damaged heartbeat.json is also in `damaged`
    ended = evidence.life == "over"
    return Diagnosis(found.verdict, found.worker, said, next_command(found, evidence), found.code, ended)


def _find(whole: Evidence) -> Finding:
    e = _of_launch(whole)
    started = any(isinstance(event, Started) for event in e.events)
    if e.life == "over" and e.code in (0, *SIGNALS):
        return _past(e) or Finding("well", None, [f"the run has ended: {e.proof}"], WELL)
    if e.life != "alive":
        return _dead(e, started)
    if e.beat_age > STALE:
        return _stale(e)
    return (_stalled(e) or _past(e) if started else _starting(e)) or _well(e)


def _of_launch(e: Evidence) -> Evidence:
    """The evidence of the newest start of the run."""
    events = since_launch(e.events)
    since = events[0].time if events else 0.0
    contacts = [contact for contact in e.contacts if contact.time > since]
    return replace(e, events=events, contacts=contacts, first_ops=[of for of in e.first_ops if of.time > since])


def _stale(e: Evidence) -> Finding:
    """The finding if the coordinator's process is alive, but writes no heartbeat, or no report about a late step."""
    beat = f"the coordinator, {e.process}, exists; its last heartbeat is {seconds(e.beat_age)} old"
    if e.suspended:
        said = [beat, "its process is stopped (SIGSTOP, or a debugger)", *_told(e)]
        return Finding("control_plane", None, said, BROKEN, e.process)
    if e.on_disk:
        return Finding("storage", None, [beat, f"one of its threads waits for the disk of {e.run}"], BROKEN, e.run)
    return Finding("control_plane", None, [beat, "it writes none without a majority of the supervisors", *_told(e)])


def _told(e: Evidence) -> list[str]:
    """Sentences from the receipts of supervisors that have lost the coordinator."""
    words = {"lost": "lost the coordinator", "follows": "follows a new coordinator", "gave_up": "gave up"}
    return [f"rank {of.rank} on {of.host} {words.get(of.what, of.what)}: {of.detail}" for of in e.contacts[-3:]]


def _starting(e: Evidence) -> Finding | None:
    """The finding before the first step of this start; None if the start makes progress."""
    if incident := newest(e.events):
        return explain(incident, e)
    found = of_start(e.report, e.suspicion) if e.report and _is_fresh(e) else None
    if found and found.verdict == "data" and not found.where:
        return found._replace(evidence=[*found.evidence, f"data.path is {names(e.data)}"], where=e.data[0])
    return found


def _stalled(e: Evidence) -> Finding | None:
    """The reason why the current step does not end; None if it is not late."""
    begun = [event.time for event in e.events if isinstance(event, Started | Resumed)]
    since = max([*begun, e.step_at or 0.0])
    if e.now - since <= max(e.suspicion / 2, LATE * (e.step_seconds or 0.0)):
        return None
    incident = newest(e.events)
    known = explain(incident, e) if incident and incident[-1].step >= _runs(e) else None
    if known and known.verdict in ("network", "data"):
        found: Finding | None = known
    elif e.report and _is_fresh(e):
        found = of_report(e.report, e.suspicion)
        # The report may be from between two attempts of the step, and then shows less than the events.
        if known and (found is None or found.verdict == known.verdict):
            found = known
    else:
        found = known or _stale(e)
    if found is None or found.verdict == "control_plane":
        found = _awaits_round(e) or found
    if found is None:
        return None
    said = caches(found.worker, e) if found.verdict == "compile_skew" else []
    return found._replace(
        evidence=[*found.evidence, *said, f"step {_runs(e)} has been running for {seconds(e.now - since)}"]
    )


def _awaits_round(e: Evidence) -> Finding | None:
    """The finding if the commit of the current step waits for the result of a round, else None."""
    of = [event for event in e.events if isinstance(event, RoundApplied | RoundAwaited)]
    if not of or not isinstance(of[-1], RoundAwaited) or of[-1].step != _runs(e):
        return None
    said = "no island has closed it, or this one has not read its result yet: see python -m recycle_pp.islands STORE"
    return Finding("islands", None, [of[-1].text(), said], WARNING)


def _past(e: Evidence) -> Finding | None:
    """The finding about the newest stall or death, from which the job has recovered or is recovering. Without one, the
    result of `_skew`."""
    incident = newest(e.events)
    if not incident:
        return _skew(e)
    now = "has recovered since" if incident[0].step < _runs(e) else "is recovering"
    found = explain(incident, e)
    return found._replace(
        code=WARNING, evidence=[*found.evidence, f"the job {'has ended' if e.life == 'over' else now}"]
    )


def _skew(e: Evidence) -> Finding | None:
    """The finding if one worker's first forward and backward took much longer than those of the others, else None."""
    took = {
        of.worker: sum(of.seconds.get(op, 0.0) for op in ("forward", "backward")) for of in e.first_ops if of.seconds
    }
    if len(took) < 2:
        return None
    worker = max(took, key=lambda w: took[w])
    usual = median(took[w] for w in took if w != worker)
    if took[worker] < usual + max(e.suspicion / 2, (SKEW - 1) * usual):
        return None
    said = f"{worker} needed {seconds(took[worker])} for its first forward and backward, the others {seconds(usual)}"
    return Finding("compile_skew", worker, [said, *caches(worker, e)], WARNING)


def caches(worker: str | None, e: Evidence) -> list[str]:
    """Sentences about caches of compiled kernels in which the worker had fewer files at its start than the others."""
    files = {of.worker: {name: cache.files for name, cache in of.caches.items()} for of in e.first_ops}
    own = files.get(worker or "", {})
    others = {name: [of[name] for w, of in files.items() if w != worker and name in of] for name in own}
    return [
        f"its {name} cache had {own[name]} files at its start, those of the others {median(those):.0f}"
        for name, those in others.items()
        if those and median(those) > own[name]
    ]


def _dead(e: Evidence, started: bool) -> Finding:
    """The finding if the coordinator is gone, is silent, or has ended with an error."""
    incident = newest(e.events)
    if incident and (incident[-1].step >= _runs(e) or e.life == "over"):
        found = explain(incident, e)
        return found._replace(evidence=[*found.evidence, e.proof])
    if any(contact.what == "gave_up" for contact in e.contacts):
        return Finding("control_plane", None, [*_told(e), e.proof])
    if not e.process and e.age < STARTS:
        return Finding("well", None, ["the job is starting", e.proof], WELL)
    if not started:
        return Finding("never_started", None, [e.proof, "no step was begun"])
    if e.life == "silent":
        return Finding("control_plane", None, [e.proof], BROKEN, e.process)
    return Finding("rank_death", None, ["all processes are gone: the launcher or the machine was killed", e.proof])


def _well(e: Evidence) -> Finding:
    if e.step is not None and e.step_at is not None:
        said = [f"step {e.step} was committed {seconds(max(0.0, e.now - e.step_at))} ago"]
    else:
        starts = e.report.workers.items() if e.report and _is_fresh(e) else ()
        doing = [f"{worker}: {sign.does}" for worker, sign in starts if sign.kind == "starts"]
        said = ["the job is starting", *([names(doing, 3)] if doing else [])]
    return Finding("well", None, [*said, e.proof], WELL)


def _runs(e: Evidence) -> int:
    """The number of the current step."""
    return 0 if e.step is None else e.step + 1


def _is_fresh(e: Evidence) -> bool:
    """Whether the newest report is recent, and about the current step."""
    return e.report is not None and e.report.step >= _runs(e) and e.report.time > e.now - FRESH - e.beat_age
