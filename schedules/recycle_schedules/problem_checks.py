"""Checks of a Problem's keys.

check(problem)    # converts the keys to canonical form, or raises ValueError("speed: ...")
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .horizon import LONGEST, horizon
from .layers import Layers
from .links import Links
from .op_kinds import COMPUTE, KINDS, OpKind
from .ops import Done, Worker
from .problem_keys import CHOICES, OP_SETS, ProblemKeys
from .progress import BIT, FORWARD, Progress


def check(p: ProblemKeys) -> None:
    """Convert the keys of a new Problem to canonical form (tuples, Workers). Raises ValueError for bad input; the
    message is one sentence."""

    def put(name: str, value: Any) -> None:
        object.__setattr__(p, name, value)  # the dataclass is frozen

    for name in ("pipelines", "stages"):
        put(name, _whole(name, getattr(p, name), 1))
    m = p.microbatches
    put("microbatches", _wholes("microbatches", m, p.pipelines) if _is_list(m) else _whole("microbatches", m, 0))
    for name, allowed in CHOICES.items():
        if getattr(p, name) not in allowed:
            raise ValueError(f"{name}: {getattr(p, name)!r} is not one of {', '.join(allowed)}")
    put("failed", _failed(p))
    put("whole", _stages("whole", p, p.whole))
    if p.whole and p.backward == "decoupled":
        raise ValueError("whole: not possible with a decoupled backward")
    _durations(p)
    _layers(p)
    for name in ("send", "send_rerouted"):
        if getattr(p, name) is not None:
            _time(name, getattr(p, name))
    links = None
    if p.links is not None:
        if p.send or p.send_rerouted is not None:
            raise ValueError("links: cannot be combined with send and send_rerouted; links define the message times")
        links = Links.of(p.links, p.pipelines, p.stages)
    _times("allreduce", p.allreduce, p.stages)
    if not 0 <= _number("i_release", p.i_release) <= 1:
        raise ValueError(f"i_release: {p.i_release} is not between 0 and 1")
    _speed(p)
    _remainder(p, put)
    _memory(p, put)
    for worker in p.bytes.capacity if p.bytes else ():
        _worker("memory.capacity", p, worker)
    for s, pipelines in enumerate(p.live):
        if not pipelines:
            raise ValueError(f"failed: no live worker at stage {s}, so no schedule exists")
    _room(p)
    _length(p, links)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: {value!r} is not a whole number of at least {least}")
    return value


def _wholes(name: str, value: Any, n: int) -> tuple[int, ...]:
    if len(value) != n:
        raise ValueError(f"{name}: expected {n} numbers, one per pipeline, not {len(value)}")
    return tuple(_whole(name, x, 0) for x in value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}: {value!r} is not a finite number")
    return value


def _time(name: str, value: Any) -> float:
    if _number(name, value) < 0:
        raise ValueError(f"{name}: {value} is negative; times start at 0")
    return value


def _times(name: str, value: Any, stages: int) -> None:
    if _is_list(value) and len(value) != stages:
        raise ValueError(f"{name}: expected {stages} times, one per stage, not {len(value)}")
    for x in value if _is_list(value) else [value]:
        _time(name, x)


def _worker(name: str, p: ProblemKeys, pair: Any) -> Worker:
    """The worker from (d, s), [d, s] or the key "d,s". Raises ValueError if the problem has no such worker."""
    if isinstance(pair, str):
        try:
            pair = Worker.parse(pair)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from None
    ok = _is_list(pair) and len(pair) == 2 and all(isinstance(x, int) and not isinstance(x, bool) for x in pair)
    if not ok:
        raise ValueError(f"{name}: a worker is [pipeline, stage], not {pair!r}")
    worker = Worker(*pair)
    if not (0 <= worker.pipeline < p.pipelines and 0 <= worker.stage < p.stages):
        raise ValueError(f"{name}: worker {worker} does not exist among {p.pipelines} pipelines of {p.stages} stages")
    return worker


def _failed(p: ProblemKeys) -> tuple[Worker, ...]:
    if isinstance(p.failed, (str, Mapping)) or not hasattr(p.failed, "__iter__"):
        raise ValueError(f"failed: expected a list of [pipeline, stage], not {p.failed!r}")
    return tuple(sorted({_worker("failed", p, pair) for pair in p.failed}))


def _durations(p: ProblemKeys) -> None:
    if not isinstance(p.durations, Mapping):
        raise ValueError(f"durations: expected an object with the keys {', '.join(KINDS)}, not {p.durations!r}")
    for kind, value in p.durations.items():
        if kind not in KINDS:
            raise ValueError(f"durations: unknown op {kind!r}; known are {', '.join(KINDS)}")
        _times(f"durations.{kind}", value, p.stages)


def _layers(p: ProblemKeys) -> None:
    if p.capacity_bytes is not None:
        if p.layers is None:
            raise ValueError("capacity_bytes: needs layers with bytes and activation_bytes")
        if _number("capacity_bytes", p.capacity_bytes) <= 0:
            raise ValueError(f"capacity_bytes: {p.capacity_bytes} is not above 0")
    if p.layers is None:
        return
    Layers.of(p.layers, p.stages)
    if p.durations:
        raise ValueError("durations: cannot be combined with layers, which define the durations")
    if p.remainder:
        raise ValueError("layers: the remainder of a broken step keeps the step's layout; give durations instead")


def _per_worker(name: str, p: ProblemKeys, given: Any) -> dict[Worker, float]:
    if not isinstance(given, Mapping):
        raise ValueError(f'{name}: expected an object like {{"1,2": 0.5}}, not {given!r}')
    out: dict[Worker, float] = {}
    for key, value in given.items():
        worker = _worker(name, p, key)
        if worker in out:
            raise ValueError(f"{name}: worker {worker} is given twice")
        out[worker] = _number(f"{name} of worker {worker}", value)
    return out


def _speed(p: ProblemKeys) -> None:
    for worker, x in _per_worker("speed", p, p.speed).items():
        if x <= 0:
            raise ValueError(f"speed: {x} of worker {worker} is not above 0")


def _memory(p: ProblemKeys, put: Any) -> None:
    m = p.memory_limit
    limits: list[Any]
    if isinstance(m, Mapping):
        keys = set(m)
        if keys == {"base"} or keys == {"base", "extra"}:
            if m["base"] != "1f1b":
                raise ValueError(f'memory_limit: base {m["base"]!r} is not "1f1b"')
            _number("memory_limit.extra", m.get("extra", 0))
            return
        if not keys or keys - {"per_worker", "default"}:
            raise ValueError("memory_limit: an object has the keys base and extra, or per_worker and default")
        per_worker = m.get("per_worker", {})
        if not isinstance(per_worker, Mapping):
            raise ValueError(f'memory_limit.per_worker: expected an object like {{"1,2": 3}}, not {per_worker!r}')
        by_key: dict[str, Any] = {}
        for given, limit in per_worker.items():
            worker = _worker("memory_limit.per_worker", p, given)
            key = f"{worker.pipeline},{worker.stage}"  # the form in which `limit` looks it up
            if key in by_key:
                raise ValueError(f"memory_limit.per_worker: worker {worker} is given twice")
            by_key[key] = limit
        if "per_worker" in m:
            put("memory_limit", {**m, "per_worker": by_key})
        limits = [*by_key.values(), m.get("default")]
    elif _is_list(m):
        if len(m) != p.stages:
            raise ValueError(f"memory_limit: expected {p.stages} limits, one per stage, not {len(m)}")
        limits = list(m)
    else:
        limits = [m]
    for x in limits:
        if x is not None and _number("memory_limit", x) < 0:
            raise ValueError(f"memory_limit: {x} is negative")


def _room(p: ProblemKeys) -> None:
    """Raise ValueError unless, for each missing F, a worker that may run it has room for one micro-batch."""
    alike = p.limits_alike
    for s, pipelines in enumerate(p.live):
        if s in p.finished:
            continue
        roomy = (
            set(pipelines)
            if alike and p.limit(Worker(0, s)) >= 1
            else {d for d in pipelines if p.limit(Worker(d, s)) >= 1}
        )
        if len(roomy) == len(pipelines):
            continue
        for mb, host in zip(p.microbatch_keys(), p.progress.host[:, s].tolist(), strict=True):
            own = p.reroute == "failed_only" and (mb[0], s) not in p.dead
            if host < 0 and not (mb[0] in roomy if own else roomy):
                who = f"worker {Worker(mb[0], s)} has no room" if own else f"no live worker of stage {s} has room"
                key = "memory_limit" if p.memory is None else "memory"
                raise ValueError(f"{key}: {who} for a micro-batch, so no schedule exists")


def _length(p: ProblemKeys, links: Links | None) -> None:
    parts = horizon(p, links)
    if not sum(parts.values()) <= LONGEST:
        key = max(parts, key=lambda key: parts[key])
        raise ValueError(
            f"{key}: all ops and messages together could take {parts[key]:.3g} units of time, and at most "
            f"{LONGEST:.1g} is allowed, so give the times in a larger unit"
        )


def _stages(key: str, p: ProblemKeys, given: Iterable[Any]) -> tuple[int, ...]:
    stages = tuple(given)
    for s in stages:
        if isinstance(s, bool) or not isinstance(s, int) or not 0 <= s < p.stages:
            raise ValueError(f"{key}: {s!r} is not one of the stages 0 to {p.stages - 1}")
    return tuple(sorted(set(stages)))


def _remainder(p: ProblemKeys, put: Any) -> None:
    if p.busy_until is not None:
        _per_worker("busy_until", p, p.busy_until)
    if p.committed is not None:
        put("committed", _stages("committed", p, p.committed))
    if p.done is None:
        return
    if not isinstance(p.done, Progress):
        put("done", _done(p, p.done))
    of = p.progress
    full = [sum(BIT[kind] for kind in kinds) for kinds in OP_SETS[p.backward]]
    fits = [bits & FORWARD and bits != FORWARD | BIT[OpKind.BACKWARD_WEIGHT] and any(bits & f == bits for f in full)
            for bits in range(1 << len(KINDS))]  # fmt: skip
    for g, s in np.argwhere((of.host >= 0) & p.open & ~np.array(fits, bool)[of.kinds])[:1].tolist():
        kinds = ", ".join(sorted(kind for kind in KINDS if of.kinds[g, s] & BIT[kind]))
        raise ValueError(f"done: micro-batch {p.microbatch_keys()[g]} at stage {s} cannot have just {kinds}")


def _done(p: ProblemKeys, entries: Iterable[Any]) -> tuple[Done, ...]:
    done = tuple(_done_entry(p, entry) for entry in entries)
    seen: set[Any] = set()
    hosts: dict[Any, Worker] = {}
    for e in done:
        key = (e.op, e.microbatch, e.worker)
        if key in seen:
            raise ValueError(f"done: {e.op} of micro-batch {e.microbatch} on worker {e.worker} is given twice")
        seen.add(key)
        place = (e.microbatch, e.stage)
        if e.stage not in p.finished and e.worker not in p.dead and hosts.setdefault(place, e.worker) != e.worker:
            raise ValueError(f"done: micro-batch {e.microbatch} ran on two live workers of stage {e.stage}")
    return done


def _done_entry(p: ProblemKeys, entry: Any) -> Done:
    if isinstance(entry, Done):
        return entry
    try:
        op, mb, s, pair = entry["op"], tuple(entry["microbatch"]), entry["stage"], entry["worker"]
        delivered = entry.get("delivered", False)
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"done: an entry has op, microbatch, stage, worker and delivered, not {entry!r}") from None
    worker = _worker("done", p, pair)
    ints = len(mb) == 2 and all(isinstance(x, int) and not isinstance(x, bool) for x in mb)
    if not ints or not (0 <= mb[0] < p.pipelines and 0 <= mb[1] < p.counts[mb[0]]):
        raise ValueError(f"done: micro-batch {list(mb)} does not exist")
    if op not in COMPUTE or s != worker.stage or not isinstance(delivered, bool):
        raise ValueError(f"done: bad entry {entry!r}")
    return Done(OpKind(op), mb, s, worker, delivered)
