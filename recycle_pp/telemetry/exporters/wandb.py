"""Sends curves and events to Weights & Biases, and writes them to RUN_DIR/wandb.

The run is online with an API key (`wandb login`, WANDB_API_KEY), else offline. `wandb sync RUN_DIR/wandb/offline-run-*`
uploads an offline run later. WANDB_PROJECT, WANDB_MODE and other variables of wandb apply. Events are texts in the
history (`events/NAME`), next to counters, stalls, and `islands/...` for every round.
"""

from __future__ import annotations

import netrc
import os
from contextlib import suppress

import wandb

from recycle_pp.telemetry.events.catalog import parse
from recycle_pp.telemetry.events.deaths import DeathDetected
from recycle_pp.telemetry.events.islands import RoundApplied
from recycle_pp.telemetry.events.recovery import Resumed
from recycle_pp.telemetry.island_figures import IslandRounds, traffic
from recycle_pp.telemetry.run_folder import RunFolder

from .exporter import MEASURES, Record


def make(run: RunFolder) -> Wandb:
    return Wandb(run)


class Wandb:
    def __init__(self, run: RunFolder) -> None:
        keyed = "WANDB_API_KEY" in os.environ or _logged_in()
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "recycle_pp"),
            name=run.path.name,
            dir=str(run.path),
            mode=None if "WANDB_MODE" in os.environ or keyed else "offline",  # type: ignore[arg-type]
            config=run.read_config(),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="step")  # an event may arrive after lines of later steps
        self._steps = run.steps()
        self._deaths = 0
        self._rounds = IslandRounds()

    def step(self, record: Record) -> None:
        self._run.log({key: record[key] for key in ("step", *MEASURES) if record.get(key) is not None})

    def event(self, record: Record) -> None:
        event = parse(record)
        values: dict[str, object] = {}
        self._rounds.follow(event)
        if isinstance(event, DeathDetected):
            self._deaths += 1
            values = {"events/deaths": self._deaths}
        elif isinstance(event, Resumed):
            values = {"events/stall_ms": 1e3 * event.stall_seconds, "events/lost_ops": event.lost_ops}
        elif isinstance(event, RoundApplied) and (figures := self._rounds.figures()):
            values = {f"islands/{key}": of for key, of in {**figures.gauges(), **traffic(event)}.items()}
        if event.exported:
            values[f"events/{event.name()}"] = event.sentence(self._steps)
        if values:
            self._run.log({"step": event.step, **values})

    def close(self) -> None:
        self._run.finish()


def _logged_in() -> bool:
    """Whether `wandb login` has stored a key."""
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    return False
