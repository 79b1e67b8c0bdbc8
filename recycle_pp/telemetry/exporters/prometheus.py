"""The current state of a run for Prometheus: http://HOST:PORT/metrics on the coordinator's node.

Gauges have the measures of the newest step (`recycle_loss`, `recycle_tokens_per_second`, ...). Counters have the
deaths, stalls, plans, returns and checkpoints. Grafana can annotate changes: `changes(recycle_deaths_total[1m]) > 0`.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from recycle_pp.telemetry.events.catalog import parse
from recycle_pp.telemetry.events.deaths import DeathDetected
from recycle_pp.telemetry.events.recovery import Resumed
from recycle_pp.telemetry.run_folder import RunFolder

from .exporter import MEASURES, Record


def make(run: RunFolder, port: str) -> Prometheus:
    return Prometheus(run, int(port))


class Prometheus:
    def __init__(self, run: RunFolder, port: int) -> None:
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
        self._name = run.path.name
        self._server, self._thread = start_http_server(port, registry=registry)

    def step(self, record: Record) -> None:
        for key, gauge in self._gauges.items():
            if record.get(key) is not None:
                gauge.labels(self._name).set(record[key])  # a gauge without a value is not exported

    def event(self, record: Record) -> None:
        event = parse(record)
        if isinstance(event, DeathDetected):
            self._deaths.labels(self._name, event.cause).inc()
        elif isinstance(event, Resumed):
            self._stalls.labels(self._name).inc(event.stall_seconds)
            self._lost.labels(self._name).inc(event.lost_ops)
        if event.exported:
            self._events.labels(self._name, event.name()).inc()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
