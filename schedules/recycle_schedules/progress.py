"""The finished ops of a broken step, as arrays.

    progress = Progress.of([Done("F", (0, 1), 2, Worker(0, 2)), ...], problem.first, problem.stages, problem.dead)
    progress = Progress.ran(kinds, microbatches, stages, pipelines, shape)     # from columns, live workers only
    Problem(..., done=progress)

In the arrays, row g is micro-batch g (global id) and column s is stage s. A recovery calls `Progress.ran`, because a
list of `Done` could have a million entries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .op_kinds import KINDS, OpKind, TensorKind
from .ops import Done, MicroBatch, Worker

BIT: dict[str, int] = {kind: 1 << kind.code for kind in KINDS}
"""The bit of each op kind in `Progress.kinds`."""
FORWARD = BIT[OpKind.FORWARD]
BACKWARD = sum(BIT[kind] for kind in KINDS if kind.makes is TensorKind.GRADIENT)
WEIGHTS = sum(BIT[kind] for kind in KINDS if kind.completes_gradient)
SENT_F, SENT_B = 1, 2
"""Bits of `Progress.sent`: SENT_F for the output of `F`, SENT_B for the output of `I` or `B`."""
SENT = {TensorKind.ACTIVATION: SENT_F, TensorKind.GRADIENT: SENT_B}
NEED_F, NEED_G, NEED_W = 1, 2, 4
NEED_ALL = NEED_F | NEED_G | NEED_W
"""Bits of the ops that a micro-batch still needs at a stage. NEED_F: `F`. NEED_G: `I` or `B`. NEED_W: `W` or `B`."""
NEEDS = ((NEED_F, FORWARD), (NEED_G, BACKWARD), (NEED_W, WEIGHTS))
"""(need, bits): the need is met if `Progress.kinds` has one of the bits."""


@dataclass(frozen=True, eq=False)
class Progress:
    """The finished ops by micro-batch and stage: arrays (N, P).

    host   int32: pipeline of the live worker that started the micro-batch at the stage, -1 if there is none
    kinds  uint8: one bit (BIT) for each kind of op that the host has finished for the micro-batch at the stage
    sent   uint8: bits SENT_F and SENT_B; a bit is set if the receiver has the output or a live worker can send it"""

    host: np.ndarray
    kinds: np.ndarray
    sent: np.ndarray

    @classmethod
    def of(cls, done: Iterable[Done], first: np.ndarray, stages: int, dead: Collection[Worker]) -> Progress:
        """The progress from a list of finished ops. first: `Problem.first`. dead: workers whose ops are lost."""
        begin = first.tolist()
        mine = [e for e in done if e.worker not in dead]
        columns = [(BIT[e.op], begin[e.microbatch[0]] + e.microbatch[1], e.stage, e.worker.pipeline) for e in mine]
        bits, microbatches, stage, pipelines = np.array(columns, np.int64).reshape(-1, 4).T
        found = cls.ran(bits, microbatches, stage, pipelines, (begin[-1], stages))
        for e in done:
            if e.worker in dead and e.delivered and e.op.makes is not None:
                found.sent[begin[e.microbatch[0]] + e.microbatch[1], e.stage] |= SENT[e.op.makes]
        return found

    @classmethod
    def ran(
        cls,
        kinds: np.ndarray,
        microbatches: np.ndarray,
        stages: np.ndarray,
        pipelines: np.ndarray,
        shape: tuple[int, int],
    ) -> Progress:
        """The progress from the finished ops of live workers, given as columns of equal length.

        kinds: BIT of each op's kind. microbatches: global ids. pipelines: pipeline of each op's worker. shape: (N, P).
        The outputs of these ops count as sent, because their workers can send them again."""
        host, had = np.full(shape, -1, np.int32), np.zeros(shape, np.uint8)
        host[microbatches, stages] = pipelines
        np.bitwise_or.at(had, (microbatches, stages), kinds.astype(np.uint8))
        sent = np.where(had & FORWARD, SENT_F, 0) | np.where(had & BACKWARD, SENT_B, 0)
        return cls(host, had, sent.astype(np.uint8))

    def entries(self, keys: Sequence[MicroBatch]) -> Iterator[Done]:
        """Yield the finished ops of live workers. keys: all micro-batches, indexed by global id."""
        for g, s in np.argwhere(self.host >= 0).tolist():
            for kind in KINDS:
                if self.kinds[g, s] & BIT[kind]:
                    yield Done(kind, keys[g], s, Worker(int(self.host[g, s]), s), delivered=True)
