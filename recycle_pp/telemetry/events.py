"""What happens in a run, for machines (`events.jsonl`, `metrics.jsonl`) and in words for people.

    events = Events(run.events, say=progress.say)
    events.record("death_detected", step=20, generation=1, worker="1.2", cause="signal", detail="SIGKILL")
    metrics = Lines(run.metrics)
    metrics.write({"step": 20, "loss": 2.31, ...})

A line is written whole, so that a killed process loses none and leaves no half one behind.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any


class Lines:
    """A .jsonl file that only grows. NaN and infinity, which JSON does not know, become null.

    On a full disk lines are lost, which is said once, and the training goes on.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._torn = False  # the last line is half there

    def write(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(_finite(record), separators=(",", ":")).encode() + b"\n"
        try:
            self._torn = os.write(self._file, b"\n" * self._torn + line) < len(line)
        except OSError as error:
            report_once(f"{self._path} cannot be written: {error.strerror}")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


@cache
def report_once(sentence: str) -> None:
    print(f"recycle_pp: {sentence}; the run goes on without", file=sys.stderr, flush=True)


class Events:
    """Records events, and says those that a person wants to know."""

    def __init__(self, path: Path, say: Callable[[str], None] = lambda sentence: None):
        self._lines, self._say = Lines(path), say

    def record(
        self, event: str, *, step: int, generation: int, worker: object | None = None, **details: Any
    ) -> dict[str, Any]:
        """Appends one event and returns it.

        step, generation: where the run stands. worker: W(d, s) as "d.s" (or a Worker), None for the whole job.
        """
        head = {"time": time.time(), "event": event, "step": step, "generation": generation}
        record = {**head, "worker": None if worker is None else str(worker), **details}
        self._lines.write(record)
        if sentence := describe(record):
            self._say(sentence)
        return record

    def close(self) -> None:
        self._lines.close()


def describe(record: Mapping[str, Any]) -> str | None:
    """An event in words; None for one that is only for machines."""
    describer = _WORDS.get(record["event"])
    return describer(record) if describer else None


def cause_in_words(record: Mapping[str, Any]) -> str:
    """Why a worker died: "killed by SIGKILL, as fail_at asked", "ValueError: no such token", ..."""
    cause, detail = record.get("cause"), str(record.get("detail") or "").strip()
    last = detail.splitlines()[-1] if detail else ""
    words = {
        "signal": f"killed by {last}",
        "exception": last or "an exception",
        "out_of_memory": "out of memory",
        "hang": f"stuck in {last}, so it was killed",
        "eviction": "its node was taken away",
        "node_loss": "its node was lost",
        "exit": f"it ended by itself: {last}",
        "unknown": last,
    }.get(str(cause), f"{cause} {last}".strip())
    return words + (", as asked" if record.get("injected") else "")


def _plural(count: Any, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _resumed(e: Mapping[str, Any]) -> str:
    text = f"step {e['step']}: goes on after {1000 * e.get('stall_seconds', 0.0):.0f} ms"
    if e.get("lost_ops") is not None:
        text += f"; {_plural(e['lost_ops'], 'op')} lost, {_plural(e.get('redone_ops', 0), 'op')} done again"
    return text


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda e: f"{_plural(e.get('workers', '?'), 'worker')} ready, the run begins at step {e['step']}",
    "death_detected": lambda e: f"step {e['step']}: worker {e['worker']} died ({cause_in_words(e)})",
    "hang_suspected": lambda e: (
        f"step {e['step']}: worker {e['worker']} is stuck in {e.get('where')}, for {e.get('seconds', 0.0):.1f} s"
    ),
    "renewed": lambda e: (
        f"step {e['step']}: everybody waits and nobody works (first {(e.get('waiting') or ['?'])[0]}); the links are "
        "renewed"
    ),
    "repeated": lambda e: (
        f"step {e['step']}: done again: gradients of stage {', '.join(map(str, e.get('stages', ['?'])))} need other "
        "exponents to fit into the sums"
    ),
    "resumed": _resumed,
    "respawned": lambda e: f"step {e['step']}: worker {e['worker']} is started again",
    "rejoined": lambda e: f"step {e['step']}: worker {e['worker']} is back",
    "evicted": lambda e: f"step {e['step']}: worker {e['worker']} was told to go; it stays until the step is done",
    "left": lambda e: f"step {e['step']}: worker {e['worker']} has handed over and leaves",
    "slow": lambda e: (
        f"step {e['step']}: worker {e['worker']} is slow: its ops take {e.get('factor')} times as long as its peers'; "
        "they take over a part of its work"
    ),
    "slow_no_more": lambda e: f"step {e['step']}: worker {e['worker']} is as fast as its peers again",
    "given_up": lambda e: f"step {e['step']}: worker {e['worker']} is given up after {e.get('respawns', '?')} respawns",
    "refused": lambda e: (
        f"step {e['step']}: worker {e['worker']} is sent away: it has {e.get('platform')}, the job {e.get('expected')}"
    ),
    "coordinator_lost": lambda e: f"step {e['step']}: the coordinator, which ran with rank {e.get('rank')}, is lost",
    "coordinator_elected": lambda e: (
        f"step {e['step']}: rank {e.get('rank')} coordinates from now on, elected in "
        f"{1000 * e.get('seconds', 0.0):.0f} ms"
    ),
    "node_joined": lambda e: f"step {e['step']}: {e.get('host')} joins in the place of worker {e['worker']}",
    "supervisor_back": lambda e: f"step {e['step']}: the supervisor of rank {e.get('rank')} is back",
    "stage_lost": lambda e: f"step {e['step']}: stage {e.get('stage')} has lost its last worker",
    "restored": lambda e: f"step {e['step']}: all workers go on from the checkpoint of step {e.get('checkpoint')}",
    "checkpoint_damaged": lambda e: (
        f"step {e['step']}: the checkpoint of step {e.get('checkpoint')} is damaged and left out: {e.get('detail')}"
    ),
    "checkpoint_saved": lambda e: f"step {e['step']}: checkpoint of step {e.get('checkpoint', e['step'])} saved",
    "checkpoint_skipped": lambda e: (
        f"step {e['step']}: no checkpoint of step {e.get('checkpoint')}: {e.get('by')} still wrote the one before"
    ),
    "checkpoint_failed": lambda e: (
        f"step {e['step']}: the checkpoint of step {e.get('checkpoint')} was not saved: {e.get('detail')}"
    ),
    "ending": lambda e: f"step {e['step']}: {e.get('signal')}; the job finishes this step, saves a checkpoint and ends",
    "stopped": lambda e: f"step {e['step']}: stopped: {e.get('reason')}",
    "finished": lambda e: f"finished after {_plural(e['step'], 'step')}",
}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
