"""Events are written to the disk and the console at once, and each cause before its effects."""

import json

from recycle_pp.telemetry.event_log import EventLog
from recycle_pp.telemetry.events.deaths import DeathDetected
from recycle_pp.telemetry.events.job import PlanAdopted, Stopped
from recycle_pp.telemetry.events.recovery import Resumed


def test_an_event_is_on_disk_as_soon_as_it_is_recorded(tmp_path):
    said = []
    log = EventLog(tmp_path / "events.jsonl", 60, said.append)
    log.record(DeathDetected(step=20, generation=3, worker="1.2", cause="signal", detail="SIGKILL"))
    log.record(PlanAdopted(step=20, generation=4, lost_ops=2, revoked=[1]))
    first, second = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert {"event", "time", "step", "generation", "worker"} <= first.keys() & second.keys()
    assert (first["event"], first["step"], first["generation"], first["worker"]) == ("death_detected", 20, 3, "1.2")
    assert (second["worker"], second["lost_ops"], second["revoked"]) == (None, 2, [1])
    assert said == ["step 20: worker 1.2 died (killed by SIGKILL)"]
    log.close()


def test_events_and_sentences_after_an_expected_event_wait_for_it(tmp_path):
    path, said = tmp_path / "events.jsonl", []
    log = EventLog(path, 60, said.append)

    def names():
        return [json.loads(line)["event"] for line in path.read_text().splitlines()]

    death = log.expect(DeathDetected(step=20, generation=3, worker="1.2"))
    log.record(Resumed(step=20, generation=4, stall_seconds=0.1))
    log.then(said.append, "step 20")
    assert names() == [] and said == [] and not death.complete
    log.complete(death, cause="signal", detail="SIGKILL")
    assert names() == ["death_detected", "resumed"] and death.complete
    assert [sentence.split()[2] for sentence in said[:2]] == ["worker", "training"] and said[2:] == ["step 20"]
    first, second = map(json.loads, path.read_text().splitlines())
    assert first["time"] <= second["time"] and (first["cause"], first["generation"]) == ("signal", 3)
    log.expect(DeathDetected(step=21, generation=4, worker="1.1"))
    log.record(Stopped(step=21, generation=4, reason="no worker is left"))
    log.release()
    assert names()[2:] == ["death_detected", "stopped"]
    log.close()
