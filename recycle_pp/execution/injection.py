"""Injects faults into this worker.

    injector = Injector(faults, last_words)      # the faults of this worker that have not fired
    injector.arm(step, actions)                  # at the start of a step: selects the op
    injector.fire(action.kind, step)             # whenever a fault of the step may fire; a kill does not return
    injector.inject("regroup", step)             # at moments outside the ops of a step
    injector.drag(spans.spent)                   # after an op: slows the worker down

A fault fires in the middle of its step. Its moment may be a kind of op or message, such as `forward` or `send`. If this
worker has n actions of this kind in the step, the fault fires at the action with index n // 2. If n is 0, it fires at
the vote. n can be 0 at an end of the pipeline, or in the remainder of a step after a death.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from recycle_schedules import Action, OpKind

from recycle_pp.config.faults import Fault

_PLACES = {
    "forward": (OpKind.FORWARD,),
    "backward": (OpKind.BACKWARD_INPUT, OpKind.BACKWARD),
    "weight": (OpKind.BACKWARD_WEIGHT, OpKind.BACKWARD),
    "send": (OpKind.SEND_ACTIVATION, OpKind.SEND_GRADIENT),
    "receive": (OpKind.RECV_ACTIVATION, OpKind.RECV_GRADIENT),
    "allreduce": (OpKind.REDUCE,),
    "vote": (),
    "optimizer": (),
}
_SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


class Injector:
    def __init__(self, faults: Sequence[Fault], last_words: Callable[..., None]) -> None:
        self._faults = [f for f in faults if f.kind in _SIGNALS]
        self._slow = [f for f in faults if f.kind == "slow"]
        self.last_words = last_words
        self._armed: Fault | None = None
        self._countdown = 0
        self._step = -1

    def arm(self, step: int, actions: Sequence[Action]) -> None:
        self._step = step
        self._armed = next((f for f in self._faults if f.step == step and f.moment in _PLACES), None)
        if self._armed:
            self._countdown = sum(a.kind in _PLACES[self._armed.moment] for a in actions) // 2

    def fire(self, place: str, step: int) -> None:
        """Fires the armed fault if its moment is reached. place: the kind of an action, or a moment."""
        fault = self._armed
        if fault is None or step != fault.step:
            return
        if place in _PLACES[fault.moment]:
            self._countdown -= 1
            if self._countdown < 0:
                self._send_signal(fault)
        elif place == fault.moment or (place == "vote" and _PLACES[fault.moment]):
            self._send_signal(fault)

    def inject(self, moment: str, step: int) -> None:
        """Fires the faults of this moment whose step is `step` or earlier. May be called from any thread."""
        for fault in [f for f in self._faults if f.moment == moment and f.step <= step]:
            self._send_signal(fault)

    def drag(self, spent: Callable[[], float]) -> None:
        """Sleeps to emulate a slow worker. The sleep counts as own time of the op (see `spans`). spent: returns the own
        time so far. It is called only if the worker must be slow."""
        factor = max((f.factor for f in self._slow if f.step <= self._step), default=1.0)
        if factor > 1:
            time.sleep(spent() * (factor - 1))

    def _send_signal(self, fault: Fault) -> None:
        self._armed = None
        self._faults.remove(fault)
        self.last_words(cause="injected", detail=f"{fault.kind}@{fault.moment}")
        os.kill(os.getpid(), _SIGNALS[fault.kind])
