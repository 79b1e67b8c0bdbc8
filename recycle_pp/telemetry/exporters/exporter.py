"""The interface of an exporter, and the choice of exporters.

exporter = make("tensorboard", run)         # raises ImportError if its package is missing
exporter.step(record); exporter.event(record); exporter.close()
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.efficiency import PHASES
from recycle_pp.telemetry.events.deaths import DeathDetected
from recycle_pp.telemetry.events.event import Event
from recycle_pp.telemetry.events.islands import RoundApplied
from recycle_pp.telemetry.events.recovery import Resumed
from recycle_pp.telemetry.island_figures import IslandRounds, traffic
from recycle_pp.telemetry.run_folder import RunFolder

Record = Mapping[str, Any]

MEASURES = (
    "loss",
    "val_loss",
    "grad_norm",
    "lr",
    "step_seconds",
    "tokens_per_second",
    "tokens_per_second_per_worker",
    "tflops",
    "mfu",
    "peak_bytes",
    "reserved_bytes",
    *PHASES,
    "live_workers",
    "logged_bytes",
    "cpu_seconds",
)
"""Keys of metrics.jsonl that exporters send."""

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client"}
"""Exporter in the settings' group `log` -> package that it needs. The pip extra with this package has the
exporter's name."""


SETTINGS = {name: f"log.{name}" for name in PACKAGES} | {
    "command": "run.on_event",
    "evaluations": "run.evaluate",
    "store": "checkpoint.store",
}
"""Exporter -> setting that starts it."""

CLASSES = {"tensorboard": "TensorBoard", "wandb": "Wandb", "prometheus": "Prometheus", "command": "Command",
           "evaluations": "Evaluations", "store": "Copying"}  # fmt: skip
"""Exporter -> class in the module with its name."""

TOO_SLOW = "too slow: "
"""Begins a line in the log of an exporter that has skipped records."""


class Exporter:
    """The interface of an exporter. One thread calls its methods, in the order of each file's lines.

    The methods may block and may raise exceptions.
    """

    def step(self, record: Record) -> None:
        """Exports a line of metrics.jsonl."""

    def event(self, record: Record) -> None:
        """Exports a line of events.jsonl."""

    def close(self) -> None:
        """Ends the export. Blocks until all records have arrived."""


class Curves:
    """The values that an event adds to curves."""

    def __init__(self) -> None:
        self._deaths = 0
        self._rounds = IslandRounds()

    def of(self, event: Event) -> dict[str, float]:
        self._rounds.follow(event)
        if isinstance(event, DeathDetected):
            self._deaths += 1
            return {"events/deaths": self._deaths}
        if isinstance(event, Resumed):
            return {"events/stall_ms": 1e3 * event.stall_seconds, "events/lost_ops": event.lost_ops}
        if isinstance(event, RoundApplied) and (figures := self._rounds.figures()):
            return {f"islands/{key}": of for key, of in {**figures.gauges(), **traffic(event)}.items()}
        return {}


def wanted(settings: Settings) -> dict[str, list[str]]:
    """The exporters in the settings: name -> arguments."""
    log = settings.log
    out = dict[str, list[str]]()
    if log.tensorboard:
        out["tensorboard"] = []
    if log.wandb:
        out["wandb"] = []
    if log.prometheus is not None:
        out["prometheus"] = [str(log.prometheus)]
    if settings.run.on_event:
        out["command"] = [settings.run.on_event]
    if settings.checkpoint.store:
        out["store"] = [settings.checkpoint.store]
    if settings.run.evaluate:
        out["evaluations"] = []
    return out


def refuse_missing(settings: Settings) -> None:
    """Raises ValueError if an exporter's package is not installed, or if /bin/sh does not find the command in
    run.on_event or run.evaluate."""
    for key, command in (("run.on_event", settings.run.on_event), ("run.evaluate", settings.run.evaluate)):
        if command and (missing := _missing_command(command)):
            raise ValueError(f"{key} must be a shell command; /bin/sh finds no {missing} on this machine: {command}")
    for name in wanted(settings):
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            raise ValueError(
                f"log.{name} needs the package {PACKAGES[name]}, which is not installed: "
                f"pip install -e '.[{name}]' in the clone of recycle_pp"
            )


def _missing_command(command: str) -> str:
    """The command's first word if it is a plain name or path that the shell cannot find, else ""."""
    first = command.split(maxsplit=1)[0] if command.strip() else ""
    if not re.fullmatch(r"[\w./+-]+", first):
        return ""  # starts with an assignment, a quote or a subshell, which only the shell can check
    found = subprocess.run(["/bin/sh", "-c", 'command -v -- "$1"', "sh", first], capture_output=True, check=False)
    return first if found.returncode else ""


def make(name: str, run: RunFolder, *arguments: str) -> Exporter:
    """The exporter of that name. Raises ValueError if the name is unknown, ImportError if its package is missing."""
    if name not in SETTINGS:
        raise ValueError(f"{name!r} is not an exporter; choose from {', '.join(SETTINGS)}")
    module = import_module(f"{__package__}.{name}")
    exporter: Exporter = getattr(module, CLASSES[name])(run, *arguments)
    return exporter
