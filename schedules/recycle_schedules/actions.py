"""What each worker does, in order: a plan's ops with the messages between them.

    for worker, todo in actions(plan).items():
        for action in todo: ...            # Action("RECV_F", stage, microbatch, peer), Action("F", ...), ...

Messages may be handled strictly in order between any two workers (NCCL) and nothing can deadlock: all messages have one
total order, by the planned start of the op that makes the tensor, and both ends of a pair keep to it. An op waits only
for tensors whose producers start earlier, so the earliest op that has not run can always run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from .ops import MicroBatch, Op, Tensor, Worker
from .plans import Plan


class Action(NamedTuple):
    """One entry of a worker's list, in torch's notation. `stage` is the worker's own: RECV_F at stage s receives the
    output of F at s - 1, RECV_B the input gradient made at s + 1; SEND_x sends what stage s made. REDUCE is the
    stage's all-reduce. `peer` is the other end of a message, None otherwise."""

    kind: str
    stage: int
    microbatch: MicroBatch | None = None
    peer: Worker | None = None

    def to_json(self) -> list[Any]:
        lists = (None if x is None else list(x) for x in (self.microbatch, self.peer))
        return [self.kind, self.stage, *lists]

    @classmethod
    def from_json(cls, data: list[Any]) -> Action:
        kind, stage, mb, peer = data
        return cls(kind, stage, None if mb is None else (mb[0], mb[1]), None if peer is None else Worker(*peer))

    def __str__(self) -> str:
        mb = "" if self.microbatch is None else f"{self.microbatch[0]}.{self.microbatch[1]}"
        return f"{self.stage}{self.kind}{mb}"


class _Message(NamedTuple):
    """A tensor on its way. Compared by `order`: re-sends first, as their consumers need them, then by producer."""

    order: tuple[float, ...]
    tensor: Tensor
    sender: Worker
    receiver: Worker
    made: int  # position of the producer among the sender's ops; -1: held from the start
    used: int  # position of the consumer among the receiver's ops


def actions(
    plan: Plan, holders: Mapping[Tensor, Collection[Worker]] | None = None, *, forward_only: bool = False
) -> dict[Worker, list[Action]]:
    """Every live worker's list.

    holders       the live workers that hold a tensor made before time 0. Who holds it needs no message; anybody else
                  gets it from one of them, the one that made it if possible. Live workers that did an op before time 0
                  count as holders of its output.
    forward_only  only F and its messages: a validation pass

    SENDs follow their producer at once, re-sends come first of all; a RECV stands a compute op ahead of its consumer
    where the order of messages allows it, so that the transfer overlaps compute. ValueError if a tensor is needed that
    nobody makes or holds.
    """
    lists: dict[Worker, list[Op]] = {w: [] for w in plan.problem.workers()}
    arrays = plan.arrays.take(plan.running_order())
    for op in plan._ops(arrays):
        if not forward_only or op.kind == "F":
            lists[op.worker].append(op)
    inbox: dict[Worker, list[_Message]] = {w: [] for w in lists}
    outbox: dict[Worker, list[_Message]] = {w: [] for w in lists}
    for message in _messages(plan, lists, holders or {}, forward_only):
        inbox[message.receiver].append(message)
        outbox[message.sender].append(message)
    reduce = set() if forward_only else set(range(plan.problem.stages)) - plan.problem.finished
    return {w: _merge(ops, inbox[w], outbox[w], w.stage if w.stage in reduce else None) for w, ops in lists.items()}


def _messages(
    plan: Plan, lists: Mapping[Worker, list[Op]], holders: Mapping[Tensor, Collection[Worker]], forward_only: bool
) -> Iterator[_Message]:
    """Every boundary tensor that has to travel."""
    p = plan.problem
    made: dict[Tensor, tuple[Op, int]] = {}
    for ops in lists.values():
        for position, op in enumerate(ops):
            if op.microbatch is not None and op.kind != "W":
                made["F" if op.kind == "F" else "B", op.microbatch, op.stage] = op, position
    for worker, ops in lists.items():
        for position, op in enumerate(ops):
            tensor = needed(op, p.stages)
            if tensor is None:
                continue
            having = set(holders.get(tensor, ()))
            begun = p.begun.get((tensor[1], tensor[2]))
            maker = begun.worker if begun and begun.kinds & ({"F"} if tensor[0] == "F" else {"I", "B"}) else None
            if maker is not None:
                having.add(maker)
            if worker in having:
                continue
            if having:
                sender = maker if maker is not None else min(having)
                yield _Message((-1.0, op.start, *_chain(op, p.stages)), tensor, sender, worker, -1, position)
            elif tensor in made:
                source, index = made[tensor]
                order = (0.0, source.start, source.end, *_chain(source, p.stages))
                yield _Message(order, tensor, source.worker, worker, index, position)
            else:
                raise ValueError(
                    f"{op.kind} of micro-batch {op.microbatch} on {worker} needs a tensor that nobody holds"
                )


def needed(op: Op, stages: int) -> Tensor | None:
    """The boundary tensor that an op takes in, or None."""
    if op.microbatch is None:
        return None
    if op.kind == "F" and op.stage > 0:
        return "F", op.microbatch, op.stage - 1
    if op.kind in ("I", "B") and op.stage < stages - 1:
        return "B", op.microbatch, op.stage + 1
    return None


def _chain(op: Op, stages: int) -> tuple[int, int, int]:
    """Ties of ops that start together: by place in the micro-batch's chain, so that dependencies always go upwards."""
    assert op.microbatch is not None
    place = op.stage if op.kind == "F" else 2 * stages - 1 - op.stage
    return place, *op.microbatch


def _merge(ops: list[Op], inbox: list[_Message], outbox: list[_Message], reduce: int | None) -> list[Action]:
    """One worker's list: its ops, with the messages sorted into the gaps between them (gap k stands before op k).

    reduce: the stage whose gradients are summed after the worker's last one, None for no sum."""
    gaps: list[list[tuple[tuple[float, ...], Action]]] = [[] for _ in range(len(ops) + 1)]
    pairs: dict[Worker, list[tuple[_Message, bool]]] = {}
    for m in inbox:
        pairs.setdefault(m.sender, []).append((m, False))
    for m in outbox:
        pairs.setdefault(m.receiver, []).append((m, True))
    for peer, messages in pairs.items():
        messages.sort()
        for (m, sends), gap in zip(messages, _gaps(messages), strict=True):
            kind, mb, made_at = m.tensor
            stage = made_at if sends else made_at + (1 if kind == "F" else -1)
            gaps[gap].append((m.order, Action(("SEND_" if sends else "RECV_") + kind, stage, mb, peer)))
    out: list[Action] = []
    last_gradient = max((k for k, op in enumerate(ops) if op.kind in ("W", "B")), default=-1)
    for k, gap_items in enumerate(gaps):
        out += [action for _, action in sorted(gap_items)]
        if reduce is not None and k == last_gradient + 1:
            out.append(Action("REDUCE", reduce))
        if k < len(ops):
            out.append(Action(ops[k].kind, ops[k].stage, ops[k].microbatch))
    return out


def _gaps(messages: list[tuple[_Message, bool]]) -> list[int]:
    """Where the messages of one pair go, for one end. A SEND follows its producer. A RECV should stand one op ahead of
    its consumer, but before the producer of the pair's next SEND and after the pair's last one."""
    gaps = [m.made + 1 if sends else max(m.used - 1, 0) for m, sends in messages]
    latest = len(gaps) and max(gaps)
    for k in reversed(range(len(messages))):
        m, sends = messages[k]
        gaps[k] = gaps[k] if sends else min(gaps[k], latest)
        latest = max(m.made, 0) if sends else gaps[k]
    earliest = 0
    for k, (_, sends) in enumerate(messages):
        gaps[k] = earliest = gaps[k] if sends else max(gaps[k], earliest)
    return gaps
