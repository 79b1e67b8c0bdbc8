"""Deaths of workers and their causes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from recycle_pp.wire.messages.supervisors import Death
from recycle_pp.wire.records import Seconds

from .event import Event, WorkerEvent


class DeathDetected(WorkerEvent):
    """A worker died. `cause`: signal, exception, out_of_memory, gpu, hang, eviction, node_loss, mismatch, quarantine,
    exit or unknown. `detail`: more about it. `injected`: whether a fault of `+fail_at` or `+hang_at` caused it."""

    exported = True
    cause: str = "unknown"
    detail: str = ""
    injected: bool = False

    def text(self) -> str:
        verb = "has ended" if self.cause == "eviction" else "died"
        return f"worker {self.worker} {verb} ({cause_in_words(self)})"


class DeathExplained(WorkerEvent):
    """The true cause of the worker's last death: `cause`, `detail`, `injected`. Written if the cause was unknown for 3
    s, so that `death_detected` names a different one."""

    cause: str
    detail: str
    injected: bool

    def text(self) -> str:
        return f"the cause of the last death of worker {self.worker} is known now: {cause_in_words(self)}"


class HangSuspected(WorkerEvent):
    """A worker makes no progress. `where`: the place at which it is stuck. `seconds`: time since its last progress
    ([hangs](recovery.md#hangs))."""

    where: str
    seconds: Seconds

    def text(self) -> str:
        where = self.where.removesuffix(f" in step {self.step}")  # the sentence begins with the step
        return f"worker {self.worker} has been stuck for {self.seconds:.1f} s in {where}"


def cause_in_words(death: DeathDetected | DeathExplained | Death) -> str:
    """The cause of a death in words: "killed by SIGKILL, an injected failure", "ValueError: no such token", ..."""
    detail = death.detail.strip()
    last = detail.splitlines()[-1] if detail else ""
    words = {
        "signal": f"killed by {last}",
        "exception": last or "an exception",
        "out_of_memory": "out of memory",
        "gpu": f"its GPU failed: {last}",
        "hang": f"stuck in {last}, so it was killed",
        "mismatch": f"{last}, so it was killed",
        "quarantine": f"no worker may run on its GPU: {last}",
        "eviction": "its machine was reclaimed",
        "node_loss": "its node is lost",
        "exit": last,
        "unknown": last,
    }.get(death.cause, f"{death.cause} {last}".strip())
    return words + (", an injected failure" if death.injected else "")


def explained(events: Iterable[Event]) -> list[Event]:
    """The events without `DeathExplained`. Its cause replaces the cause in the worker's previous `DeathDetected`."""
    out: list[Event] = []
    newest: dict[str, int] = {}  # worker -> index of its last death in `out`
    for event in events:
        match event:
            case DeathExplained(worker=worker, cause=cause, detail=detail, injected=injected):
                if (index := newest.get(worker)) is not None:
                    out[index] = msgspec.structs.replace(out[index], cause=cause, detail=detail, injected=injected)
                continue
            case DeathDetected(worker=worker):
                newest[worker] = len(out)
        out.append(event)
    return out
