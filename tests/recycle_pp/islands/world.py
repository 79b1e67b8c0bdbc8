"""Islands and their store in one process, with random orders of actions and faults.

    world = World(seed=7)
    world.run(actions=300)       # steps, looks, uploads, deaths, restarts from old checkpoints, new islands, ...
    world.settle()               # no more faults, until all live islands have the same theta
    world.check()                # AssertionError if a theta differs, a sample counts twice, or a round changed

An island here is one worker that holds all units. Its cut and its commits come from `protocol.outer_rounds`, and
everything else from `islands`, the product's code. Only the model is artificial: a step adds a number that depends on
its samples.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace

import numpy as np

from recycle_pp.islands.codec import Damaged, content_bytes, encode, opened, seal
from recycle_pp.islands.fragments import changes, takes_part
from recycle_pp.islands.objects import (
    View,
    closed_path,
    delta_path,
    holding,
    layout_path,
    lease_path,
    round_of,
    state_path,
)
from recycle_pp.islands.outer import difference, merged
from recycle_pp.islands.rounds import (
    GONE_SECONDS,
    Apply,
    Close,
    Position,
    closing_of,
    closing_text,
    decide,
    own,
    prunable,
)
from recycle_pp.islands.theta import Outer, advanced
from recycle_pp.protocol.outer_rounds import OuterRounds
from recycle_pp.wire.messages.islands import OuterState

LAYOUT = {-1: 1, 0: 2}  # layer -> number of units
SIZE = 5  # elements of a unit
UNITS = [(layer, number) for layer, units in LAYOUT.items() for number in range(units)]
DIGEST = bytes(16)
STEPS, DELAY, MOST = 2, 1, 5  # STEPS: between two rounds
LR, DECAY = 0.7, 0.9
PATIENCE, KEEP, SNAPSHOT_EVERY = 20.0, 2, 3
KINDS = {  # action or fault -> how often it happens
    "step": 30,
    "look": 25,
    "upload": 25,
    "renew": 4,
    "snapshot": 4,
    "die": 1,
    "linger": 10,
    "restart": 4,
    "new": 0.3,
    "out": 0.3,
    "back": 3,
    "foreign": 0.5,
    "truncate": 0.2,
    "flip": 0.2,
    "away": 0.1,
}


@dataclass
class Stored:
    content: bytes
    size: int
    modified: float
    visible: float  # time from which listings show it


class FakeStore:
    """Objects with a clock. Listings may be late; puts and reads are not."""

    def __init__(self, rng: random.Random) -> None:
        self.objects: dict[str, Stored] = {}
        self.now, self._rng, self.out = 0.0, rng, False

    def put(self, path: str, content: bytes, late: float = 0.0) -> None:
        self.objects[path] = Stored(content, len(content), self.now, self.now + late)

    def put_if_absent(self, path: str, content: bytes) -> bool:
        if path in self.objects:
            return self.objects[path].content == content
        self.put(path, content)
        return True

    def listing(self) -> dict[str, Stored]:
        return {path: of for path, of in self.objects.items() if of.visible <= self.now}


@dataclass
class Model:
    """The state of an island, as saved in a checkpoint."""

    weights: dict
    theta: dict
    momentum: dict
    residual: dict
    step: int = 0  # completed steps
    outer: OuterState = field(default_factory=OuterState)
    since: dict = field(default_factory=lambda: dict.fromkeys(LAYOUT, frozenset()))
    # layer -> samples in its weights since the island took its theta


def fresh() -> Model:
    start = {unit: np.full(SIZE, 1.0 + n, np.float32) for n, unit in enumerate(UNITS)}
    zeros = {unit: np.zeros(SIZE, np.float32) for unit in UNITS}
    return Model(copy.deepcopy(start), copy.deepcopy(start), copy.deepcopy(zeros), copy.deepcopy(zeros))


class Island:
    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name, self.number = world, name, number
        self.model, self.saved = fresh(), [fresh()]
        self.alive = True
        self.left: dict[str, bytes] = {}  # objects that a process of an earlier start has not uploaded yet
        self._begin()

    def _begin(self) -> None:
        view = self.world.view()
        mine = {
            number: view.delivered[number][self.name].steps
            for number in view.delivered
            if number >= self.model.outer.applied and self.name in view.delivered[number]
        }
        for number in view.closed:
            share = closing_of(self.world.store.objects[closed_path(number)].content).get(self.name)
            if share is not None and number >= self.model.outer.applied:
                mine[number] = share.steps
        sent = self.model.outer.sent
        outer = self.model.outer
        if sent is not None and mine.get(outer.applied) != sent:
            outer = OuterState(outer.applied, outer.begun, None)
        self.rounds = OuterRounds(STEPS, DELAY, MOST)
        self.rounds.begin(OuterState(outer.applied, outer.begun, outer.sent, mine))
        self.cuts: dict[str, bytes] = {}  # objects of the current delta, in memory
        self.result: tuple[int, dict] | None = None
        self.delivered_at: float | None = None
        self.renew()

    def renew(self) -> None:
        self.world.store.put(lease_path(self.name), b"{}")

    # -- actions

    def step(self) -> None:
        step, model = self.model.step, self.model
        if self.rounds.waits({0}, step):
            return
        order = self.rounds.commit({0}, step)
        if order.apply is not None:
            assert self.result is not None and self.result[0] == order.apply
            before, found = model.outer.applied, self.result[1]
            for unit, outer in found.items():
                model.theta[unit], model.momentum[unit] = outer
                if changes(unit[0], before, order.apply, self.world.fragments):
                    model.weights[unit] = merged(model.weights[unit], outer.theta, 0.0)
                    model.since[unit[0]] = frozenset()
            self.world.took(self.name, order.apply, model.theta)
            self.cuts, self.result, self.delivered_at = {}, None, None
        sample = (self.number, step)
        for n, unit in enumerate(UNITS):
            change = np.random.default_rng((self.number, step, n)).standard_normal(SIZE) * 1e-2
            model.weights[unit] = model.weights[unit] + change.astype(np.float32)
        model.since = {layer: samples | {sample} for layer, samples in model.since.items()}
        model.step += 1
        if order.cut:
            self._cut(order.state, order.samples)
        model.outer = order.state
        if step % 4 == 3:
            self.saved = [*self.saved[-4:], copy.deepcopy(model)]

    def _cut(self, state: OuterState, samples: int) -> None:
        model, number = self.model, state.applied
        codes = {}
        for unit in UNITS:
            if not takes_part(unit[0], number, self.world.fragments):
                continue
            x = difference(model.theta[unit], model.weights[unit], model.residual[unit])
            codes[unit], sent = encode(x, 8)
            model.residual[unit] = x - sent
        view = self.world.view()
        if self.name in view.delivered.get(number, {}):
            return
        size = content_bytes(SIZE, 8)
        for layer, unit in codes:
            path = delta_path(number, self.name, (layer, unit, unit), state.sent or 0, samples, size)
            self.cuts[path] = seal(codes[layer, unit], DIGEST, SIZE, 8)
        self.world.cut(self.name, number, state.sent or 0, model.since)

    def look(self) -> None:
        store = self.world.store
        if store.out:
            return
        view = self.world.view()
        at = Position(self.rounds.state.applied, self.rounds.state.sent is not None)
        closings = {}
        for number in view.closed:
            if number >= at.applied:
                closings[number] = closing_of(store.objects[closed_path(number)].content)
        if at.sent and self.delivered_at is None and self.name in view.delivered.get(at.applied, {}):
            self.delivered_at = store.now
        waited = 0.0 if self.delivered_at is None else store.now - self.delivered_at
        decision = decide(view, closings, self.name, at, waited, PATIENCE)
        if isinstance(decision, Close):
            store.put_if_absent(closed_path(decision.number), closing_text(decision.islands, self.name))
        elif isinstance(decision, Apply):
            self._compute(view, closings, decision)
        self._clean(view)

    def _compute(self, view: View, closings: dict, path: Apply) -> None:
        if self.result is not None and self.result[0] == path.applied:
            return
        found = {}
        for unit in UNITS:
            before = Outer(self.model.theta[unit], self.model.momentum[unit])
            try:
                reader, part = Reader(self.world.store, view, closings, unit), path.of_layer(unit[0], view.fragments)
                found[unit] = advanced(before, part, closings, reader, LR, DECAY).outer
            except LookupError:
                return  # the listing lacks an object
        self.result = path.applied, found
        self.rounds.ready(0, path.applied, own(closings, self.name, self.rounds.state.applied, path.applied))

    def upload(self) -> None:
        self._upload(self.cuts)

    def linger(self) -> None:
        """A node that is cut off from the island, but not from the store, still uploads."""
        self._upload(self.left)

    def _upload(self, contents: dict[str, bytes]) -> None:
        store = self.world.store
        missing = [
            path for path, of in contents.items() if path not in store.objects or store.objects[path].size != len(of)
        ]
        while missing and not store.out and self.world.rng.random() < 0.8:
            path = missing.pop()
            store.put(path, contents[path], self.world.rng.choice([0.0, 0.0, 0.0, 4.0]))

    def snapshot(self) -> None:
        """Uploads a snapshot, or dies in the middle of it."""
        applied = self.model.outer.applied
        if not applied or applied % SNAPSHOT_EVERY or self.world.store.out:
            return
        for layer, unit in UNITS:
            if self.world.rng.random() < 0.05:
                return
            both = np.concatenate([self.model.theta[layer, unit], self.model.momentum[layer, unit]])
            content = both.tobytes()
            self.world.store.put_if_absent(state_path(applied, (layer, unit, unit), len(content)), content)

    def _clean(self, view: View) -> None:
        first = prunable(view, self.model.outer.applied, KEEP)
        for path in list(self.world.store.objects):
            number = round_of(path)
            if number is not None and number < first and path != closed_path(number):
                del self.world.store.objects[path]

    def die(self) -> None:
        self.alive, self.left = False, self.cuts

    def restart(self) -> None:
        """Resumes one of the newest checkpoints."""
        self.alive = True
        self.model = copy.deepcopy(self.world.rng.choice(self.saved))
        self._begin()


class Reader:
    """Reads the objects of one unit, see `islands.theta.Unit`."""

    def __init__(self, store: FakeStore, view: View, closings: dict, unit: tuple) -> None:
        self._store, self._view, self._closings, (self._layer, self._unit) = store, view, closings, unit

    def delta(self, number: int, island: str) -> np.ndarray:
        found = self._view.delivery(number, island, self._closings[number][island])
        part = found and holding(found.parts, self._layer, self._unit)
        if not part:
            raise LookupError
        return opened(self._store.objects[part.path].content, DIGEST, SIZE)

    def snapshot(self, rounds: int) -> Outer:
        part = holding(self._view.snapshots[rounds], self._layer, self._unit)
        assert part is not None
        both = np.frombuffer(self._store.objects[part.path].content, np.float32)
        if both.size != 2 * SIZE:
            raise Damaged("it is too short")
        return Outer(both[:SIZE], both[SIZE:])


class World:
    def __init__(self, seed: int, islands: int = 3) -> None:
        self.rng, self.fragments = random.Random(seed), 1 + seed % 2
        self.store = FakeStore(self.rng)
        for layer, units in LAYOUT.items():
            self.store.put(layout_path(layer, units, DIGEST), b"")
        self.cuts: dict[tuple[str, int, int], dict] = {}  # island, round, steps -> layer -> samples in the delta
        self.closed: dict[int, bytes] = {}
        self.thetas: dict[int, dict[str, bytes]] = {}
        self.islands = [Island(self, chr(97 + n), n) for n in range(islands)]

    def view(self) -> View:
        return View.of(self.store.listing(), self.fragments)

    def cut(self, name: str, number: int, steps: int, samples: dict) -> None:
        self.cuts[name, number, steps] = {
            layer: of for layer, of in samples.items() if takes_part(layer, number, self.fragments)
        }

    def took(self, name: str, applied: int, theta: dict) -> None:
        self.thetas.setdefault(applied, {})[name] = b"".join(theta[unit].tobytes() for unit in UNITS)

    def run(self, actions: int) -> None:
        rng, store = self.rng, self.store
        for _ in range(actions):
            store.now += rng.choice([0.0, 0.1, 1.0, 5.0])
            self._note()
            island = rng.choice(self.islands)
            kind = rng.choices(
                [*KINDS],
                [*KINDS.values()],
            )[0]
            if kind == "restart":
                if not island.alive:
                    island.restart()
            elif kind == "new" and len(self.islands) < 6:
                self.islands.append(Island(self, chr(97 + len(self.islands)), len(self.islands)))
            elif kind == "out":
                store.out = True
            elif kind == "back":
                store.out = False
            elif kind == "foreign":
                junk = rng.choice(
                    ["rounds/000001/readme.txt", "rounds/x/a.state", "islands/", "rounds/000002/a/9.delta"]
                )
                store.put(junk, rng.randbytes(rng.randrange(40)))
            elif kind == "away":
                store.now += GONE_SECONDS + 1
            elif kind in ("truncate", "flip"):
                self._damage(kind)
            elif kind not in ("new",) and island.alive:
                getattr(island, kind)()

    def _damage(self, kind: str) -> None:
        """Damages an object of a round that is still open. Objects of closed rounds stay intact.

        kind  flip: one bit is wrong; truncate: an upload is cut short, so the delta is incomplete
        """
        objects, whole = self.store.objects, View.of(self.store.objects, self.fragments).delivered
        open_ = [
            path
            for path, of in objects.items()
            if path.endswith(".delta") and of.size and closed_path(round_of(path) or 0) not in objects
            if kind == "flip" or path.split("/")[2] not in whole.get(round_of(path) or 0, {})
        ]
        if open_:
            path = self.rng.choice(sorted(open_))
            of = self.store.objects[path]
            if kind == "truncate":
                content = of.content[: self.rng.randrange(len(of.content))]
            else:
                content = bytearray(of.content)
                content[self.rng.randrange(len(content))] ^= 1
            self.store.objects[path] = replace(of, content=bytes(content), size=len(content))

    def settle(self) -> None:
        """Lets all live islands train without faults, until each has applied two more rounds."""
        self.store.out = False
        live = [island for island in self.islands if island.alive]
        if not live:
            return
        goal = max(island.model.outer.applied for island in live) + 2
        for _ in range(2000):
            self.store.now += 1.0
            self._note()
            for island in live:
                island.renew()
                island.upload()
                island.look()
                island.step()
            if all(island.model.outer.applied >= goal for island in live):
                return
        raise AssertionError(f"no progress: {[(i.name, i.model.step, i.rounds.state) for i in live]}")

    def check(self) -> None:
        self._note()
        for applied, thetas in self.thetas.items():
            assert len({*thetas.values()}) == 1, f"theta after {applied} rounds differs: {sorted(thetas)}"
        counted: dict[tuple[int, tuple[int, int]], int] = {}  # layer, sample -> round
        for number, content in self.closed.items():
            for name, share in closing_of(content).items():
                for layer, samples in self.cuts[name, number, share.steps].items():
                    for sample in samples:
                        before = counted.setdefault((layer, sample), number)
                        assert before == number, f"{sample} counts in {before}, {number}"
                        assert sample[0] == ord(name) - 97

    def _note(self) -> None:
        for path, of in self.store.objects.items():
            if path.endswith("closed.json"):
                number = int(path.split("/")[1])
                assert self.closed.setdefault(number, of.content) == of.content, f"round {number} changed"
