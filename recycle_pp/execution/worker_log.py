"""Lines in a worker's log (logs/worker-1.2.log): start, plans, membership changes, end.

log = WorkerLog(worker)
log.write("ready after 2.1 s")
log.received(message)            # logs some of the coordinator's messages
"""

from __future__ import annotations

import time
from contextlib import suppress

from recycle_schedules import Worker

from recycle_pp.telemetry.words import names
from recycle_pp.wire.messages.generations import Adopt, Announce, SteadyPlan
from recycle_pp.wire.messages.lifecycle import Donate, Exit, Expect, Leave
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.table import Message


class WorkerLog:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._members: set[Worker] = set()
        self._step = 0  # the running or next step
        self._again = False

    def write(self, sentence: str) -> None:
        with suppress(OSError):  # a full disk must not stop the training
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} worker {self._worker}: {sentence}", flush=True)

    def received(self, message: Message) -> None:
        match message:
            case Announce():
                self._announced(message)
            case Adopt():
                for step, actions in message.steps.items():
                    if actions:
                        self.write(f"step {step}: received a plan for the rest of the step")
                self._recomputes(message.recompute)
            case SteadyPlan():
                self.write(f"step {self._step}: received a plan for the next steps")
                self._recomputes(message.recompute)
            case Commit():
                self._step = message.step + 1
            case Donate():
                self.write(f"step {self._step}: sends its state to worker {message.worker}")
            case Expect() if message.layers:
                self.write(f"step {self._step}: receives the state of layers {', '.join(map(str, message.layers))}")
            case Exit():
                self.write("the job ended")
            case Leave():
                self.write("left the job")

    def _recomputes(self, again: bool) -> None:
        if again != self._again:
            what = "are recomputed in the backward pass" if again else "keep their activations"
            self.write(f"step {self._step}: layers {what}")
        self._again = again

    def _announced(self, message: Announce) -> None:
        self._step = max(self._step, message.committed + 1)
        before, self._members = self._members, set(message.members.values())
        changes = [("removed", before - self._members), ("added", self._members - before - {self._worker})]
        what = "; ".join(f"{word} {names(sorted(of), 8)}" for word, of in changes if of and before)
        generation = f"generation {message.generation}, {len(self._members)} workers"
        self.write(f"step {self._step}: {generation}" + (f": {what}" if what else ""))
