"""The lines on the console during a run: one per step, and sentences between them.

    progress = Progress(steps=60, workers=12, stream=sys.stdout)
    progress.step({"step": 20, "loss": 2.31, "tokens_per_second": 51000, "live_workers": 11, ...})   # a metrics record
    progress.say("step 20: worker 1.2 died (killed by SIGKILL)")

Steps count from 0, and each line shows the number of steps left: the last of 60 steps is "step 59", with "0 steps
left".
On a terminal, lines have colours and a bar. A reader that closes the pipe (`| head`) does not stop the run.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, TextIO

from recycle_pp.config.sizes import format_size

from .background import BackgroundStream
from .words import plural

_NUMBERS = {"loss": "loss {:.4f}", "val_loss": "val {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
_COMPUTE = ("forward_seconds", "backward_seconds", "weight_seconds")
_BAR = 20  # characters
_BOLD, _DIM, _RED, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"


class Progress:
    """Prints the progress of a run.

    steps, workers: numbers of steps and workers of the whole run."""

    def __init__(self, steps: int, workers: int, stream: TextIO | BackgroundStream | None = None):
        self._steps = steps
        self._workers = workers
        self._stream: TextIO | BackgroundStream = sys.stdout if stream is None else stream
        self._colour = self._stream.isatty() and "NO_COLOR" not in os.environ
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=20)  # of recent steps

    def step(self, record: Mapping[str, Any]) -> None:
        """Prints the line of a committed step. Omits the speed of the first step, which includes compilation and first
        memory accesses.

        record: a line of metrics.jsonl; missing keys are left out
        """
        now = time.monotonic()
        first = self._last is None
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        left = self._steps - 1 - record["step"]
        parts = [f"step {record['step']:>{len(str(self._steps - 1))}}"]
        for key, form in _NUMBERS.items():
            if record.get(key) is not None and not (first and key == "tokens_per_second"):
                parts.append(form.format(record[key]))
                if key == "val_loss" and record.get("val_samples") is not None:
                    parts[-1] += f" ({plural(record['val_samples'], 'sample')})"
        parts += [] if first else hardware(record)
        parts.append(self._live(record))
        eta = f", ETA {duration(left * median(self._seconds))}" if self._seconds and left else ""
        parts.append(f"{plural(left, 'step')} left{eta}")
        text = "  ".join(part for part in parts if part)
        if self._colour:
            filled = round(_BAR * (1 - left / self._steps))
            text = f"{_DIM}{'█' * filled}{'░' * (_BAR - filled)}{_RESET} {text}"
        self._write(text)

    def say(self, sentence: str) -> None:
        """Prints a sentence on a line of its own."""
        self._write(f"{_BOLD}{sentence}{_RESET}" if self._colour else sentence)

    def _live(self, record: Mapping[str, Any]) -> str:
        live = record.get("live_workers")
        if live is None:
            return ""
        if live == self._workers:
            return f"{live} worker{'' if live == 1 else 's'}"
        text = f"{live} of {self._workers} workers"
        if record.get("least_live_stage") is not None:
            text += f", stage {record['least_live_stage']} has the fewest"
            if record.get("least_live") is not None:
                text += f": {record['least_live']}"
        return f"{_RED}{text}{_RESET}" if self._colour else text

    def _write(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # the reader has closed its end
            self._stream = open(os.devnull, "w")  # noqa: SIM115


def hardware(record: Mapping[str, Any]) -> list[str]:
    """Phrases about the use of the hardware in a step. Figures that the record lacks are left out.

    record: a line of metrics.jsonl
    """
    found = []
    if record.get("tokens_per_second_per_worker") is not None:
        found.append(f"{record['tokens_per_second_per_worker']:,.0f} tokens/s a worker")
    if record.get("tflops") is not None:
        found.append(f"{record['tflops']:.3g} TFLOP/s a worker")
    if record.get("mfu") is not None:
        found.append(f"MFU {100 * record['mfu']:.1f} %")
    times = [record[key] for key in _COMPUTE if record.get(key) is not None]
    if record.get("step_seconds") and len(times) == len(_COMPUTE):
        found.append(f"compute {100 * sum(times) / record['step_seconds']:.0f} %")
    if record.get("peak_bytes") is not None:
        found.append(f"peak {format_size(record['peak_bytes'])}")
    return found


def duration(seconds: float) -> str:
    """A duration as text, such as "1:23:45" or "4:05"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
