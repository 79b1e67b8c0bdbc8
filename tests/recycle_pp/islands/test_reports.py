"""The workers of an island agree on the next theta, in any order of their messages, of commits and of closed rounds."""

import random

import pytest

from recycle_pp.islands.objects import Delivery, View
from recycle_pp.islands.rounds import Apply, Position, Share, chosen
from recycle_pp.protocol.outer_rounds import OuterRounds

MOST = 12  # maximum number of closed rounds


def seen(closed):
    """The view of a store in which island b alone has closed this number of rounds, and their closings."""
    delivered = {number: {"b": Delivery(1, 1, ())} for number in range(closed)}
    return View(delivered=delivered, closed={*range(closed)}), {number: {"b": Share(1, 1)} for number in range(closed)}


class Worker:
    def __init__(self):
        self.applied = self.goal = self.reported = self.newest = 0
        self.computes = None  # (rounds in theta before, and after)
        self.result = None
        self.inbox, self.outbox = [], []

    def look(self, closed):
        """Lists the store. closed: number of closed rounds in the listing"""
        if self.computes is None and closed > self.applied:
            mine = Apply(None, tuple(range(self.applied, closed)))
            path = chosen(*seen(closed), "a", Position(self.applied, False), mine, self.goal, self.reported)
            if path is not None:
                self.computes = self.applied, path.applied

    def finish(self):
        if self.computes is not None:
            before, after = self.computes
            assert before == self.applied, "theta has changed while the worker computed from it"
            self.result, self.reported, self.computes = after, after, None
            self.outbox.append(after)

    def receive(self):
        if not self.inbox:
            return
        kind, value = self.inbox.pop(0)
        if kind == "goal":
            self.goal = value
        elif value.apply is not None:
            assert self.result == value.apply, "the worker lacks the theta that the commit applies"
            self.applied, self.result = value.apply, None


class Island:
    def __init__(self, chance, workers):
        self.chance, self.closed, self.step = chance, 0, 0
        self.rounds = OuterRounds(steps=3, delay=1, max_local=5)
        self.workers = [Worker() for _ in range(workers)]
        self.live = set(range(workers))

    def act(self, close=0.1):
        if self.closed < MOST and self.chance.random() < close:
            self.closed += 1
        member = self.chance.choice(sorted(self.live))
        worker = self.workers[member]
        action = self.chance.choice(["look", "finish", "receive", "deliver", "commit"])
        if action == "look":
            worker.look(self.closed - (self.chance.random() < 0.3))  # a listing may be out of date
        elif action == "deliver":
            self.deliver(member)
        elif action == "commit":
            self.commit()
        else:
            getattr(worker, action)()

    def deliver(self, member):
        if self.workers[member].outbox:
            self.rounds.ready(member, self.workers[member].outbox.pop(0), {})
            for behind, goal in self.rounds.behind(self.live, member).items():
                self.workers[behind].inbox.append(("goal", goal))

    def commit(self):
        """Commits a step, if all workers have applied the commit before."""
        applied = not any(kind == "commit" for worker in self.workers for kind, _ in worker.inbox)
        if applied and not self.rounds.waits(self.live, self.step):
            order = self.rounds.commit(self.live, self.step)
            self.step += 1
            for worker in self.workers:
                worker.inbox.append(("commit", order))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_in_any_order_each_commit_finds_its_theta_and_all_closed_rounds_are_applied(workers):
    for seed in range(300):
        island = Island(random.Random(f"{workers} {seed}"), workers)
        for _ in range(400):
            island.act()
        for _ in range(4000):
            island.act(close=1.0)
        assert [worker.applied for worker in island.workers] == [MOST] * workers, seed
