"""The newest stall or death of a run, from its events.

    launched = since_launch(events)            # the events of the newest start of the run
    incident = newest(launched)                # the events of the newest incident, oldest first; [] without any
    finding = explain(incident, evidence)

Events belong to one incident if they are about the same step and no recovery lies between them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from recycle_pp.telemetry.events.checkpoints import CheckpointFailed, CheckpointSaved, CheckpointSkipped
from recycle_pp.telemetry.events.coordinators import CoordinatorElected, CoordinatorLost, SupervisorBack
from recycle_pp.telemetry.events.deaths import DeathDetected, HangSuspected, cause_in_words
from recycle_pp.telemetry.events.event import Event
from recycle_pp.telemetry.events.job import Finished, Started, Stopped, WaitsForData
from recycle_pp.telemetry.events.recovery import LinksCut, Renewed, Restored, Resumed
from recycle_pp.telemetry.events.workers import Left, Spawned
from recycle_pp.telemetry.evidence import Evidence
from recycle_pp.telemetry.words import names
from recycle_pp.wire.records import HangReport

from .finding import BROKEN, Finding, seconds
from .waits import culprit

INCIDENTS = (
    LinksCut, HangSuspected, DeathDetected, Renewed, CoordinatorLost, WaitsForData, CheckpointFailed, CheckpointSkipped,
    Stopped,
)  # fmt: skip
SIGNALS = (130, 143)  # exit codes of a job that a signal has ended


def since_launch(events: Sequence[Event]) -> list[Event]:
    """The events of the newest start of the run. A start begins with the first spawn after the end of the job, or,
    if the job was killed, with the spawn of a worker whose earlier process has not ended."""
    first, alive, over = 0, set[str](), False
    for number, event in enumerate(events):
        match event:
            case Spawned(worker=worker):
                if over or worker in alive:
                    first, alive, over = number, set(), False
                alive.add(worker)
            case Finished() | Stopped():
                over = True
            case DeathDetected(worker=worker) | Left(worker=worker):
                alive.discard(worker)
            case Restored():
                alive.clear()
    return list(events[first:])


def newest(events: Sequence[Event]) -> list[Event]:
    """The events of the newest incident and its consequences, oldest first. Unsaved checkpoints do not count if a later
    one was saved."""
    events = _without_superseded(events)
    last = next((n for n in reversed(range(len(events))) if _is_incident(events[n])), None)
    if last is None:
        return []
    first = last
    for number in range(last - 1, -1, -1):
        event = events[number]
        if isinstance(event, Resumed | Started | CheckpointSaved) or event.step < events[last].step - 1:
            break
        if _is_incident(event):
            first = number
    return list(events[first:])


def _without_superseded(events: Sequence[Event]) -> list[Event]:
    kept, saved = list[Event](), -1
    for event in reversed(events):
        if isinstance(event, CheckpointSaved):
            saved = max(saved, event.checkpoint)
        if not isinstance(event, CheckpointFailed | CheckpointSkipped) or event.checkpoint > saved:
            kept.append(event)
    return kept[::-1]


def explain(incident: Sequence[Event], evidence: Evidence) -> Finding:
    """The finding about an incident: its class and the worker that caused it. incident: at least one event."""
    by_kind = [event for kind in (LinksCut, HangSuspected) for event in incident if isinstance(event, kind)]
    deaths = [event for event in incident if isinstance(event, DeathDetected) and event.cause != "eviction"]
    rest = [event for kind in INCIDENTS[3:] for event in incident if isinstance(event, kind)]
    cause = next(iter([*by_kind, *deaths, *rest]))
    if isinstance(cause, HangSuspected) and deaths and deaths[0].worker != cause.worker and deaths[0].time < cause.time:
        cause = deaths[0]
    match cause:
        case LinksCut():
            worker = cause.leaving[0] if cause.leaving else cause.cut[0].split()[1]
            a, b = (f"{w} on {host_of(w, evidence)}" for w in cause.cut[0].split())
            said = [f"{a} and {b} cannot connect to each other", "both reach the coordinator"]
            return Finding("network", worker, said, BROKEN, host_of(worker, evidence))
        case HangSuspected():
            return _hang(cause, evidence)
        case DeathDetected():
            return _death(cause, deaths, incident, evidence)
        case Renewed():
            return _collective(cause, evidence)
        case CoordinatorLost():
            return _election(incident, evidence)
        case WaitsForData():
            return Finding("data", cause.waiting[0] if cause.waiting else None, [cause.text()], BROKEN, cause.path)
        case CheckpointFailed() | CheckpointSkipped():
            found = re.search(r"worker (\d+\.\d+)", cause.text())
            return Finding(
                "storage", found[1] if found else None, [cause.text()], BROKEN, f"{evidence.run}/checkpoints"
            )
        case _:
            started = any(isinstance(event, Started) for event in evidence.events)
            return Finding("rank_death" if started else "never_started", None, [cause.text()])


def host_of(worker: str | None, evidence: Evidence) -> str:
    hosts = [e.host for e in evidence.events if isinstance(e, Spawned) and e.worker == worker and e.host]
    return hosts[-1] if hosts else "its host"


def report_of(event: Event, evidence: Evidence) -> HangReport | None:
    reports = evidence.hangs.get(event.step, [])
    return reports[-1] if reports else None


def _is_incident(event: Event) -> bool:
    if isinstance(event, DeathDetected):
        return event.cause != "eviction"
    if isinstance(event, Stopped):
        return not event.reason.startswith(("SIGINT", "SIGTERM"))
    return isinstance(event, INCIDENTS)


def _hang(hang: HangSuspected, evidence: Evidence) -> Finding:
    report = report_of(hang, evidence)
    sign = report.workers.get(hang.worker) if report else None
    said = [f"{hang.worker} made no progress for {seconds(hang.seconds)} in {hang.where}, so it was killed"]
    where = sign.path if sign else ""
    if report:
        others = [w for w, other in report.workers.items() if w != hang.worker and other.kind == "waits"]
        said += [f"{names(others)} waited for it"] if others else []
    if hang.where.startswith("reading the data"):
        said += [f"it read {where}"] if where else []
        return Finding("data", hang.worker, said, BROKEN, where)
    if hang.where.startswith("copying the state"):
        return Finding("storage", hang.worker, said)
    if hang.where.startswith("its start"):
        return Finding("never_started", hang.worker, said)
    if sign and sign.first and sign.kind == "works":
        return Finding("compile_skew", hang.worker, said)
    stacks = report.stuck.get(hang.worker, {}).get("stacks", "") if report else ""
    return Finding("stuck_op", hang.worker, said, BROKEN, str(stacks))


def _death(death: DeathDetected, deaths: Sequence[DeathDetected], incident: Sequence[Event], e: Evidence) -> Finding:
    back = any(isinstance(event, SupervisorBack) and event.worker == death.worker for event in e.events)
    ranks = {event.rank for event in e.events if isinstance(event, Spawned) and event.worker == death.worker}
    lives = [c for c in e.contacts if c.rank in ranks and c.what != "follows" and c.time > death.time - e.suspicion]
    lost = any(isinstance(event, CoordinatorLost) for event in incident)
    if death.cause == "node_loss" and lost and back:
        return _election(incident, e)
    if death.cause == "node_loss" and (lives or "links" in death.detail):
        said = [f"{death.worker} left: {death.detail}"] if not lives else [
            f"the node of {death.worker} was lost, but its processes survived: its supervisor lost the coordinator",
            f"rank {lives[-1].rank} on {lives[-1].host}: {lives[-1].detail}",
        ]  # fmt: skip
        return Finding("network", death.worker, said, BROKEN, host_of(death.worker, e))
    where = (
        f"worker {death.worker} on {host_of(death.worker, e)} died first, in step {death.step}: {cause_in_words(death)}"
    )
    later = [other.worker for other in deaths[1:] if other.worker != death.worker]
    then = f"then {names(later)} died" if later else f"the other {e.workers - 1} only waited"
    return Finding("rank_death", death.worker, [where, then], BROKEN, f"{e.run}/logs/worker-{death.worker}.log")


def _collective(renewed: Renewed, evidence: Evidence) -> Finding:
    report = report_of(renewed, evidence)
    said = [
        f"all {len(renewed.waiting)} workers waited in step {renewed.step} and none ran an op; all links were rebuilt"
    ]
    worker = culprit(report) if report else None
    if report and worker:
        lacking = [w for w, sign in report.workers.items() if worker in sign.lacks]
        said.append(f"{names(lacking)} lacked the part of {worker} in the sum; {worker} itself lacked no part")
    return Finding("stuck_collective", worker, said, BROKEN, f"{evidence.run}/hangs/step-{renewed.step:06d}.json")


def _election(incident: Sequence[Event], evidence: Evidence) -> Finding:
    said = [event.text() for event in incident if isinstance(event, CoordinatorLost | CoordinatorElected)]
    return Finding("control_plane", None, said)
