"""Parses the injected faults: `+fail_at`, `+hang_at`, `+slow_at` and `+rejoin_at`.

    faults(settings)   # [Fault("kill", 20, Worker(1, 2), "forward", 1.0), ...], sorted by step

`STEP:D.S` means worker W(D,S) in step STEP; steps count from 0. `20:1.2@backward` also selects a moment within the
step. `slow_at` takes a factor instead of a moment: with `20:1.2@2.5`, each op of worker W(1,2) takes 2.5 times as long
from step 20 on.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from recycle_schedules import Worker

from .settings import FAULTS, Settings

MOMENTS = (
    # Moments within a step.
    "forward", "backward", "weight", "send", "receive", "allreduce", "vote", "optimizer",
    # Moments at the end of a step. If STEP has no such moment, the fault happens in the next step that has one.
    "commit", "checkpoint", "validation",
    # Moments of a recovery or a join. The fault happens at the first such moment in or after STEP.
    "regroup", "adopt", "donate", "join",
    # Moments with sharded optimizer state. spread: the worker sends weights after a commit. heal: it replicates copies.
    "spread", "heal",
)  # fmt: skip

_KINDS = dict(zip(FAULTS, ("kill", "hang", "slow", "rejoin"), strict=True))
_PATTERN = re.compile(r"(\d{1,9}):(\d{1,6})\.(\d{1,6})(?:@(.+))?")


class Fault(NamedTuple):
    kind: str  # kill | hang | slow | rejoin
    step: int
    worker: Worker
    moment: str = "forward"  # for kill and hang: one of MOMENTS
    factor: float = 1.0  # for slow: the factor by which ops take longer


def faults(settings: Settings) -> list[Fault]:
    """All faults of the run, sorted by step.

    Raises ValueError, with a sentence that names the first invalid fault and the allowed values.
    """
    found = [_parse(key, text, settings) for key in FAULTS for text in getattr(settings, key)]
    found.sort(key=lambda fault: fault.step)
    for index, fault in enumerate(found):
        before = [other for other in found[:index] if other.worker == fault.worker and other.step < fault.step]
        if fault.kind == "rejoin" and not any(other.kind in ("kill", "hang") for other in before):
            raise ValueError(
                f"rejoin_at={fault.step}:{fault.worker} needs an earlier fail_at or hang_at of worker {fault.worker}"
            )
    return found


def _parse(key: str, text: str, settings: Settings) -> Fault:
    match = _PATTERN.fullmatch(text.strip())
    form = {"slow_at": "STEP:D.S@FACTOR", "rejoin_at": "STEP:D.S"}.get(key, "STEP:D.S or STEP:D.S@MOMENT")
    if not match or (key == "rejoin_at" and match[4]) or (key == "slow_at" and not match[4]):
        raise ValueError(f"{key} must be {form}, for instance 20:1.2{'@2.5' if key == 'slow_at' else ''}, not {text!r}")
    step, worker = int(match[1]), Worker(int(match[2]), int(match[3]))
    pipelines, stages, steps = settings.parallel.pipelines, settings.parallel.stages, settings.run.steps
    if worker.pipeline >= pipelines or worker.stage >= stages:
        raise ValueError(
            f"{key}={text}: there is no worker {worker}; with parallel.pipelines={pipelines} and "
            f"parallel.stages={stages} the workers are 0.0 to {pipelines - 1}.{stages - 1}"
        )
    if step >= steps:
        raise ValueError(f"{key}={text}: there is no such step; with run.steps={steps} the steps are 0 to {steps - 1}")
    if key == "slow_at":
        return Fault("slow", step, worker, factor=_factor(text, match[4]))
    moment = match[4] or "forward"
    if moment not in MOMENTS:
        raise ValueError(f"{key}={text}: there is no moment {moment!r}; allowed: {', '.join(MOMENTS)}")
    return Fault(_KINDS[key], step, worker, moment)


def _factor(text: str, factor: str) -> float:
    try:
        value = float(factor)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 1e6:
        raise ValueError(f"slow_at={text}: the factor must be a number of at least 1, not {factor!r}")
    return value
