"""What happens in a run, for machines (`events.jsonl`, `metrics.jsonl`) and in words for people.

    events = Events(run.events, steps=60, say=progress.say)
    events.record("spawned", step=20, generation=1, worker="1.2", rank=5, pid=4711, host="node-1")
    death = events.expect("death_detected", step=20, generation=1, worker="1.2", cause="unknown")
    events.record("resumed", ...)                           # waits: a reader sees each cause before its effects
    events.complete(death, cause="signal", detail="SIGKILL")    # writes both
    metrics = Lines(run.metrics)
    metrics.write({"step": 20, "loss": 2.31, ...})

A line is written whole, so that a killed process leaves no half one behind. The coordinator has a thread that writes
(`later`), so a death of its own may cost the lines of the last milliseconds, on a slow disk more.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .background import Background, Later, now
from .in_order import InOrder, Place
from .undone import cut

KEPT = 10_000  # lines
REPORT_SECONDS = 0.1
_reports = Background("reports")


class Lines:
    """A .jsonl file that grows, except for `cut`. NaN and infinity, which JSON does not know, become null.

    Each line ends with `term`, the writer's at the moment when the line goes to the disk (`wire.terms`).

    Lines that the disk refuses (it is full, or read-only) are kept, the newest KEPT of them, and written as soon as it
    takes them: with the next line, or by `again`. The trouble is reported once, and later the number of lost lines.
    """

    def __init__(self, path: Path, later: Later = now, term: Callable[[], int] = lambda: 0):
        """later: calls what touches the file, in order; in another thread, where that is not to be waited for. term:
        the writer's at present."""
        self._path, self._file, self._later, self._term = path, -1, later, term
        self._refused: deque[tuple[int, bytes]] = deque(maxlen=KEPT)  # step, record
        self._torn = False  # the last line is half there
        self._kept = -1  # newest step that the last cut has kept
        self._lost = 0  # lines that are not reported yet
        later(self._write)

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends a record with the key `step`. A step that a cut has kept gets no second line."""
        if not self._later(self._append, record["step"], json.dumps(_finite(record), separators=(",", ":")).encode()):
            self._lost += 1

    def again(self) -> None:
        """Tries to write the lines that the disk has refused."""
        if self._refused:
            self._later(self._write)

    def cut(self, steps: int) -> None:
        """Keeps the lines of the first `steps` steps, of those written so far."""
        self._later(self._cut, steps)

    def close(self) -> None:
        self._later(self._close)

    def _append(self, step: int, record: bytes) -> None:
        if step > self._kept:
            self._lost += len(self._refused) == KEPT
            self._refused.append((step, record))
            self._write()

    def _write(self) -> None:
        """The lines that wait, and makes the file."""
        try:
            if self._file < 0:
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            while self._refused:
                line = self._refused[0][1][:-1] + b',"term":%d}\n' % self._term()
                self._torn = os.write(self._file, b"\n" * self._torn + line) < len(line)
                if self._torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._refused.popleft()
            if self._lost:
                lost, self._lost = self._lost, 0
                _reports(_print, f"{self._path} lacks {plural(lost, 'line')}: the disk did not take them")
        except OSError as error:
            report_once(f"{self._path} cannot be written: {error.strerror}")

    def _cut(self, steps: int) -> None:
        self._refused = deque((record for record in self._refused if record[0] < steps), KEPT)
        self._close()
        self._kept = -1
        try:
            self._kept = cut(self._path, steps)
            self._torn = False
        except OSError as error:
            report_once(f"undone steps could not be removed from {self._path}: {error.strerror}")

    def _close(self) -> None:
        self._write()
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


@cache
def report_once(sentence: str) -> None:
    """Prints a sentence to standard error, once a process; waits REPORT_SECONDS at most, whoever reads there."""
    _reports(_print, f"{sentence}; the run goes on without it")
    _reports.flush(REPORT_SECONDS)


def _print(sentence: str) -> None:
    with suppress(OSError, ValueError):
        print(f"recycle_pp: {sentence}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Expected:
    """An event that has happened, with the fields that are known of it."""

    record: dict[str, Any]
    place: Place

    @property
    def complete(self) -> bool:
        """It is written, or waits only for events before it."""
        return not self.place.open


class Events:
    """Records events, and prints those that a person wants to know, in the order in which they happened.

    An event that is expected to become complete holds back all later ones. For one thread.
    """

    def __init__(
        self,
        path: Path,
        steps: int,
        say: Callable[[str], None] = lambda sentence: None,
        later: Later = now,
        term: Callable[[], int] = lambda: 0,
    ):
        """steps: of the whole run, for the sentences. later, term: see `Lines`."""
        self.term, self._steps, self._say = term, steps, say
        self._lines, self._order = Lines(path, later, term), InOrder()

    def record(
        self, event: str, *, step: int, generation: int, worker: object | None = None, **details: Any
    ) -> dict[str, Any]:
        """Appends one event and returns it.

        step, generation: where the run stands. worker: W(d, s) as "d.s" (or a Worker), None for the whole job.
        """
        record = _record(event, step, generation, worker, details)
        self._order(self._write, record)
        return record

    def expect(
        self, event: str, *, step: int, generation: int, worker: object | None = None, **details: Any
    ) -> Expected:
        """An event of this moment that waits for `complete`, and holds back later ones until then.

        details: the fields that it gets if `release` comes first.
        """
        record = _record(event, step, generation, worker, details)
        return Expected(record, self._order.reserve(self._write, record))

    def complete(self, expected: Expected, **details: Any) -> None:
        """Writes an event that is not complete yet, and the events that waited for it."""
        expected.record.update(details)
        self._order.settle(expected.place)

    def then(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function after the events so far are written."""
        self._order(function, *arguments)

    def release(self) -> None:
        """Writes all events that wait, as they are."""
        self._order.release()

    def again(self) -> None:
        self._lines.again()

    def close(self) -> None:
        """Events that still wait are not written."""
        self._lines.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._lines.write(record)
        if sentence := describe(record, self._steps):
            self._say(sentence)


def _record(
    event: str, step: int, generation: int, worker: object | None, details: Mapping[str, Any]
) -> dict[str, Any]:
    head = {"time": time.time(), "event": event, "step": step, "generation": generation}
    return {**head, "worker": None if worker is None else str(worker), **details}


def describe(record: Mapping[str, Any], steps: int) -> str | None:
    """An event in words, "step 20: worker 1.2 died"; None for one that is only for machines.

    steps: of the whole run.
    """
    describer = _WORDS.get(record["event"])
    return f"{when(record['step'], steps)}: {describer(record)}" if describer else None


def cause_in_words(record: Mapping[str, Any]) -> str:
    """Why a worker died: "killed by SIGKILL, a rehearsed failure", "ValueError: no such token", ..."""
    cause, detail = record.get("cause"), str(record.get("detail") or "").strip()
    last = detail.splitlines()[-1] if detail else ""
    words = {
        "signal": f"killed by {last}",
        "exception": last or "an exception",
        "out_of_memory": "out of memory",
        "gpu": f"its GPU failed: {last}",
        "hang": f"stuck in {last}, so it was killed",
        "mismatch": f"{last}, so it was killed",
        "eviction": "its node is taken away",
        "node_loss": "its node is lost",
        "exit": f"it ended by itself: {last}",
        "unknown": last,
    }.get(str(cause), f"{cause} {last}".strip())
    return words + (", a rehearsed failure" if record.get("injected") else "")


def explained(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events without `death_explained`: its cause replaces that of the worker's newest death before it."""
    out: list[dict[str, Any]] = []
    newest: dict[str, int] = {}  # worker -> index of its newest death in `out`
    for event in events:
        worker = str(event.get("worker"))
        if event["event"] == "death_explained":
            if worker in newest:
                cause: dict[str, Any] = {key: event[key] for key in ("cause", "detail", "injected") if key in event}
                out[newest[worker]] = {**out[newest[worker]], **cause}
            continue
        if event["event"] == "death_detected":
            newest[worker] = len(out)
        out.append(event)
    return out


def plural(count: Any, noun: str) -> str:
    """3 steps, 1 step."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def when(step: int, steps: int) -> str:
    """ "step 20" of an event's `step`, the one that runs or comes next; "after step 59" once all of 60 are done.

    The one place that words a step's number. Steps count from 0, as in files and flags. steps: of the whole run.
    """
    return f"step {step}" if step < steps else f"after step {steps - 1}"


def _place(e: Mapping[str, Any]) -> str:
    """Where a worker is stuck; the step is said already."""
    return str(e.get("where")).removesuffix(f" in step {e['step']}")


def _death(e: Mapping[str, Any]) -> str:
    verb = "has ended" if e.get("cause") == "eviction" else "died"
    return f"worker {e['worker']} {verb} ({cause_in_words(e)})"


def _given_up(e: Mapping[str, Any]) -> str:
    if e.get("respawns") == 0:
        return f"worker {e['worker']} is given up: run.respawns allows it no restart"
    return f"worker {e['worker']} died again after {plural(e.get('respawns', '?'), 'restart')}; it is given up"


def _workers(names: Sequence[str], most: int = 8) -> str:
    """ "worker 0.0 reads it", "workers 0.0, 1.0 and 14 more read it"."""
    shown = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f"worker {shown} reads it" if len(names) == 1 else f"workers {shown} read it"


def _resumed(e: Mapping[str, Any]) -> str:
    text = f"training continues after a stall of {1000 * e.get('stall_seconds', 0.0):.0f} ms"
    if e.get("lost_ops") is not None:
        text += f"; {plural(e['lost_ops'], 'op')} lost, {e.get('redone_ops', 0)} redone"
    return text


def _checkpoint(e: Mapping[str, Any]) -> str:
    """The name of its folder."""
    return f"checkpoint step-{e.get('checkpoint', e['step']):06d}"


def _unsaved(e: Mapping[str, Any]) -> str:
    """Which checkpoint a resume would take, and how old it is."""
    if "unsaved_seconds" not in e:  # of an earlier version
        return ""
    age = f"{e['unsaved_seconds']:.0f} s"
    return f"; the newest is step-{e['newest']:06d}, saved {age} ago" if e["newest"] else f"; none was saved in {age}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "started": lambda e: (
        f"{plural(e.get('workers', '?'), 'worker')} {'is' if e.get('workers') == 1 else 'are'} ready; training begins"
    ),
    "death_detected": _death,
    "death_explained": lambda e: f"worker {e['worker']} died of this cause: {cause_in_words(e)}",
    "hang_suspected": lambda e: f"worker {e['worker']} has been stuck for {e.get('seconds', 0.0):.1f} s in {_place(e)}",
    "mismatch": lambda e: (
        f"worker {e['worker']} on {e.get('host') or 'its host'} is wrong: {e.get('detail')}; memory or a "
        "processor has failed there. The step is redone without it"
    ),
    "renewed": lambda e: (
        f"all workers wait and none works, {(e.get('waiting') or ['?'])[0]} first; all links are built anew"
    ),
    "waits_for_data": lambda e: (
        f"the disk of {e.get('path')} has not answered for {e.get('seconds', 0.0):.0f} s; "
        f"{_workers(e.get('waiting') or ['?'])}, and the job waits until it answers"
    ),
    "repeated": lambda e: (
        f"gradients of stage {', '.join(map(str, e.get('stages', ['?'])))} need other exponents to fit "
        "into the sums; the step is redone with them"
    ),
    "resumed": _resumed,
    "respawned": lambda e: f"worker {e['worker']} is started again",
    "rejoined": lambda e: f"worker {e['worker']} is back",
    "evicted": lambda e: f"worker {e['worker']} got SIGTERM; it ends this step, hands over and leaves",
    "left": lambda e: f"worker {e['worker']} has handed over and takes no part any more",
    "update_skipped": lambda e: "the update is skipped: a gradient is NaN or infinite",
    "slow": lambda e: (
        f"worker {e['worker']} is slow: its ops take {e.get('factor')} times as long as its peers'; "
        "they take over a part of its work"
    ),
    "slow_no_more": lambda e: f"worker {e['worker']} is as fast as its peers again",
    "given_up": _given_up,
    "refused": lambda e: (
        f"worker {e['worker']} is sent away: "
        + (e.get("detail") or f"it runs on {e.get('platform')}, the others on {e.get('expected')}")
    ),
    "coordinator_lost": lambda e: f"the coordinator, in rank {e.get('rank')}'s supervisor, is lost",
    "coordinator_elected": lambda e: (
        f"rank {e.get('rank')} coordinates from now on, elected in {1000 * e.get('seconds', 0.0):.0f} ms"
    ),
    "node_joined": lambda e: f"{e.get('host')} joins in the place of worker {e['worker']}",
    "link_restored": lambda e: (
        f"{e.get('host')} reaches all nodes of the job again: worker {e['worker']} is started again"
    ),
    "supervisor_back": lambda e: f"the supervisor of rank {e.get('rank')} is back",
    "stage_lost": lambda e: f"stage {e.get('stage')} has {e.get('detail', 'no live worker left')}",
    "restored": lambda e: f"all workers go on from {_checkpoint(e)}",
    "checkpoint_damaged": lambda e: f"{_checkpoint(e)} is damaged and left out: {e.get('detail')}",
    "checkpoint_saved": lambda e: f"{_checkpoint(e)} saved",
    "checkpoint_skipped": lambda e: (
        f"{e.get('by')} still wrote the checkpoint before, so there is no {_checkpoint(e)}{_unsaved(e)}"
    ),
    "checkpoint_failed": lambda e: f"{_checkpoint(e)} was not saved: {e.get('detail')}{_unsaved(e)}",
    "ending": lambda e: f"{e.get('signal')}: the job finishes this step, saves a checkpoint and ends",
    "stopped": lambda e: f"the job has stopped: {e.get('reason')}",
    "finished": lambda e: "the run is finished",
}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
