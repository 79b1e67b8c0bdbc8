"""The diagnosis of each kind of problem, from small evidence of three workers in one stage."""

import json
from dataclasses import replace

import msgspec
import pytest

from recycle_pp.diagnosis.diagnosis import diagnose
from recycle_pp.diagnosis.finding import BROKEN, CLASSES, WARNING, WELL
from recycle_pp.diagnosis.incidents import newest, since_launch
from recycle_pp.doctor import text
from recycle_pp.telemetry.events.checkpoints import CheckpointFailed, CheckpointSaved, CheckpointSkipped
from recycle_pp.telemetry.events.coordinators import CoordinatorElected, CoordinatorLost, SupervisorBack
from recycle_pp.telemetry.events.deaths import DeathDetected, HangSuspected
from recycle_pp.telemetry.events.health import HealthFound, HealthOver
from recycle_pp.telemetry.events.islands import RoundAwaited
from recycle_pp.telemetry.events.job import Started, Stopped, WaitsForData
from recycle_pp.telemetry.events.recovery import LinksCut, Renewed, Resumed
from recycle_pp.telemetry.events.workers import Spawned
from recycle_pp.telemetry.evidence import Evidence
from recycle_pp.wire.records import Cache, Contact, FirstOps, HangReport, Sign

NAMES = ("0.0", "1.0", "2.0")
NOW = 1000.0
SPAWNED = [
    Spawned(time=900.0, worker=worker, rank=rank, pid=10 + rank, host=f"host{rank}")
    for rank, worker in enumerate(NAMES)
]
BEGUN = [*SPAWNED, Started(time=910.0, workers=3)]
HEALTHY = Evidence("run", "alive", "it runs", now=NOW, process="process 1 on host0", age=100.0, workers=3, step=20,
                   step_at=NOW - 0.5, step_seconds=1.0, events=BEGUN, data=["train.bin"])  # fmt: skip
LATE = replace(HEALTHY, step_at=NOW - 8)
STARTING = replace(HEALTHY, events=SPAWNED, step=None, step_at=None, step_seconds=None)
DIED = DeathDetected(time=980.0, step=21, worker="1.0", cause="signal", detail="SIGKILL")
RESUMED = Resumed(time=981.0, step=21, dead=["1.0"])
SUM = Sign(does="the wait for the all-reduce in step 21", kind="waits", what="sum", seconds=7.0, quiet=7.0)
F = Sign(does="F of micro-batch 1.0 in step 21", kind="works", what="F", seconds=7.5, quiet=7.5, host="host1")
READY = Sign(does="the wait for orders", kind="waits", what="orders", seconds=9.0)


def report(own, others=SUM, step=21, **more):
    """A hang report: worker 1.0 does `own`, the others do `others`. If only the others wait, they wait for 1.0."""
    waits = [(worker, "1.0") for worker in ("0.0", "2.0") if own.kind != "waits" and others.kind == "waits"]
    workers = {"0.0": others, "1.0": own, "2.0": others}
    return HangReport(time=NOW - 1, generation=0, step=step, workers=workers, waits=waits, **more)


def late(own, others=SUM, **more):
    return replace(LATE, report=report(own, others, **more))


def start(own, others=READY, **more):
    return replace(STARTING, report=report(own, others, step=0, **more))


def after(*events, **changes):
    return replace(HEALTHY, events=[*BEGUN, *events], **changes)


def sign(of, **fields):
    return msgspec.structs.replace(of, **fields)


def contact(what, rank=1):
    return Contact(time=985.0, rank=rank, host=f"host{rank}", pid=11, what=what, detail="no majority")


def receipt(worker, forward, files):
    caches = {"inductor": Cache(folder="cache", files=files, bytes=10)}
    return FirstOps(time=920.0, step=1, worker=worker, caches=caches, seconds={"forward": forward, "backward": 0.1})


STARTS = Sign(does="build the model", kind="starts", what="model", seconds=20.0, quiet=20.0, host="host1")
SILENT = report(sign(SUM, host="host1"), sign(SUM, lacks=["1.0"], host="host0"))
CUT = report(sign(SUM, lacks=["0.0", "2.0"], host="host1"), sign(SUM, lacks=["1.0"], host="host0"))
RECEIPTS = [receipt("0.0", 0.3, 148), receipt("1.0", 40.0, 0), receipt("2.0", 0.4, 148)]
AWAITS = replace(
    LATE,
    report=HangReport(
        time=NOW,
        generation=0,
        step=21,
        workers=dict.fromkeys(NAMES, SUM),
        waits=[(worker, "coordinator") for worker in NAMES],
    ),
)
CASES = {
    "a run that makes progress": (HEALTHY, "well", None, WELL),
    "a run that has just begun": (replace(STARTING, life="silent", process="", age=3, events=[]), "well", None, WELL),
    "a run that has ended": (replace(HEALTHY, life="over", code=0), "well", None, WELL),
    "a run that a signal has ended": (
        after(Stopped(step=21, reason="SIGTERM; no checkpoint"), life="over", code=143), "well", None, WELL,
    ),
    "a slow step whose workers make progress": (late(sign(F, seconds=0.3, quiet=0.3)), "well", None, WELL),
    "a start that computes": (start(sign(STARTS, quiet=0.1)), "well", None, WELL),
    "an eviction": (after(msgspec.structs.replace(DIED, cause="eviction")), "well", None, WELL),
    "a start that does not end": (start(STARTS), "never_started", "1.0", BROKEN),
    "a start that computes for ever": (start(sign(STARTS, seconds=70.0, quiet=0.1)), "never_started", "1.0", WARNING),
    "a node that never came": (start(READY, missing=["2.0"]), "never_started", "2.0", BROKEN),
    "no coordinator for long": (replace(STARTING, life="gone", events=[]), "never_started", None, BROKEN),
    "a start that was refused": (
        replace(STARTING, life="over", code=2, events=[*SPAWNED, Stopped(step=0, reason="no")]), "never_started", None,
        BROKEN,
    ),
    "kernels that compile": (
        start(sign(STARTS, what="kernels", seconds=70.0, quiet=0.1)), "compile_skew", "1.0", WARNING,
    ),
    "a first op that lasts": (late(sign(F, first=True)), "compile_skew", "1.0", WARNING),
    "a first forward that was long": (replace(HEALTHY, first_ops=RECEIPTS), "compile_skew", "1.0", WARNING),
    "a death": (after(DIED, RESUMED), "rank_death", "1.0", WARNING),
    "a death in a job that is dead": (after(DIED, life="gone"), "rank_death", "1.0", BROKEN),
    "a death and its consequences": (
        after(DIED, DeathDetected(time=980.5, step=21, worker="0.0", cause="exit", detail="exit code 1")),
        "rank_death", "1.0", WARNING,
    ),
    "a job that is gone": (replace(HEALTHY, life="gone"), "rank_death", None, BROKEN),
    "a job that has stopped": (
        after(Stopped(step=21, reason="5 updates"), life="over", code=1), "rank_death", None, BROKEN,
    ),
    "an op that does not end": (late(F), "stuck_op", "1.0", BROKEN),
    "an op that computes without end": (late(sign(F, quiet=0.0)), "stuck_op", "1.0", BROKEN),
    "a device that does not finish": (late(sign(F, kind="device")), "stuck_op", "1.0", BROKEN),
    "a process that is stopped": (late(sign(SUM, silent=7.0)), "stuck_op", "1.0", BROKEN),
    "a process that does not answer": (late(sign(SUM, silent=0.2, unanswered=7.0)), "stuck_op", "1.0", BROKEN),
    "an op after which a process will answer": (
        late(sign(F, first=True, silent=0.2, unanswered=7.0)), "compile_skew", "1.0", WARNING,
    ),
    "a wait that could end": (late(sign(SUM, delivered=7.0)), "stuck_op", "1.0", BROKEN),
    "a hang from which the job has recovered": (
        after(HangSuspected(step=19, worker="1.0", where="F of micro-batch 1.0 in step 19", seconds=10.1),
              DeathDetected(step=19, worker="1.0", cause="hang")), "stuck_op", "1.0", WARNING,
    ),
    "a sum with a silent member": (replace(LATE, report=SILENT), "stuck_collective", "1.0", BROKEN),
    "a sum that was repeated": (
        after(Renewed(step=19, waiting=list(NAMES)), hangs={19: [SILENT]}), "stuck_collective", "1.0", WARNING,
    ),
    "messages that do not arrive on either side": (replace(LATE, report=CUT), "network", "1.0", BROKEN),
    "a link that is cut": (after(LinksCut(step=19, cut=["1.0 2.0"], leaving=["2.0"])), "network", "2.0", WARNING),
    "a cut for which the job waits": (
        replace(late(F), events=[*BEGUN, LinksCut(step=21, cut=["1.0 2.0"], leaving=[])]), "network", "2.0", BROKEN,
    ),
    "a lost node that lives": (
        after(msgspec.structs.replace(DIED, cause="node_loss"), RESUMED, contacts=[contact("gave_up")]),
        "network", "1.0", WARNING,
    ),
    "a lost node": (after(msgspec.structs.replace(DIED, cause="node_loss"), RESUMED), "rank_death", "1.0", WARNING),
    "a read that does not end": (late(sign(F, what="data", path="train.bin")), "data", "1.0", BROKEN),
    "a read at the start": (start(sign(STARTS, what="data")), "data", "1.0", BROKEN),
    "disks that are all silent": (
        replace(LATE, events=[*BEGUN, WaitsForData(step=21, path="train.bin", waiting=["2.0"], seconds=10.0)]),
        "data", "2.0", BROKEN,
    ),
    "a heartbeat that a disk keeps back": (replace(HEALTHY, beat_age=20.0, on_disk=True), "storage", None, BROKEN),
    "a late step without a report": (replace(LATE, beat_age=6.0, on_disk=True), "storage", None, BROKEN),
    "a failed checkpoint": (
        after(CheckpointFailed(step=19, checkpoint=20, detail="worker 1.0: no space")), "storage", "1.0", WARNING,
    ),
    "a damaged file": (replace(HEALTHY, damaged=["metrics.jsonl cannot be read: line 3"]), "storage", None, WARNING),
    "a worker without a core": (late(sign(F, quiet=0.0, delayed=6.0)), "busy", "1.0", WARNING),
    "a coordinator that is stopped": (replace(HEALTHY, beat_age=20.0, suspended=True), "control_plane", None, BROKEN),
    "a coordinator without a majority": (replace(HEALTHY, beat_age=20.0), "control_plane", None, BROKEN),
    "supervisors without a majority": (
        replace(HEALTHY, life="gone", contacts=[contact("gave_up", 2)]), "control_plane", None, BROKEN,
    ),
    "workers that wait for the coordinator": (AWAITS, "control_plane", None, BROKEN),
    "an island that waits for a round": (
        replace(AWAITS, events=[*BEGUN, RoundAwaited(time=990.0, step=21, round=3, steps=20)]), "islands", None,
        WARNING,
    ),
    "an island whose next step lasts": (
        replace(AWAITS, events=[*BEGUN, RoundAwaited(time=980.0, step=20, round=3, steps=20)]), "control_plane", None,
        BROKEN,
    ),
    "an island with a worker that is stuck": (
        replace(late(F), events=[*BEGUN, RoundAwaited(time=990.0, step=21, round=3, steps=20)]), "stuck_op", "1.0",
        BROKEN,
    ),
    "an election": (
        after(CoordinatorLost(step=19, rank=0), CoordinatorElected(step=19, rank=1, seconds=0.1)),
        "control_plane", None, WARNING,
    ),
    "a coordinator that was stopped": (
        after(CoordinatorLost(step=19, rank=0),
              msgspec.structs.replace(DIED, step=19, worker="0.0", cause="node_loss"), RESUMED,
              SupervisorBack(step=20, worker="0.0", rank=0)), "control_plane", None, WARNING,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_verdict_is_right(case):
    evidence, verdict, worker, code = CASES[case]
    found = diagnose(evidence)
    assert (found.verdict, found.worker, found.code) == (verdict, worker, code), found
    assert found.evidence and all(found.evidence) and found.next
    json.dumps(found._asdict())


def test_a_running_process_is_not_reported_as_stopped():
    (said, *_) = diagnose(late(sign(SUM, silent=0.2, unanswered=7.0))).evidence
    assert said == f"1.0 has not answered the new generation for 7.0 s: {SUM.does}"
    (said, *_) = diagnose(late(sign(F, silent=0.2, unanswered=7.0))).evidence
    assert said.startswith("1.0 has been in F of micro-batch 1.0 in step 21 for 7.5 s")


def test_every_kind_of_verdict_has_a_case():
    assert {verdict for _, verdict, _, _ in CASES.values()} == set(CLASSES)


def test_an_island_that_waits_for_a_round_names_the_round():
    said = diagnose(CASES["an island that waits for a round"][0]).evidence
    assert said[0] == "the island waits for round 3, after 20 steps of its own"


def test_a_long_first_forward_names_the_empty_cache():
    said = diagnose(CASES["a first forward that was long"][0])
    assert "its inductor cache had 0 files at its start, those of the others 148" in said.evidence


def test_only_the_newest_start_of_a_run_is_judged():
    """The run died and was resumed, so all workers were spawned again."""
    again = [msgspec.structs.replace(event, time=990.0) for event in BEGUN]
    old = [*BEGUN, DIED, Stopped(step=21, reason="a stage is lost")]
    assert since_launch([*old, *again])[-1] is again[-1] and DIED not in since_launch([*old, *again])[1:]
    assert diagnose(replace(HEALTHY, events=[*old, *again], contacts=[contact("gave_up")])).verdict == "well"


@pytest.mark.parametrize("dead", [NAMES, NAMES[:1]], ids=["all", "the first"])
def test_a_start_after_a_stop_is_new_even_if_workers_had_died_before(dead):
    died = [msgspec.structs.replace(DIED, worker=worker) for worker in dead]
    again = [msgspec.structs.replace(event, time=event.time + 95) for event in BEGUN]
    events = [*BEGUN, *died, Stopped(time=990.0, step=21, reason="a stage is lost"), *again]
    assert since_launch(events) == again and diagnose(replace(HEALTHY, events=events)).verdict == "well"


def test_an_incident_ends_with_the_recovery():
    first = CheckpointFailed(step=20, checkpoint=20, detail="full")
    assert newest([*BEGUN, first, RESUMED, DIED]) == [DIED]
    assert newest([*BEGUN, first, CheckpointSaved(step=20, checkpoint=20), DIED, RESUMED]) == [DIED, RESUMED]
    assert newest(BEGUN) == []


SKIPPED = CheckpointSkipped(step=30, checkpoint=30, by="worker 0.0", newest=20)


def test_a_skipped_checkpoint_does_not_hide_a_death_once_a_later_one_is_saved():
    saved = CheckpointSaved(step=40, checkpoint=40)
    found = diagnose(after(DIED, RESUMED, SKIPPED, saved, life="over", code=0))
    assert (found.verdict, found.worker) == ("rank_death", "1.0")
    assert diagnose(after(SKIPPED, saved)).verdict == "well"
    older = msgspec.structs.replace(saved, checkpoint=20)
    assert diagnose(after(DIED, RESUMED, SKIPPED, older)).verdict == "storage"
    assert diagnose(after(DIED, RESUMED, saved, SKIPPED)).verdict == "storage", "the job has returned to an older state"


def test_only_a_running_job_is_reported_as_continuing():
    assert "(the job continues)" in text(diagnose(after(DIED, RESUMED)))
    said = text(diagnose(after(DIED, RESUMED, life="over", code=0)))
    assert "(the job continues)" not in said and "the job has ended" in said


def test_a_damaged_heartbeat_is_reported_once():
    damage = "heartbeat.json cannot be read: not JSON"
    found = diagnose(replace(HEALTHY, life="silent", proof=damage, process="", damaged=[damage]))
    assert found.evidence.count(damage) == 1


def fault(worker, action, signal="ecc", device="GPU-1", host="host1"):
    return HealthFound(
        time=970.0, worker=worker, host=host, device=device, signal=signal, action=action, detail=signal, factor=1.0
    )


@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ([fault("2.0", "slow", "throttle")], ["throttle"]),  # shown, because its work goes to other workers
        ([fault("2.0", "note")], []),
        ([fault("1.0", "note")], ["ecc"]),  # shown, because it may explain the death
        ([fault("1.0", "note"), HealthOver(worker="1.0", device="GPU-1", signal="ecc")], []),
        ([fault("2.0", "note", "disk", "host", "host1")], ["disk"]),  # shown, because it is on the dead worker's host
        ([fault("2.0", "note", "disk", "host", "host2")], []),
    ],
)
def test_faults_of_the_hardware_that_last_are_evidence(events, shown):
    found = diagnose(after(*events, DIED, RESUMED))
    assert (found.verdict, found.worker) == ("rank_death", "1.0")
    said = [line for line in found.evidence if line.startswith("hardware: ")]
    assert len(said) == len(shown) and all(word in line for word, line in zip(shown, said, strict=True))


def test_a_healthy_run_with_a_throttled_gpu_is_well_and_names_it():
    found = diagnose(after(fault("2.0", "slow", "throttle")))
    assert (found.verdict, found.code) == ("well", WELL) and "worker 2.0, GPU-1 on host1: throttle" in found.evidence[
        -1
    ]
