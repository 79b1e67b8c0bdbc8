"""What torch allocates on the CPU while something runs, counted by its own profiler.

with allocations() as of: stage.forward(...)
of.kept, of.peak        # bytes: more than before at the end, and most at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    kept: int = 0
    peak: int = 0


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Of this thread. Memory from before that is freed meanwhile counts as negative only if torch knows its size."""
    of = Allocations()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield of
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    levels = list(accumulate((event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())), initial=0))
    of.kept, of.peak = levels[-1], max(levels)
