"""Gathers everything that a run folder shows about the state of a run, for `recycle_pp.diagnosis`.

    evidence = gather(RunFolder("runs/mine"))       # reads the folder; waits as long as `Pulse.look`

On the machine of the coordinator it also looks at the coordinator's process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

from recycle_pp.linux.processes import thread_states
from recycle_pp.storage.local_copy import place
from recycle_pp.wire.files import UnreadableFile
from recycle_pp.wire.records import Contact, FirstOps, HangReport
from recycle_pp.wire.terms import without_undone

from .events.deaths import explained
from .events.event import Event
from .heartbeat import Life, Pulse
from .run_folder import RunFolder
from .run_reader import RunReader

RECENT = 20  # steps from which the usual duration is computed
LOOKS = 3  # readings of the thread states; a thread counts as waiting for a disk if it waits in all of them
LOOK_SECONDS = 0.1  # between two readings


@dataclass(frozen=True)
class Evidence:
    """Everything that a run folder shows about the state of a run. Times are seconds of the coordinator's clock.

    life, proof   see `telemetry.heartbeat.Life`
    code          exit code of a job that is over
    now           time of reading
    age           seconds since the run was started or resumed
    beat_age      seconds since the newest heartbeat.json was written, or first seen from another machine
    process       the coordinator's process in words; "" if no coordinator is known
    suspended     whether that process is stopped (SIGSTOP); False if it is on another machine
    on_disk       whether one of its threads waits for a disk; False if it is on another machine
    suspicion     the setting control.suspicion, in seconds
    data          the paths of the training data
    workers       the number of workers of the whole job
    step, step_at newest committed step, and the time of its commit; None before the first
    step_seconds  usual duration of a step; None before the first
    events        all events, deaths with their final causes
    report        the newest report about a step that takes unusually long
    hangs         step -> reports about hangs in it, for the steps of the newest events
    first_ops     see `RunReader.first_ops`
    contacts      see `RunReader.contacts`
    damaged       a sentence for each damaged file
    """

    run: str
    life: str
    proof: str
    code: int | None = None
    now: float = 0.0
    age: float = 0.0
    beat_age: float = 0.0
    process: str = ""
    suspended: bool = False
    on_disk: bool = False
    suspicion: float = 10.0
    data: list[str] = field(default_factory=list)
    workers: int = 1
    step: int | None = None
    step_at: float | None = None
    step_seconds: float | None = None
    events: list[Event] = field(default_factory=list)
    report: HangReport | None = None
    hangs: dict[int, list[HangReport]] = field(default_factory=dict)
    first_ops: list[FirstOps] = field(default_factory=list)
    contacts: list[Contact] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def gather(run: RunFolder) -> Evidence:
    """The evidence in a run folder. Raises ValueError if the folder contains no run or its config.yaml is damaged."""
    run.require()
    settings = run.read_settings()
    reader = RunReader(run)
    damaged: list[str] = []
    try:
        life = Pulse(run).look()
    except UnreadableFile as damage:
        damaged.append(str(damage))
        life = Life("silent", str(damage), None, 0.0)
    sign = life.sign
    lines = reader.follow()
    steps = without_undone(lines.steps.each(), lambda line: line.step, RECENT)
    events = explained(lines.events.new())
    report, hangs = None, {}
    try:
        report = reader.hang_now()
        hangs = {step: reader.hangs(step) for step in {event.step for event in events[-50:]}}
    except UnreadableFile as damage:
        damaged.append(str(damage))
    seconds = [line.step_seconds for line in steps if line.step_seconds is not None]
    here = sign is not None and sign.here and life.verdict == "alive"
    paths = [path] if isinstance(path := settings.data.path, str) else path or []
    states = _states(sign.pid) if sign is not None and here else []
    now = sign.time + life.age if sign else time.time()
    return Evidence(
        run=str(run.path),
        life=life.verdict,
        proof=life.proof,
        code=sign.code if sign else None,
        now=now,
        age=time.time() - run.config.stat().st_mtime,
        beat_age=life.age,
        process=f"process {sign.pid} on {sign.host}" if sign else "",
        suspended=bool(states) and all(of[sign.pid] in "Tt" for of in states if sign and sign.pid in of),
        on_disk=any(all(of.get(thread) == "D" for of in states) for thread in (states[0] if states else {})),
        suspicion=settings.control.suspicion,
        data=[str(place(path)) for path in paths] or ["the source files of Python"],
        workers=settings.parallel.pipelines * settings.parallel.stages,
        step=steps[-1].step if steps else None,
        step_at=steps[-1].time if steps else None,
        step_seconds=median(seconds) if seconds else None,
        events=events,
        report=report,
        hangs=hangs,
        first_ops=reader.first_ops(),
        contacts=reader.contacts(),
        damaged=damaged + [str(damage) for damage in lines.damage],
    )


def _states(pid: int) -> list[dict[int, str]]:
    """LOOKS readings of a process's thread states, each as {thread: state}."""
    found = []
    for _ in range(LOOKS):
        found.append(thread_states(pid))
        time.sleep(LOOK_SECONDS)
    return found
