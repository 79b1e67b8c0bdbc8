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
from recycle_pp.telemetry.run_folder import RunFolder

from .exporter import MEASURES, Curves, Exporter, Record


class Wandb(Exporter):
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
        self._curves = Curves()

    def step(self, record: Record) -> None:
        self._run.log({key: record[key] for key in ("step", *MEASURES) if record.get(key) is not None})

    def event(self, record: Record) -> None:
        event = parse(record)
        values: dict[str, object] = {**self._curves.of(event)}
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
