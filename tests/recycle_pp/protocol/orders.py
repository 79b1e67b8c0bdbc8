"""Orders of events as data: drawn from a seed, run, and shrunk to a minimal example if they violate the contract.

    order = Order.drawn(4711)            # shape, faults, and the choice of the next event
    order.run()                          # a World; raises Violation
    assert_kept(Order.drawn, range(300))         # none of these orders violates the contract
    assert_kept_by_all(Order.drawn)              # none of 100,000, on all cores

Half of the orders choose uniformly among all possible events. The other half give each process a priority and let the
highest one run as long as it can, with a few changes of priority. A uniform choice rarely finds faults that need a long
delay in one place (probabilistic concurrency testing; Burckhardt, Kothari, Musuvathi and Nagarakatte, 2010).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from recycle_schedules import Worker

from .world import LAYERS, Chooser, Fault, Option, Violation, World

ALL = range(1000, 101_000)
KINDS = {"kill": 6, "lose": 1, "leave": 1, "cut": 1, "reset": 2, "orphan": 2, "sever": 2}
SHAPES = ((2, 2, 2), (3, 2, 2), (3, 3, 1), (4, 1, 2), (3, 2, 3), (2, 3, 2))


@dataclass(frozen=True)
class Order:
    shape: tuple[int, int, int]  # pipelines, stages, micro-batches
    faults: tuple[Fault, ...] = ()
    steps: int = 4
    stagger: bool = False
    evaluate_every: int = 0
    save_every: int = 0
    clipped: frozenset[int] = frozenset()
    misfits: frozenset[tuple[int, int]] = frozenset()  # (step, attempt)
    copies: int = 0  # of sharded state; 0: whole state
    understudy: bool = False  # a stage with one live worker gets one
    third: bool = False  # a worker with a wrong copy is killed
    shuffled: bool = False  # members play random workers
    patience: int | None = 0  # events for which the job waits for followers; None: forever
    seed: int | None = None  # seed of the choices; None: all processes take turns
    delays: int | None = None  # changes of priority; None: no priorities

    @classmethod
    def drawn(cls, seed: int, copies: int = 0, flip: bool = False, moves: bool = False, alone: bool = False) -> Order:
        """An order with two or three faults, mostly deaths. The second often happens in the recovery from the first.

        flip   adds a flipped bit of sharded state, or an update with a wrong result. In the latter case no worker dies,
               because the faulty worker must not be the only holder of a block
        moves  adds one or two moves of layers
        alone  all workers of a stage but one die soon, the stage gets an understudy, and its last worker is more likely
               than others to have a later fault"""
        rng = random.Random(seed)
        order = cls(
            rng.choice([shape for shape in SHAPES if shape[1] > 1] if moves or alone else SHAPES),
            steps=6 if moves or alone else 4,
            stagger=rng.random() < 0.5 and not flip,
            evaluate_every=rng.choice((0, 2)),
            save_every=rng.choice((0, 2)),
            clipped=frozenset(step for step in range(4) if rng.random() < 0.15),
            misfits=frozenset((rng.randrange(4), k) for k in range(rng.choice((0, 0, 0, 1, 1, 2)))),
            copies=copies,
            shuffled=seed % 2 == 1,
            seed=seed,
            delays=rng.choice((None, 3)),
        )
        order = replace(order, faults=tuple(order._drawn_faults(rng)))
        if flip:
            kind, victim = rng.choice(("flip", "flip", "err")), rng.choice(order._workers)
            fault = Fault(rng.randrange(order._events), kind, victim)
            others = [f for f in order.faults if kind == "flip" or f.kind in ("cut", "reset", "orphan", "sever")]
            order = replace(order, third=True, faults=(*others, fault))
        if moves:
            wanted = [order._drawn_move(rng, share) for share in rng.choice(((0.3,), (0.3, 0.6)))]
            order = replace(order, patience=rng.choice((0, 200, 200)), faults=(*order.faults, *wanted))
            order = order._near_its_switch(rng) if rng.random() < 0.5 else order
        if alone:
            order = replace(order, understudy=True, patience=rng.choice((0, 200, 200)))
            order = replace(order, faults=tuple(order._with_one_left(rng)))
        return order

    def _with_one_left(self, rng: random.Random) -> Iterator[Fault]:
        """The deaths of all workers of a stage but one, and then the faults of the order."""
        last, start = rng.choice(self._workers), rng.randrange(40, 100)
        for d in range(self.shape[0]):
            if d != last.pipeline:
                yield Fault(rng.randrange(start), "kill", Worker(d, last.stage))
        for fault in self.faults:
            victim = last if rng.random() < 0.4 and fault.kind != "revive" else fault.worker
            yield fault._replace(at=fault.at + start, worker=victim)

    def _near_its_switch(self, rng: random.Random) -> Order:
        """Shifts the faults, so that the first one happens at about the adoption of the new layout."""
        wanted = [fault for fault in self.faults if fault.kind == "move"]
        at = replace(self, faults=tuple(wanted)).run().coordinator.switched_at + rng.randrange(-60, 60)
        others = sorted(fault for fault in self.faults if fault.kind != "move")
        later = [fault._replace(at=max(0, fault.at + at - others[0].at)) for fault in others]
        return self if at < 60 else replace(self, faults=(*wanted, *later))

    def _drawn_move(self, rng: random.Random, share: float) -> Fault:
        """A move in the first `share` of all events."""
        stages = self.shape[1]
        ends = sorted(rng.sample(range(1, LAYERS * stages), stages - 1))
        layers = tuple(end - start for start, end in zip([0, *ends], [*ends, LAYERS * stages], strict=True))
        return Fault(rng.randrange(int(share * self._events)), "move", self._workers[0], layers)

    def _drawn_faults(self, rng: random.Random) -> Iterator[Fault]:
        workers, end = self._workers, self._events
        at = rng.randrange(end)
        for _ in range(rng.choice((2, 2, 3))):
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            victim = rng.choice(workers)
            yield Fault(at, kind, victim)
            if kind not in ("cut", "reset", "orphan", "sever") and rng.random() < 0.7:
                yield Fault(at + rng.randrange(1, end // 2), "revive", victim)
            at = at + rng.randrange(60) if rng.random() < 0.5 else rng.randrange(end)

    @property
    def _workers(self) -> list[Worker]:
        pipelines, stages, _ = self.shape
        return [Worker(d, s) for d in range(pipelines) for s in range(stages)]

    @property
    def _events(self) -> int:
        """Number of events in a run without faults."""
        return _events(self.shape, self.steps, self.stagger, self.evaluate_every, self.save_every, self.copies)

    def run(self) -> World:
        world = World(
            *self.shape,
            steps=self.steps,
            stagger=self.stagger,
            evaluate_every=self.evaluate_every,
            save_every=self.save_every,
            clipped=self.clipped,
            misfits=self.misfits,
            copies=self.copies,
            third=self.third,
            understudy=self.understudy,
            shuffled=self.shuffled,
            patience=self.patience,
            seed=self.seed or 0,
        )
        return world.run(self._chooser(), self.faults)

    def _chooser(self) -> Chooser:
        if self.seed is None:
            return in_turn()
        rng = random.Random(self.seed)
        return at_random(rng) if self.delays is None else by_priority(rng, self.delays)


@lru_cache
def _events(
    shape: tuple[int, int, int], steps: int, stagger: bool, evaluate_every: int, save_every: int, copies: int
) -> int:
    return Order(shape, (), steps, stagger, evaluate_every, save_every, copies=copies).run().events


def in_turn() -> Chooser:
    """A chooser that takes the options in turn."""
    last = 0

    def choose(options: Sequence[Option]) -> int:
        nonlocal last
        last += 1
        return last % len(options)

    return choose


def at_random(rng: random.Random) -> Chooser:
    return lambda options: int(rng.random() * len(options))


def by_priority(rng: random.Random, changes: int) -> Chooser:
    """A chooser that runs the process with the highest priority as long as it can. A change makes it the lowest."""
    priority: dict[int, float] = {}
    events = 0
    due = {rng.randrange(1, 1000) for _ in range(changes)}

    def choose(options: Sequence[Option]) -> int:
        nonlocal events
        events += 1
        for who, _ in options:
            if who not in priority:
                priority[who] = rng.random()
        best = max(priority[who] for who, _ in options)
        mine = [k for k, (who, _) in enumerate(options) if priority[who] == best]
        chosen = mine[int(rng.random() * len(mine))]
        if events in due:
            priority[options[chosen][0]] = -events
        return chosen

    return choose


Draw = Callable[[int], Order]  # from a seed; a module's function or a partial, so that it can be pickled


def assert_kept(draw: Draw, seeds: Sequence[int]) -> None:
    _report(draw, _breaking(draw, seeds))


def assert_kept_by_all(draw: Draw) -> None:
    with ProcessPoolExecutor() as pool:
        parts = [ALL[start : start + 500] for start in range(0, len(ALL), 500)]
        _report(draw, [seed for found in pool.map(partial(_breaking, draw), parts) for seed in found])


def _breaking(draw: Draw, seeds: Sequence[int]) -> list[int]:
    return [seed for seed in seeds if _broken(draw(seed))]


def _report(draw: Draw, broken: list[int]) -> None:
    if broken:
        order = _shrunk(draw(broken[0]))
        raise AssertionError(f"{len(broken)} orders, the first: {_broken(order)}\nreplay it: {order!r}.run()")


def _shrunk(order: Order) -> Order:
    """A minimal order that violates the contract: no order with one item fewer does."""
    while True:
        for smaller in _smaller(order):
            if _broken(smaller):
                order = smaller
                break
        else:
            return order


def _broken(order: Order) -> str | None:
    """Runs the order. Returns the violation in words, or None."""
    try:
        order.run()
    except Violation as violation:
        return str(violation)
    return None


def _smaller(order: Order) -> Iterator[Order]:
    for k in range(len(order.faults)):
        yield replace(order, faults=order.faults[:k] + order.faults[k + 1 :])
    if order.shuffled:
        yield replace(order, shuffled=False)
    if order.copies and not order.third:
        yield replace(order, copies=0)
    if order.understudy:
        yield replace(order, understudy=False)
    if order.stagger:
        yield replace(order, stagger=False)
    if order.evaluate_every:
        yield replace(order, evaluate_every=0)
    if order.save_every:
        yield replace(order, save_every=0)
    if order.misfits:
        yield replace(order, misfits=frozenset())
    if order.clipped:
        yield replace(order, clipped=frozenset())
    if order.steps > 1:
        yield replace(order, steps=order.steps - 1)
    if order.seed is not None:
        yield replace(order, seed=None, delays=None)
        yield from (replace(order, seed=seed) for seed in range(8) if seed < order.seed)
