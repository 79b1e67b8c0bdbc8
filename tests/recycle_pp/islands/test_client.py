"""Workers of islands and a real store: a folder, and S3 through a server in its own process."""

import json
import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recycle_pp.islands import objects
from recycle_pp.islands import rounds as rules
from recycle_pp.islands.__main__ import main, state
from recycle_pp.islands.admission import admit
from recycle_pp.islands.client import Client
from recycle_pp.islands.leader import Leader
from recycle_pp.islands.objects import View
from recycle_pp.model.stage import Stage
from recycle_pp.model.transformer import TransformerStage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.outer_rounds import OuterRounds
from recycle_pp.storage.store import Absent, Store, StoreError
from recycle_pp.testing.s3_server import S3Server
from recycle_pp.wire.messages.islands import CutMissing, IslandsSeen, OuterState, RoundGoal, RoundReady, StoreTraffic
from recycle_pp.wire.messages.lifecycle import CannotRun
from tests.recycle_pp.in_process import CPU, small

SECONDS = 60  # limit on a wait; the machine may be busy


@pytest.fixture(params=["folder", "s3"])
def url(request, tmp_path, monkeypatch):
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    with S3Server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield f"{server.url('bucket')}/{os.urandom(4).hex()}"


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "store")


@pytest.fixture
def island():
    """Makes islands, and ends their threads."""
    made = []

    def make(*arguments, **words):
        made.append(Island(*arguments, **words))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Island:
    """Workers without a job: one for each stage, whose steps add noise. The rounds are decided as in a job."""

    def __init__(self, url, name, stages=1, **changes):
        defaults = {"islands__steps": 2, "islands__max_local": 2, "islands__patience": SECONDS, "islands__bits": 8}
        self.settings = small(parallel__stages=stages, islands__store=url, islands__name=name, **(defaults | changes))
        islands = self.settings.islands
        self.name, self.step, self.messages = name, 0, []
        self.rounds = OuterRounds(islands.every, islands.delay, islands.most_local)
        self.stages = [Stage(self.settings, stage, CPU) for stage in range(stages)]
        self.optimizers = [StageOptimizer(self.settings, stage) for stage in self.stages]
        self.clients = [
            Client(self.settings, optimizer, lambda message, member=member: self.messages.append((member, message)))
            for member, optimizer in enumerate(self.optimizers)
        ]
        self.live, self.theta, self.refused = set(range(stages)), {}, []
        for client in self.clients:
            client.open(None)
        self.begin(OuterState())
        for client in self.clients:
            client.start()

    def begin(self, position):
        self.rounds.begin(position)
        for member, (client, stage) in enumerate(zip(self.clients, self.stages, strict=True)):
            client.begin(0, position, {unit: [member] for unit in stage.layout.ids}, member)

    def receive(self):
        while self.messages:
            member, message = self.messages.pop(0)
            if isinstance(message, RoundReady):
                self.theta[member] = message.applied
                self.refused += [text for each in message.statistics for text in each.refused]
                self.rounds.ready(member, message.applied, message.mine)
                for behind, goal in self.rounds.behind(self.live, member).items():
                    self.clients[behind].aim(RoundGoal(0, goal))

    def reported(self):
        """Number of rounds in the newest theta that all workers have reported; 0 without one."""
        return min(self.theta.get(member, 0) for member in self.live)

    def until(self, condition):
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline
            self.receive()
            time.sleep(0.02)

    def train(self, steps):
        """Trains `steps` steps. Returns the numbers of the applied rounds."""
        applied = []
        for _ in range(steps):
            self.until(lambda: not self.rounds.waits(self.live, self.step))
            order = self.rounds.commit(self.live, self.step)
            for client, stage, optimizer in zip(self.clients, self.stages, self.optimizers, strict=True):
                if order.apply is not None:
                    client.apply(order)
                optimizer.replace(
                    {n: {"model": self._changed(stage, optimizer, n)} for n in range(len(stage.layout.units))}
                )
                if order.cut:
                    client.cut(order)
                client.committed(order, self.step)
            self.step += 1
            applied += [order.apply] if order.apply is not None else []
        return applied

    def _changed(self, stage, optimizer, number):
        before = optimizer.outer(number)["model"]
        return before + torch.from_numpy(self.noise(stage.layout.unit_names[number], before.numel()))

    def noise(self, unit, size):
        """What this step adds to the weights of a unit."""
        noise = np.random.default_rng([*self.name.encode(), self.step, *unit.encode()]).standard_normal(size)
        return noise.astype(np.float32) * np.float32(1e-3)

    def state(self, vector="theta"):
        """Name of a unit -> its vector, of the whole model."""
        return {
            name: optimizer.outer(number)[vector].numpy()
            for stage, optimizer in zip(self.stages, self.optimizers, strict=True)
            for number, name in enumerate(stage.layout.unit_names)
        }

    def close(self):
        for client in self.clients:
            client.close(finished=False)


def same(one, other):
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def together(islands, steps):
    """Trains islands in turn, so that none waits forever for another."""
    for _ in range(steps):
        for each in islands:
            each.until(lambda each=each: not each.rounds.waits(each.live, each.step))
            each.train(1)


def test_islands_of_different_shapes_have_the_same_theta_after_every_round(url, island):
    a, b = island(url, "a"), island(url, "b", stages=2)
    start = a.state()
    together([a, b], 9)
    assert a.rounds.state.applied == b.rounds.state.applied == 4
    assert same(a.state(), b.state()) and same(a.state("outer_momentum"), b.state("outer_momentum"))
    assert not same(a.state(), start)
    assert not same(a.state("residual"), b.state("residual"))
    store = Store(url)
    a.until(lambda: all(len(each["theta_sha256"]) == 2 for each in state(store)["rounds"]))
    found = state(store)
    assert [each["round"] for each in found["rounds"]] == [0, 1, 2, 3]
    assert all(len({*each["theta_sha256"].values()}) == 1 and each["islands"] == ["a", "b"] for each in found["rounds"])
    assert {each["name"] for each in found["islands"]} == {"a", "b"}


def test_with_fragments_each_round_changes_and_sends_a_part_of_the_layers(url, island):
    def changed(before, after):
        return {name for name in before if before[name].tobytes() != after[name].tobytes()}

    a = island(url, "a", islands__steps=4, islands__fragments=2)
    b = island(url, "b", stages=2, islands__steps=4, islands__fragments=2)
    admit(Store(url), a.settings, 0)
    parts, before = [], a.state()
    for steps in (3, 2, 2, 2):
        together([a, b], steps - 1)
        own = {name: weights + a.noise(name, weights.size) for name, weights in a.state("model").items()}
        together([a, b], 1)
        kept = before.keys() - changed(own, a.state("model"))
        assert same(a.state(), b.state())
        parts.append(changed(before, a.state()))
        assert kept == before.keys() - parts[-1], "other layers keep their own weights"
        before = a.state()
    assert a.rounds.state.applied == 4 and parts[0] == parts[2] and parts[1] == parts[3]
    assert parts[0] | parts[1] == before.keys() and not parts[0] & parts[1]
    sizes = [sum(before[name].size for name in part) for part in parts[:2]]
    sent = [sum(Store(url).list(f"rounds/{number:06d}/a/").values()) for number in (0, 1)]
    assert all(size <= bytes_ <= 2 * size + 3000 for size, bytes_ in zip(sizes, sent, strict=True))
    a.until(lambda: all(len(each["theta_sha256"]) == 2 for each in state(Store(url))["rounds"]))
    assert all(len({*each["theta_sha256"].values()}) == 1 for each in state(Store(url))["rounds"])


def test_an_island_that_reads_a_snapshot_keeps_its_weights_of_layers_that_the_round_has_not_synchronised(
    folder, island
):
    """So it has the same weights as a peer that has read the deltas before they were deleted."""
    words = {"islands__steps": 4, "islands__fragments": 2, "islands__snapshot_every": 1, "islands__patience": 0.1}
    a, store = island(folder, "a", **words), Store(folder)
    start = a.state()
    a.train(3)
    a.until(lambda: len({path.split("/")[2].split(".")[0] for path in store.list("theta/000001")}) == 5)
    a.close()
    store.delete([path for path in store.list("rounds/000000") if path.endswith(".delta")])
    b = island(folder, "b", islands__max_local=50, **words)
    b.until(lambda: b.rounds.applies(b.live, b.step))
    (stage,), (optimizer,) = b.stages, b.optimizers
    optimizer.replace({n: {"model": b._changed(stage, optimizer, n)} for n in range(len(stage.layout.units))})
    own = {name: weights + b.noise(name, weights.size) for name, weights in b.state("model").items()}
    assert b.train(1) == [1] and same(a.state(), b.state())
    kept = {name for name, weights in b.state("model").items() if weights.tobytes() == own[name].tobytes()}
    assert kept and kept == {name for name, theta in b.state().items() if theta.tobytes() == start[name].tobytes()}


def test_more_fragments_than_layers_are_refused_for_every_kind_of_model(folder):
    """For some models the settings do not give the number of layers, but the last stage knows it."""
    with pytest.raises(ValueError, match=r"islands\.fragments must be at most 3, the number of layers, not 4"):
        Island(folder, "a", stages=2, islands__steps=4, islands__fragments=4)


def test_fragments_that_would_have_a_round_without_parameters_are_refused(folder, monkeypatch):
    shapes_of, frozen = TransformerStage.shapes_of, {-1, 0, 2, 3}
    monkeypatch.setattr(TransformerStage, "shapes_of", lambda of, n: {} if n in frozen else shapes_of(of, n))
    with pytest.raises(ValueError, match=r"fragments=2 would have a round .* only the layers \[1\] of -1 to 3"):
        Island(folder, "a", stages=2, islands__steps=4, islands__fragments=2)
    frozen.remove(2)
    Island(folder, "a", stages=2, islands__steps=4, islands__fragments=2).close()


def test_a_store_of_a_version_without_fragments_has_one(folder):
    store = Store(folder)
    admit(store, settings_of(folder, "a"), 0)
    first = json.loads(store.get("run.json"))
    del first["settings"]["islands.fragments"]
    store.put("run.json", json.dumps(first).encode())
    admit(store, settings_of(folder, "b"), 0)
    with pytest.raises(StoreError, match=r"islands\.fragments is 1 in island a and 2 in island c"):
        admit(store, settings_of(folder, "c", islands__fragments=2), 0)


def test_a_store_of_a_version_that_did_not_compare_a_setting_does_not_refuse_it(folder):
    store = Store(folder)
    admit(store, settings_of(folder, "a", model__rope_theta=5e5), 0)
    first = json.loads(store.get("run.json"))
    del first["settings"]["model.rope_theta"]
    store.put("run.json", json.dumps(first).encode())
    assert admit(store, settings_of(folder, "b", model__rope_theta=5e5), 0) == 1


def test_an_island_with_different_initial_weights_is_refused_and_leaves_no_trace(folder, island):
    a, b, c = (island(folder, name, stages=stages) for name, stages in (("a", 1), ("b", 2), ("c", 2)))
    a.clients[0].open(None, origin="")
    for client in b.clients:
        client.open(None, origin="")
    c.optimizers[1].replace({0: {"model": torch.zeros_like(c.optimizers[1].outer(0)["model"])}})
    c.clients[0].open(None, origin="")
    with pytest.raises(ValueError, match=r"initial weights of layer 2 differ from those of the first island"):
        c.clients[1].open(None, origin="")
    with pytest.raises(ValueError, match=r"initial weights of layer -1 differ"):
        c.clients[0].open(None, origin="another folder of frozen weights")
    c.clients[1].open(OuterState(applied=1), origin=None)  # as after a resume
    sharded = {"numerics__precision": "bf16", "parallel__pipelines": 2, "parallel__sharded": True}
    island(folder, "d", **sharded).clients[0].open(None, origin="")
    b.clients[1].open(None, origin="")


def test_one_worker_reports_which_islands_live_and_which_rounds_are_closed(folder, island):
    store, seen = Store(folder), []
    store.put("islands/gone.json", b"{}")
    os.utime(Path(folder) / "islands/gone.json", (old := time.time() - 2 * rules.GONE_SECONDS, old))
    store.put("islands/a.json", b"{}")  # as the admission does
    a = island(folder, "a", stages=2, islands__patience=0.1)
    a.receive, receive = lambda: (seen.extend(a.messages), receive()), a.receive
    a.train(3)
    b = island(folder, "b", islands__max_local=50)
    a.train(2)
    a.until(lambda: any(isinstance(message, IslandsSeen) and "b" in message.live for _, message in seen))
    b.close()
    store.delete(["islands/b.json"])
    found = [(member, message) for member, message in seen if isinstance(message, IslandsSeen)]
    assert {member for member, _ in found} == {0} and all(message.silent == ["gone"] for _, message in found)
    assert found[0][1].live == ["a"] and found[-1][1].live == ["a", "b"]
    assert {number: of for _, message in found for number, of in message.closed.items()}[0].keys() == {"a"}
    assert all(one != other for one, other in pairwise(found)), "only changes are reported"


def test_a_late_island_takes_theta_and_continues(folder, island, monkeypatch):
    a, b = island(folder, "a", islands__patience=0.5), island(folder, "b", islands__max_local=50)
    b.train(1)  # alive, but slow
    assert a.train(5) == [1, 2]
    while b.rounds.state.applied < 2:
        b.until(lambda: b.reported() > b.rounds.state.applied)
        b.train(1)
    assert same(a.state(), b.state())
    together([a, b], 2)
    a.until(lambda: a.reported() == 3)
    assert rules.closing_of(Store(folder).get("rounds/000002/closed.json")).keys() >= {"a"}


def test_a_worker_keeps_the_result_that_it_has_reported_until_the_coordinator_knows_of_a_newer_one(
    folder, island, monkeypatch
):
    a, b = island(folder, "a", islands__patience=0.1), island(folder, "b", islands__max_local=50)
    b.train(1)  # alive, but slow
    assert a.train(5) == [1, 2]
    b.until(lambda: b.reported() > 0)
    first = b.reported()
    receive, b.receive = b.receive, lambda: None  # what b's worker sends from now on arrives after the next order
    a.train(2)
    a.until(lambda: a.reported() == 3)
    listing, looks = Store.objects, []
    monkeypatch.setattr(Store, "objects", lambda store: (looks.append(1), listing(store))[1])
    b.until(lambda: len(looks) > 9)
    assert b.train(1) == [first]
    b.receive = receive
    b.until(lambda: b.reported() == 3)
    assert b.train(1) == [3]
    while a.rounds.state.applied < 3:
        a.train(1)
    assert same(a.state(), b.state())


def test_a_new_island_begins_with_a_snapshot_and_the_rounds_after_it(folder, island):
    a = island(folder, "a", islands__snapshot_every=2, islands__patience=0.1)
    a.train(11)
    assert a.rounds.state.applied == 5
    a.until(lambda: any("theta/000004" in path for path in Store(folder).list()))
    old = [path for path in Store(folder).list("rounds") if path.endswith(".delta") and "/00000" in path]
    Store(folder).delete(path for path in old if int(path.split("/")[1]) < 4)
    b = island(folder, "b", stages=2, islands__max_local=50)
    b.until(lambda: b.rounds.applies(b.live, b.step))
    assert b.train(1) == [5] and same(a.state(), b.state())
    assert same(a.state("outer_momentum"), b.state("outer_momentum"))


def test_an_island_that_ends_before_it_uploads_checksums_uploads_them_when_it_resumes(folder, island):
    a, store = island(folder, "a", stages=2, islands__patience=0.1), Store(folder)
    a.train(3)
    a.until(lambda: len(state(store)["rounds"][0]["theta_sha256"]) == 1)
    before = state(store)["rounds"][0]["theta_sha256"]
    a.close()
    store.delete([path for path in store.list("rounds") if path.endswith(".sums")])
    position = a.rounds.state
    a.clients = [Client(a.settings, optimizer, lambda message: None) for optimizer in a.optimizers]
    for client in a.clients:
        client.open(position)
    a.begin(position)
    for client in a.clients:
        client.start()
    a.until(lambda: state(store)["rounds"][0]["theta_sha256"] == before)


def test_a_delta_that_no_peer_holds_any_more_is_cut_again(folder):
    """Without sharded state, the first holder of all units is the same worker."""
    settings, reported = small(parallel__stages=1, islands__store=folder, islands__name="a"), []
    stage, rounds = Stage(settings, 0, CPU), OuterRounds(steps=10, delay=1, max_local=12)
    for step in range(12):
        rounds.commit({0, 1}, step)
    for member in (0, 1):  # both were replaced since the cut
        sent = []
        client = Client(settings, StageOptimizer(settings, stage), sent.append)
        client.begin(3, rounds.state, {unit: [0, 1] for unit in stage.layout.ids}, member)
        reported += [(member, message) for message in sent]
    assert rounds.waits({0, 1}, 12)
    units = [(unit, [0, 1]) for unit in stage.layout.ids]
    assert reported == [(member, CutMissing(3, 10, units)) for member in (0, 1)]
    for member, message in reported:
        rounds.lacks(member, message.sent, message.units)
    assert not rounds.waits({0, 1}, 12) and rounds.commit({0, 1}, 12).cut


def test_a_worker_that_gives_a_unit_away_while_it_computes_theta_computes_it_again(folder, island, monkeypatch):
    """As with sharded state: the first commit after a worker has come back drops the units that it has taken over."""
    a, read, reads = island(folder, "a", islands__max_local=50), Store.get, []
    (client,), (optimizer,), (stage,) = a.clients, a.optimizers, a.stages
    *kept, given = sorted(stage.layout.ids)

    def get(store, path):
        if path.endswith(".delta") and not reads:
            reads.append(path)
            client.begin(1, a.rounds.state, {unit: [0] for unit in kept} | {given: [1]}, 0)
            del optimizer.held[stage.layout.number(given)]
        return read(store, path)

    monkeypatch.setattr(Store, "get", get)
    a.train(2)
    a.until(lambda: a.reported() == 1)
    assert reads


@pytest.mark.parametrize("deleted", [False, True], ids=["delta", "snapshot"])
def test_a_start_repeats_the_steps_of_a_delta_that_it_did_not_find_when_it_opened_the_store(folder, island, deleted):
    """A node that is cut off from its island, but not from the store, completes a delta of an earlier start."""
    words = {"islands__max_local": 50, "islands__snapshot_every": 1}
    earlier, b, store = island(folder, "a", **words), island(folder, "b", **words), Store(folder)
    for each in (earlier, b):
        each.train(2)
    for each in (earlier, b):
        each.until(lambda each=each: each.reported() == 1)
        assert each.train(1) == [1]
    earlier.until(lambda: 1 in View.of(store.objects(), 1).snapshots)
    earlier.close()
    if deleted:
        store.delete([path for path in store.list("rounds/000000") if path.endswith(".delta")])
    a = island(folder, "a", **words)
    a.until(lambda: a.reported() == 1)
    assert a.train(2) == [] and a.train(1) == [1] and same(a.state(), b.state())


def test_of_two_complete_deltas_of_an_island_all_islands_use_the_one_in_the_closed_round(folder, island, monkeypatch):
    """An upload of the first delta ends after the round was closed with a second one, which was cut later."""
    a, store = island(folder, "a", islands__max_local=50), Store(folder)
    store.put("islands/b.json", b"{}")  # so that `a` waits for `b`
    a.train(3)  # the last step is in the second delta
    a.until(lambda: "a" in View.of(store.objects(), 1).delivered.get(0, {}))
    first = {part.path: store.get(part.path) for part in View.of(store.objects(), 1).delivered[0]["a"].parts}
    for path, content in first.items():
        name, steps, *rest = path.rsplit(".", 4)
        store.put(".".join([name, str(int(steps) + 1), *rest]), content)
    store.delete([min(first)])
    put = Store.put_if_absent

    def close(store, path, content):
        if path == objects.closed_path(0):
            store.put(min(first), bytes(len(first[min(first)])))
        return put(store, path, content)

    monkeypatch.setattr(Store, "put_if_absent", close)
    b = island(folder, "b", islands__max_local=50)
    b.train(2)
    for each in (a, b):
        each.until(lambda each=each: each.reported() == 1)
        assert each.train(1) == [1] and not each.refused
    assert len(View.of(store.objects(), 1).complete[0]["a"]) == 2 and same(a.state(), b.state())


def test_a_damaged_object_is_left_out_by_all_islands(folder, island):
    a = island(folder, "a", islands__max_local=50)
    Store(folder).put("islands/b.json", b"{}")  # so that `a` waits for `b`
    a.train(2)
    path = next(iter(sorted(_wait_for(folder, "rounds/000000/a/"))))
    file = Path(folder) / path
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    b = island(folder, "b", islands__max_local=50)
    b.train(2)
    for each in (a, b):
        each.until(lambda each=each: each.reported() == 1)
        assert each.train(1) == [1]
    assert same(a.state(), b.state())


@pytest.mark.parametrize("wrong", ["absent", "damaged"])
def test_an_object_that_is_read_wrongly_once_is_read_again_and_not_left_out(folder, island, monkeypatch, wrong):
    a, b = island(folder, "a", islands__max_local=50), island(folder, "b", islands__max_local=50)
    read, spoiled = Store.get, []

    def get(store, path):
        if "/a/" in path and path.endswith(".delta") and path not in spoiled:
            spoiled.append(path)
            if wrong == "absent":
                raise Absent(path)
            return read(store, path)[:-1] + b"?"
        return read(store, path)

    monkeypatch.setattr(Store, "get", get)
    for each in (a, b):
        each.train(2)
    for each in (a, b):
        each.until(lambda each=each: each.reported() == 1)
        assert each.train(1) == [1] and not each.refused
    assert spoiled and same(a.state(), b.state())


def _wait_for(folder, prefix, count=3):
    deadline = time.monotonic() + SECONDS
    while len(found := Store(folder).list(prefix)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_the_lease_is_renewed_during_long_transfers(folder, island, monkeypatch):
    """Otherwise the other islands close the round without this one."""
    seconds, renewals = [0.0], []
    monkeypatch.setattr("recycle_pp.islands.leader.time", SimpleNamespace(monotonic=lambda: seconds[0], time=time.time))

    def slow(transfer, now=seconds):
        def run(store, path, *content):
            if path == objects.lease_path("a"):
                renewals.append(now[0])
            elif path.startswith(("rounds/", "theta/")) and not path.endswith(".json"):
                now[0] += 20.0
            return transfer(store, path, *content)

        return run

    for name in ("put", "put_if_absent", "get"):
        monkeypatch.setattr(Store, name, slow(getattr(Store, name)))
    a = island(folder, "a", islands__snapshot_every=1, islands__patience=0.1)
    a.train(3)
    a.until(lambda: 1 in View.of(Store(folder).objects(), 1).snapshots)
    assert seconds[0] > 2 * rules.GONE_SECONDS
    gaps = [after - before for before, after in pairwise([*renewals, seconds[0]])]
    assert max(gaps) <= rules.RENEW_SECONDS + 2 * 20.0, gaps


def test_the_store_of_a_long_job_has_a_bounded_number_of_objects(folder):
    """Each worker lists the whole store every few seconds."""
    store, settings = Store(folder), small(islands__store=folder, islands__name="a", islands__keep=2)
    store.put(objects.layout_path(0, 1, bytes(16)), b"")
    admit(store, settings, 0)
    leader = Leader(settings, lambda message: None)
    for number in range(30):
        for name in ("a", "b") if number < 5 else ("a",):
            store.put(objects.delta_path(number, name, (0, 0, 0), 1, 1, 4), bytes(4))
            store.put(objects.sums_path(number, name, (0, 0, 0)), b"[]")
        store.put(objects.closed_path(number), rules.closing_text({"a": rules.Share(1, 1)}, "a"))
    store.put(objects.sums_path(0, "c", (0, 0, 0)), b"[]")  # it applied the round, but took no part in it
    store.put(objects.state_path(29, (0, 0, 0), 8), bytes(8))
    store.put(objects.state_path(20, (0, 0, 0), 8), bytes(8))
    store.put(objects.state_path(10, (0, 0, 0), 8), bytes(4))  # incomplete
    leader.maintain(store, View.of(store.objects(), 1), OuterState(applied=30))
    left = Counter(path.rsplit(".")[-1] for path in store.list("rounds"))
    assert left == {"delta": 2, "sums": 20, "json": 30}
    assert [*store.list("theta")] == [objects.state_path(29, (0, 0, 0), 8)]
    for name in ("a", "b"):
        with pytest.raises(StoreError, match=f"islands.name={name} has taken part in rounds"):
            admit(store, settings.with_values({"islands.name": name}), 0)
    admit(store, settings.with_values({"islands.name": "c"}), 0)


def test_islands_with_different_models_are_refused(folder, island):
    island(folder, "a")
    with pytest.raises(ValueError, match="the islands a and b have different models: the tensors of layer"):
        Island(folder, "b", model__ffn=48)


def test_training_continues_while_the_store_fails_and_the_coordinator_is_informed(folder, island, monkeypatch):
    a = island(folder, "a", islands__max_local=50)
    objects = Store.objects

    def fails(self, *arguments):
        raise StoreError("the store is away")

    monkeypatch.setattr(Store, "objects", fails)
    monkeypatch.setattr("recycle_pp.islands.client.TRAFFIC_SECONDS", 0.1)
    assert a.train(10) == []
    heard = []
    a.until(lambda: heard.extend(a.messages) or any(isinstance(m, StoreTraffic) and m.detail for _, m in heard))
    monkeypatch.setattr(Store, "objects", objects)
    a.until(lambda: a.reported() == 1)
    assert a.train(1) == [1]


# -- admission


def settings_of(folder, name, **changes):
    return small(islands__store=folder, islands__name=name, run__dir=f"/runs/{name}", **changes)


def test_a_worker_waits_for_the_store_within_the_given_time_limit(folder, island, monkeypatch):
    each = island(folder, "a")
    each.close()  # otherwise its thread would use up the refusals
    listing, refusals = Store.objects, ["no answer", "no answer"]

    def refuse(store, *arguments):
        if refusals:
            raise StoreError(refusals.pop())
        return listing(store, *arguments)

    monkeypatch.setattr(Store, "objects", refuse)
    monkeypatch.setattr("recycle_pp.islands.client.TRAFFIC_SECONDS", 0.0)
    sent = []
    client = Client(each.settings, each.optimizers[0], sent.append)
    with pytest.raises(StoreError, match="no answer"):
        client.open(None)
    assert refusals == ["no answer"] and not sent
    assert client.open(None, patience=60.0) == OuterState()
    (told,) = sent
    assert told.failing > 0 and told.detail == "no answer"
    refusals[:] = 100 * ["no key"]
    with pytest.raises(StoreError, match="no key"):
        client.open(None, patience=0.3)
    assert len(refusals) < 99, "it tried more than once"


def test_each_name_has_its_own_part_of_the_data_forever(folder):
    store = Store(folder)
    assert [admit(store, settings_of(folder, name), 0) for name in ("b", "a", "b", "c")] == [0, 1, 0, 2]
    for name in ("d", "e", "f", "g", "h"):
        admit(store, settings_of(folder, name), 0)
    with pytest.raises(StoreError, match="no data left for island i"):
        admit(store, settings_of(folder, "i"), 0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"islands__steps": 7}, "islands.steps is 100 in island a and 7 in island b; all islands in"),
        ({"islands__fragments": 2}, "islands.fragments is 1 in island a and 2 in island b"),
        ({"model__width": 48}, "model.width is 24 in island a and 48 in island b"),
        ({"model__rope_theta": 5e5}, "model.rope_theta is 10000.0 in island a and 500000.0 in island b"),
        ({"model__norm_eps": 1e-6}, "model.norm_eps is 1e-05 in island a and 1e-06 in island b"),
        ({"model__lora__alpha": 32.0}, "model.lora.alpha is 16.0 in island a and 32.0 in island b"),
        ({"islands__bits": 32}, "islands.bits is 8 in island a and 32 in island b"),
    ],
)
def test_an_island_with_different_settings_is_refused_and_both_values_are_named(folder, changes, sentence):
    admit(Store(folder), settings_of(folder, "a"), 0)
    with pytest.raises(StoreError, match=sentence):
        admit(Store(folder), settings_of(folder, "b", **changes), 0)


def test_two_jobs_with_one_name_are_refused_unless_the_first_has_ended(folder):
    store = Store(folder)
    admit(store, settings_of(folder, "a"), 0)
    admit(store, settings_of(folder, "a"), 5)  # the same run starts again
    other = settings_of(folder, "a").with_values({"run.dir": "/runs/other"})
    with pytest.raises(StoreError, match=r"islands\.name=a is used by another job"):
        admit(store, other, 0)
    old = time.time() - 2 * rules.GONE_SECONDS
    os.utime(Path(folder) / "islands/a.json", (old, old))
    assert admit(store, other, 0) == 0


def test_of_two_jobs_with_one_name_that_start_together_one_is_refused(folder, monkeypatch):
    one, two = (settings_of(folder, "a").with_values({"run.dir": f"/runs/{number}"}) for number in (1, 2))
    listing, others = Store.list, [two]

    def during(store, *arguments):
        if others:
            admit(store, others.pop(), 0)
        return listing(store, *arguments)

    monkeypatch.setattr(Store, "list", during)
    with pytest.raises(StoreError, match=r"islands\.name=a is used by .*, which has started at the same time"):
        admit(Store(folder), one, 0)
    assert admit(Store(folder), two, 5) == 0


@pytest.mark.parametrize("lease", [None, b"{}", b"[]"], ids=["absent", "without an owner", "damaged"])
def test_the_second_of_two_jobs_with_one_name_stops_when_it_is_admitted_all_the_same(folder, lease):
    """Both may find the expired lease of a third job."""
    store, sent = Store(folder), []
    one, two = (settings_of(folder, "a").with_values({"run.dir": f"/runs/{number}"}) for number in (1, 2))
    if lease is not None:
        store.put(objects.lease_path("a"), lease)
    Leader(one, sent.append).renew(store, OuterState(), 0)
    Leader(one, sent.append).renew(store, OuterState(), 3)  # another worker of the job, or its next start
    assert not sent
    with pytest.raises(StoreError, match=r"islands\.name=a is now used by another job"):
        Leader(two, sent.append).renew(store, OuterState(), 0)
    assert [type(message) for message in sent] == [CannotRun]
    assert objects.owner_in(store.get(objects.lease_path("a"))) == objects.owner("/runs/1")


def test_a_run_that_has_taken_part_in_rounds_must_be_resumed(folder):
    store = Store(folder)
    admit(store, settings_of(folder, "a"), 0)
    store.put("rounds/000003/a/0.0-0.sums", b"[]")
    assert admit(store, settings_of(folder, "a"), 0) == 0, "it has only applied a round, so no sample counts twice"
    store.put("rounds/000003/a/0.0-0.9.9.1.delta", b"1")
    with pytest.raises(StoreError, match=r"has taken part in rounds .* or choose a different name if it has none"):
        admit(store, settings_of(folder, "a"), 0)
    assert admit(store, settings_of(folder, "a"), 10) == 0


def test_the_command_lists_the_islands_and_refuses_a_wrong_url(folder, capsys):
    admit(Store(folder), settings_of(folder, "a"), 0)
    assert main([folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rounds"] == [] and [island["name"] for island in found["islands"]] == ["a"]
    assert main([folder]) == 0 and "rounds" in capsys.readouterr().out
    assert main(["nothing://here"]) == 2 and "nothing://here" in capsys.readouterr().err


def test_a_folder_without_islands_is_refused_and_not_created(tmp_path, capsys):
    for flags in ([], ["--json"]):
        assert main([str(tmp_path / "nowhere"), *flags]) == 2
        assert capsys.readouterr() == ("", f"{tmp_path / 'nowhere'} contains no islands\n")
    assert list(tmp_path.iterdir()) == []
