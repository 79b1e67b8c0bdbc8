"""Serves the current state of a run to Prometheus, at http://HOST:PORT/metrics on the coordinator's node.

Gauges show the measures of the newest step (`recycle_loss`, `recycle_tokens_per_second`, ...). Counters count deaths,
seconds of stalls, lost ops, and events of each kind. Grafana can annotate changes:
`changes(recycle_deaths_total[1m]) > 0`. `recycle_device_...` are the figures of health.json, by worker, host and
device. `recycle_health` is 1 while a finding persists. `recycle_islands_...` are the figures of the islands' rounds;
bytes and dollars are counters.
"""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from recycle_pp.telemetry.events.catalog import parse
from recycle_pp.telemetry.events.deaths import DeathDetected
from recycle_pp.telemetry.events.health import HealthFound, HealthOver
from recycle_pp.telemetry.events.islands import RoundApplied
from recycle_pp.telemetry.events.job import Started
from recycle_pp.telemetry.events.recovery import Resumed
from recycle_pp.telemetry.island_figures import GAUGES, IslandRounds, traffic
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.wire.files import UnreadableFile

from .exporter import MEASURES, Exporter, Record

FIGURES = {
    "temperature": "degrees Celsius",
    "power": "watts",
    "clock": "MHz",
    "uncorrected": "memory errors that were not corrected",
    "corrected": "memory errors that were corrected",
}
"""Field of `records.Device` -> its unit."""


class Prometheus(Exporter):
    def __init__(self, run: RunFolder, port: str) -> None:
        registry = CollectorRegistry()

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"recycle_{name}", about, ["run"], registry=registry)

        self._gauges = {key: gauge(key, f"{key} of the newest step (metrics.jsonl)") for key in MEASURES}
        self._gauges["step"] = gauge("step", "newest committed step")
        self._deaths = Counter("recycle_deaths", "workers that died", ["run", "cause"], registry=registry)
        self._stalls = Counter("recycle_stall_seconds", "seconds of all stalls", ["run"], registry=registry)
        self._lost = Counter("recycle_lost_ops", "ops lost by deaths", ["run"], registry=registry)
        self._events = Counter(
            "recycle_events", "events of the job (events.jsonl)", ["run", "event"], registry=registry
        )
        self._rounds = IslandRounds()
        self._islands = {key: gauge(f"islands_{key}", about) for key, about in GAUGES.items()}
        about = "traffic with the store of the islands, up to the newest round"
        self._traffic = {
            key: Counter(f"recycle_islands_{key}", about, ["run"], registry=registry)
            for key in ("sent_bytes", "received_bytes", "dollars")
        }
        labels = ["run", "worker", "host", "device"]
        self._figures = {
            key: Gauge(f"recycle_device_{key}", f"{unit} (health.json)", labels, registry=registry)
            for key, unit in FIGURES.items()
        }
        labels = ["run", "worker", "device", "signal", "action"]
        self._findings = Gauge("recycle_health", "1 while the finding lasts", labels, registry=registry)
        self._lasting: dict[tuple[str, str, str], str] = {}  # (worker, device, signal) -> action
        self._reader = RunReader(run)
        self._name = run.path.name
        self._server, self._thread = start_http_server(int(port), registry=registry)

    def step(self, record: Record) -> None:
        for key, gauge in self._gauges.items():
            if record.get(key) is not None:
                gauge.labels(self._name).set(record[key])  # a gauge without a value is not exported
        self._read_health()

    def event(self, record: Record) -> None:
        event = parse(record)
        if isinstance(event, DeathDetected):
            self._deaths.labels(self._name, event.cause).inc()
        elif isinstance(event, Resumed):
            self._stalls.labels(self._name).inc(event.stall_seconds)
            self._lost.labels(self._name).inc(event.lost_ops)
        elif isinstance(event, Started):
            self._findings.clear()
            self._lasting.clear()
        elif isinstance(event, HealthFound | HealthOver):
            self._follow_finding(event)
        elif isinstance(event, RoundApplied):
            for key, value in traffic(event).items():
                self._traffic[key].labels(self._name).inc(value)
        if self._rounds.follow(event) and (figures := self._rounds.figures()):
            values = figures.gauges()
            for key, gauge in self._islands.items():
                gauge.clear()  # a figure may be unknown now: a single island has no cosine
                if key in values:
                    gauge.labels(self._name).set(values[key])
        if event.exported:
            self._events.labels(self._name, event.name()).inc()

    def _follow_finding(self, event: HealthFound | HealthOver) -> None:
        at = event.worker, event.device, event.signal
        if (action := self._lasting.pop(at, None)) is not None:
            self._findings.remove(self._name, *at, action)
        if isinstance(event, HealthFound):
            self._lasting[at] = event.action
            self._findings.labels(self._name, *at, event.action).set(1)

    def _read_health(self) -> None:
        with suppress(UnreadableFile):
            record = self._reader.health()
            for gauge in self._figures.values():
                gauge.clear()  # removes the labels of lost nodes, and of workers that now have a different role
            for device in record.devices if record else ():
                for key, gauge in self._figures.items():
                    if (value := getattr(device, key)) is not None:
                        gauge.labels(self._name, device.worker, device.host, device.device).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
