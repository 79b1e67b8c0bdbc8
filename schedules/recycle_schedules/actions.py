"""Action lists: each worker's ops and messages in execution order.

    todo = actions(plan)
    for action in todo[Worker(0, 2)]: ...       # RECV_F, F, SEND_F, ... as Action tuples
    unpack(todo.packed(Worker(0, 2)))           # the same list, via bytes

The lists cannot deadlock, even if every worker handles its messages strictly in order and each message blocks until
both ends reach it (as with NCCL, where a pair of workers shares a stream). All messages have one total order, by the
planned end of the op that makes the tensor. Every list follows this order. An op before a message in a list depends
only on earlier messages, so the earliest outstanding message can always proceed. Messages connect adjacent stages only.

A step of a thousand workers has a million actions, and a recovery waits for them. The code therefore works on whole
numpy columns, and builds `Action` tuples for one worker at a time, when its list is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .op_kinds import KINDS, F, OpKind, TensorKind
from .ops import MicroBatch, Tensor, Worker, input_of
from .plans import OpArrays, Plan
from .progress import BACKWARD, FORWARD

_ALL_KINDS = tuple(OpKind)  # indexed by the kind's code
_MAKES_GRADIENT = np.array([kind.makes is TensorKind.GRADIENT for kind in KINDS])
_COMPLETES_GRADIENT = np.array([kind.completes_gradient for kind in KINDS])
_SENDS = np.array([OpKind.SEND_ACTIVATION.code, OpKind.SEND_GRADIENT.code])  # indexed by the code of the tensor's kind
_RECEIVES = np.array([OpKind.RECV_ACTIVATION.code, OpKind.RECV_GRADIENT.code])
_HELD = -2  # used as the index of the op that makes a tensor, if the tensor was made before time 0
_MESSAGE, _SUM, _OP = range(3)  # sort key within a gap: messages, then the reduction, then the op after the gap
_ROW = np.dtype("<i4")


class Action(NamedTuple):
    """One entry of a worker's list, in torch's notation.

    kind: an op, a message, or REDUCE (the all-reduce of the stage's gradients). At stage s, RECV_F receives the output
    of stage s - 1, RECV_B receives the input gradient of stage s + 1, and SEND_F and SEND_B send a tensor made at s.
    peer: the worker at the other end of a message, None for ops and REDUCE."""

    kind: OpKind
    stage: int
    microbatch: MicroBatch | None = None
    peer: Worker | None = None

    @property
    def tensor(self) -> Tensor:
        """The boundary tensor of a SEND or RECV."""
        assert self.microbatch is not None
        if self.kind.makes is not None:
            return self.kind.makes, self.microbatch, self.stage - self.kind.makes.step
        assert self.kind.takes is not None
        return self.kind.takes, self.microbatch, self.stage

    def __str__(self) -> str:
        mb = "" if self.microbatch is None else f"{self.microbatch[0]}.{self.microbatch[1]}"
        return f"{self.stage}{self.kind}{mb}"


class Actions(Mapping[Worker, list[Action]]):
    """The lists of all live workers: a mapping from worker to its list of `Action`.

    table   int32, (n, 6): code of the kind, stage, micro-batch (pipeline, index), peer (pipeline, stage). For an
            action without a micro-batch or a peer, both of the numbers are -1
    rows    worker -> its rows of the table"""

    def __init__(self, table: np.ndarray, rows: Mapping[Worker, slice]) -> None:
        self._table, self._rows = table, rows

    def __getitem__(self, worker: Worker) -> list[Action]:
        return _listed(self._table[self._rows[worker]])

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """Bytes of the table."""
        return self._table.nbytes

    def renamed(self, names: Sequence[int]) -> Actions:
        """The same lists with pipeline k renamed to names[k]."""
        name = np.append(np.array(names, dtype=_ROW), -1)  # index -1 (no pipeline) maps to -1
        table = self._table.copy()
        table[:, (2, 4)] = name[table[:, (2, 4)]]
        return Actions(table, {Worker(names[w.pipeline], w.stage): rows for w, rows in self._rows.items()})

    def packed(self, worker: Worker) -> bytes:
        """A worker's list as bytes, b"" for a worker without a list. `unpack` decodes it."""
        return self._table[self._rows.get(worker, slice(0))].tobytes()


def unpack(data: bytes) -> list[Action]:
    """Decode a list from `Actions.packed`. Raises ValueError if the bytes are not a list."""
    return _listed(np.frombuffer(data, _ROW).reshape(-1, 6))


def actions(
    plan: Plan, holders: Mapping[Tensor, Collection[Worker]] | None = None, *, forwards: int | None = None
) -> Actions:
    """The action lists of all live workers for a plan.

    holders   tensor -> live workers that hold the tensor, besides the worker that made it. All these tensors were made
              before time 0. A worker that holds a tensor receives no message for it. Other consumers receive the tensor
              from its producer if the producer is alive, else from one of `holders`.
    forwards  for a pass over validation data: the lists contain only the F of each pipeline's first `forwards`
              micro-batches, and the messages of these F. None: all ops

    A SEND directly follows the op that makes its tensor. If the tensor was made before time 0, the SEND is a re-send,
    and re-sends come first. A RECV comes one compute op before the op that consumes its tensor, so that the transfer
    overlaps compute. It comes earlier if the message order requires it.

    Raises ValueError if an op needs a tensor that no op makes and no worker holds."""
    ops = _Ops.of(plan, forwards)
    messages = _messages(plan, ops, holders or {})
    reduced = [] if forwards is not None else sorted(set(range(plan.problem.stages)) - plan.problem.finished)
    return _merged(plan, ops, messages, reduced)


class _Ops(NamedTuple):
    """The ops as columns, shape (n,), in execution order: every op comes after its dependencies."""

    arrays: OpArrays
    worker: np.ndarray  # pipeline * P + stage
    place: np.ndarray  # position among the worker's ops

    @classmethod
    def of(cls, plan: Plan, forwards: int | None) -> _Ops:
        a, p = plan.arrays, plan.problem
        if forwards is not None:
            # each micro-batch's index in its pipeline; the last entry is for O
            index = np.concat([np.arange(m) for m in (*p.counts, 1)])
            a = a.take((a.kind == F) & (index[a.microbatch] < forwards))
        a = a.take(plan.running_order(a))
        worker = a.pipeline * np.int64(p.stages) + a.stage
        by_worker = np.argsort(worker, kind="stable")
        counts = np.bincount(worker, minlength=p.pipelines * p.stages)
        place = np.empty(len(a), np.int64)
        place[by_worker] = np.arange(len(a)) - np.repeat(np.cumsum(counts) - counts, counts)
        return cls(a, worker, place)


class _Messages(NamedTuple):
    """The messages as columns, shape (m,), in the total order that all workers follow. Re-sends come first, in the
    execution order of the ops that consume the tensors. The other messages follow, in the order in which the ops that
    make the tensors end."""

    gradient: np.ndarray  # code of the tensor's kind
    microbatch: np.ndarray  # global id
    stage: np.ndarray  # the stage that made the tensor
    sender: np.ndarray  # pipeline * P + stage
    receiver: np.ndarray  # pipeline * P + stage
    made: np.ndarray  # position of the producer among the sender's ops; -1: made before time 0
    used: np.ndarray  # position of the consumer among the receiver's ops


def _messages(plan: Plan, ops: _Ops, holders: Mapping[Tensor, Collection[Worker]]) -> _Messages:
    """The messages of a plan. Raises ValueError if an op needs a tensor that no op makes and no worker holds."""
    p, a = plan.problem, ops.arrays
    maker = np.full((2, p.total, p.stages), -1)  # index of the op that makes each tensor
    forward, backward = a.kind == F, _MAKES_GRADIENT[a.kind]
    for tensor, makes in ((TensorKind.ACTIVATION, forward), (TensorKind.GRADIENT, backward)):
        maker[tensor.code, a.microbatch[makes], a.stage[makes]] = np.flatnonzero(makes)
    consumer = np.flatnonzero((forward & (a.stage > 0)) | (backward & (a.stage < p.stages - 1)))
    gradient = backward[consumer].astype(np.int64)  # code of the tensor's kind
    stage = a.stage[consumer] + np.where(gradient, 1, -1)
    at = a.microbatch[consumer], stage
    kept = (p.progress.kinds[at] & np.where(gradient, BACKWARD, FORWARD)) != 0  # made by a live worker
    source = np.where(kept, _HELD, maker[gradient, *at])
    sender = np.where(kept, p.progress.host[at] * p.stages + stage, ops.worker[np.maximum(source, 0)])
    local = np.zeros(len(consumer), bool)
    for k, op in enumerate(plan.listed(a.take(consumer)) if holders else ()):
        assert op.microbatch is not None
        needed = input_of(op.kind, op.microbatch, op.stage, p.stages)
        having = holders.get(needed, ()) if needed else ()
        local[k] = op.worker in having
        if having and not kept[k]:
            first = min(having)
            sender[k], source[k] = first.pipeline * p.stages + first.stage, _HELD
    missing = np.flatnonzero(source == -1)
    if len(missing):
        op = next(plan.listed(a.take(consumer[missing])))
        raise ValueError(
            f"{op.kind} of micro-batch {op.microbatch} on {op.worker} needs a tensor that no live worker holds"
        )
    ended = np.empty(len(a), np.int64)
    ended[np.argsort(a.end, kind="stable")] = np.arange(len(a))
    order = np.argsort(np.where(source < 0, consumer, len(a) + ended[np.maximum(source, 0)]))
    order = order[~local[order]]
    consumer, source = consumer[order], source[order]
    return _Messages(
        gradient[order], a.microbatch[consumer], stage[order], sender[order], ops.worker[consumer],
        np.where(source < 0, -1, ops.place[np.maximum(source, 0)]), ops.place[consumer],
    )  # fmt: skip


def _merged(plan: Plan, ops: _Ops, messages: _Messages, reduced: list[int]) -> Actions:
    """The action lists: the ops, with messages and all-reduces inserted into the gaps between them. Gap k of a worker
    is before its op k.

    reduced: the stages that run an all-reduce. A worker's all-reduce comes after the worker's last gradient."""
    p, a, m = plan.problem, ops.arrays, messages
    peers, n = p.pipelines * p.stages, len(m.made)
    worker = np.concat((m.sender, m.receiver))
    peer = np.concat((m.receiver, m.sender))
    number = np.tile(np.arange(n), 2)
    gap = _gaps(worker, number, np.concat((m.made, m.used)), np.arange(2 * n) < n)
    live = np.array([w.pipeline * p.stages + w.stage for w in p.workers()])
    summing = live[np.isin(live % p.stages, reduced)]
    last = np.full(peers, -1)
    gradients = _COMPLETES_GRADIENT[a.kind]
    np.maximum.at(last, ops.worker[gradients], ops.place[gradients])

    where = np.concat((worker, summing, ops.worker))
    gaps = np.concat((gap, last[summing] + 1, ops.place))
    what = np.repeat([_MESSAGE, _SUM, _OP], (2 * n, len(summing), len(a)))
    turn = np.concat((number, np.zeros(len(where) - 2 * n, np.int64)))
    order = np.argsort(((where * (gaps.max(initial=0) + 1) + gaps) * 3 + what) * (n + 1) + turn)

    none = np.full(len(summing), -1)
    kind = np.concat((_SENDS[m.gradient], _RECEIVES[m.gradient], np.full(len(summing), OpKind.REDUCE.code), a.kind))
    mb = np.concat((m.microbatch, m.microbatch, none, a.microbatch))
    others = np.concat((peer, none, np.full(len(a), -1)))
    first = p.first
    pipeline = np.where(mb < 0, -1, np.searchsorted(first, mb, side="right") - 1)
    stage = np.concat((m.stage, where[n:] % p.stages))  # the stage of a SEND is the one that made the tensor
    columns = (kind, stage, pipeline, np.where(mb < 0, -1, mb - first[pipeline]),
               np.where(others < 0, -1, others // p.stages), np.where(others < 0, -1, others % p.stages))  # fmt: skip
    table = np.stack(columns, axis=1).astype(_ROW)[order]
    ends = np.cumsum(np.bincount(where, minlength=peers)).tolist()
    rows = {w: slice(ends[k - 1] if k else 0, ends[k]) for w, k in zip(p.workers(), live.tolist(), strict=True)}
    return Actions(table, rows)


def _gaps(worker: np.ndarray, number: np.ndarray, op: np.ndarray, sends: np.ndarray) -> np.ndarray:
    """The gap in which each SEND and RECV is placed, shape (2m,). Gap k of a worker is before its op k.

    A SEND follows its producer. A RECV comes one op before its consumer, but always before the producer of the worker's
    next SEND and after the producer of the worker's previous SEND.

    worker (2m,)  the worker that sends or receives
    number (2m,)  position of the message in the total order
    op (2m,)      position, among the worker's ops, of the SEND's producer or the RECV's consumer
    sends (2m,)   whether the entry is a SEND"""
    order = np.argsort(worker * len(worker) + number)
    worker, op, sends = worker[order], op[order], sends[order]
    gap = np.where(sends, op + 1, np.maximum(op - 1, 0))
    new = np.concat(([True], worker[1:] != worker[:-1]))[: len(worker)]
    # a receive comes no later than the next receive or the producer of the next send
    latest = np.where(sends, np.maximum(op, 0), gap)
    back = np.cumsum((sends | np.concat((new[1:], [True]))[: len(new)])[::-1])
    gap = np.where(sends, gap, _running(-latest[::-1], back)[::-1] * -1)
    # a receive comes no earlier than the previous receive or send
    gap = _running(gap, np.cumsum(sends | new))
    out = np.empty_like(gap)
    out[order] = gap
    return out


def _running(values: np.ndarray, part: np.ndarray) -> np.ndarray:
    """The running maximum of `values`, restarted whenever `part` changes. `part` must be in ascending order."""
    if not len(values):
        return values
    step = int(values.max() - values.min()) + 1
    return np.maximum.accumulate(values + part * step) - part * step


def _listed(rows: np.ndarray) -> list[Action]:
    """Table rows as Action tuples."""
    return [
        Action(_ALL_KINDS[kind], stage, None if d < 0 else (d, i), None if e < 0 else Worker(e, s))
        for kind, stage, d, i, e, s in rows.tolist()
    ]
