"""Reports the durations of a worker process's first ops, and the contents of its compile caches at the start.

    first = FirstOpsReport(backend, device, send)       # before anything is compiled
    with compiling(first.kernels): stage.warm()
    first.ready(spans)                                  # the worker is ready
    executor.on_commit.append(first.stepped)

The coordinator writes the reports to `receipts/first-forward.jsonl`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec import structs

from recycle_pp.numerics.gradients import Reduced
from recycle_pp.wire.messages.activity import REDUCTION
from recycle_pp.wire.messages.lifecycle import FirstOps
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import Message

from .compile_caches import caches
from .spans import Spans

_NAMES = {"F": "forward", "I": "backward", "B": "backward", REDUCTION: "reduction"}


class FirstOpsReport:
    """The report of one worker process.

    kernels: kernel -> seconds of its compilation; the caller fills it before `ready`
    """

    def __init__(self, backend: str, device: torch.device, send: Callable[[Message], None]) -> None:
        self.kernels: dict[str, float] = {}
        self._message = FirstOps(backend, str(device), torch.cuda.device_count(), caches(), self.kernels)
        self._send = send
        self._spans: Spans | None = None  # set from the first report until the second

    def ready(self, spans: Spans) -> None:
        self._spans = spans
        self._send(self._message)

    def stepped(self, commit: Commit, reduced: Reduced) -> None:
        if self._spans is not None:
            first, self._spans = self._spans.first, None
            seconds = {name: first[kind] for kind, name in _NAMES.items() if kind in first}
            self._send(structs.replace(self._message, seconds=seconds))
