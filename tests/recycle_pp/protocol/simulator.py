"""A deterministic world for the recovery protocol: real `Job` and `Participant`s, invented sockets, clock and compute.

    world = World(pipelines=2, stages=2, microbatches=2, steps=2)
    world.run(choose)                 # `choose(n)` picks one of n things that can happen next
    world.run(choose, kill={17: Worker(0, 1)})

Every run checks the contracts as it goes: an op uses the parameters of its step, no survivor runs an op twice, a step
sums every micro-batch's gradient once at every stage, and something can always happen until all is done. A violation
raises `Violation` with the order of events that led to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from recycle_schedules import Action, Op, OpArrays, Plan, Problem, Tensor, Worker, actions

from recycle_pp.protocol.job import Job, Send, StageLost
from recycle_pp.protocol.ledger import carried_by, consumed_by, made_by
from recycle_pp.protocol.participant import Orders, Participant

Json = dict[str, Any]


class Violation(AssertionError):
    pass


class Void(Exception):
    """The orders in hand are void."""


@dataclass
class Node:
    """A simulated worker: the state that the real one keeps in tensors, as counters and version numbers."""

    me: Participant
    inbox: deque[Json] = field(default_factory=deque)
    outbox: deque[Json] = field(default_factory=deque)
    program: Generator[Any, None, None] | None = None
    blocked: Callable[[], bool] | None = None  # the condition that the program waits for
    log: dict[tuple[int, Tensor], int] = field(default_factory=dict)
    received: dict[tuple[int, Tensor], int] = field(default_factory=dict)
    sums: Counter = field(default_factory=Counter)
    reduced: dict[int, Counter] = field(default_factory=dict)
    ran: set[tuple[int, str, Any]] = field(default_factory=set)
    finished: bool = False


class World:
    def __init__(
        self,
        pipelines: int,
        stages: int,
        microbatches: int,
        steps: int = 2,
        stagger: bool = False,
        evaluate_every: int = 0,
        clipped: frozenset[int] = frozenset(),
    ) -> None:
        problem = Problem(pipelines=pipelines, stages=stages, microbatches=microbatches)
        self.stages, self.steps, self.clipped, self.evaluate_every = stages, steps, clipped, evaluate_every
        self.job = Job(
            problem,
            steps=steps,
            planner=plan_simply,
            derive=actions,
            clip=1.0,
            stagger=stagger,
            evaluate_every=evaluate_every,
        )
        workers = [Worker(d, s) for d in range(pipelines) for s in range(stages)]
        self.nodes = {w: Node(Participant(w, stages)) for w in workers}
        self.wires: dict[tuple[int, Worker, Worker, Any], int] = {}  # (generation, from, to, key) -> version
        self.arrived: dict[
            tuple[int, int, int], set[Worker]
        ] = {}  # who has entered a reduction, by (generation, stage, step)
        self.offered: dict[tuple[int, int, int], dict[Worker, Counter]] = {}
        self.copies: dict[tuple[int, int, int], Counter] = {}
        self.deaths: deque[Worker] = deque()
        self.joining: dict[Worker, deque[int]] = {}
        self.donors: dict[Worker, tuple[Worker, int]] = {}
        self.events = 0
        self.history: list[str] = []
        self.lost: int | None = None
        for node in self.nodes.values():
            node.program = self._program(node)
            node.outbox.append({"type": "ready"})

    # -- running -----------------------------------------------------------------------------------------------

    def run(
        self,
        choose: Callable[[int], int],
        kill: dict[int, Worker] | None = None,
        revive: dict[int, Worker] | None = None,
        limit: int = 100_000,
    ) -> World:
        """Until the job is finished, or has lost a stage (`lost`)."""
        while self.job.phase != "finished" and self.lost is None:
            if kill and self.events in kill:
                self._kill(kill[self.events])
            if revive and self.events in revive:
                self._revive(revive[self.events])
            options = self._options()
            if not options:
                self._fail("nothing can happen any more")
            name, do = options[choose(len(options))]
            self.history.append(name)
            self.events += 1
            try:
                do()
            except StageLost as lost:
                self.lost = lost.stage
            except Violation:
                raise
            except Exception as error:
                self._fail(repr(error), error)
            if self.events > limit:
                self._fail("no end in sight")
        return self

    def _options(self) -> list[tuple[str, Callable[[], None]]]:
        found: list[tuple[str, Callable[[], None]]] = []
        for w, node in sorted(self.nodes.items()):
            if node.outbox:
                found.append((f"{w}->job {node.outbox[0]['type']}", lambda w=w, n=node: self._to_job(w, n)))
            if node.inbox:
                found.append((f"job->{w} {node.inbox[0]['type']}", lambda n=node: self._to_node(n)))
            if node.program and (node.blocked is None or node.blocked()):
                found.append((f"{w} runs", lambda n=node: self._advance(n)))
        if self.job._plan_due and self.job.phase == "running":
            found.append(("job plans", lambda: self._send(self.job.follow_up())))
        if self.deaths:
            found.append((f"death of {self.deaths[0]}", lambda: self._send(self.job.died(self.deaths.popleft()))))
        return found

    def _to_job(self, w: Worker, node: Node) -> None:
        message = node.outbox.popleft()
        self._send(self.job.ready(w) if message["type"] == "ready" else self.job.receive(w, message))

    def _send(self, out: list[Send]) -> None:
        for to, message in out:
            if to in self.nodes:
                self.nodes[to].inbox.append(message)

    def _to_node(self, node: Node) -> None:
        message = node.inbox.popleft()
        if message["type"] == "announce":
            node.outbox.append(node.me.announce(message))
        elif message["type"] == "adopt":
            node.me.adopt(message)
        elif message["type"] == "plan":
            node.me.plan(message)
        elif message["type"] == "commit":
            node.me.commit(message)
        elif message["type"] == "donate":
            node.donate = [*getattr(node, "donate", []), Worker(*message["to"])]  # type: ignore[attr-defined]

    def _advance(self, node: Node) -> None:
        assert node.program is not None
        try:
            node.blocked = next(node.program)
        except StopIteration:
            node.program = None

    def _kill(self, w: Worker) -> None:
        node = self.nodes.get(w)
        if node is None or self.job.phase == "finished":
            return
        self.history.append(f"KILL {w}")
        del self.nodes[w]
        self.joining.pop(w, None)
        self.deaths.append(w)

    def _revive(self, w: Worker) -> None:
        """A new process in the place of a dead one: it catches up with a donor, then takes part."""
        if w in self.nodes or w in self.deaths or self.job.phase in ("starting", "finished"):
            return
        self.history.append(f"REVIVE {w}")
        node = self.nodes[w] = Node(Participant(w, self.stages))
        node.me.committed = node.me.applied = -1
        self.joining[w] = deque()
        node.program = self._joiner(node)
        node.outbox.append({"type": "ready"})

    def _fail(self, what: str, cause: BaseException | None = None) -> None:
        raise Violation(what + "\n" + "\n".join(self.history[-400:])) from cause

    # -- one worker, as the executor does it -------------------------------------------------------------------

    def _program(self, node: Node) -> Generator[Any, None, None]:
        me = node.me
        while True:
            yield from self._settle(node)
            if me.orders is None:
                yield lambda: me.orders is not None or bool(me.commits) or me.undo
                continue
            if me.commits or me.undo:
                continue
            orders = me.orders
            with suppress(Void):
                yield from self._follow(node, orders)

    def _follow(self, node: Node, orders: Orders) -> Generator[Any, None, None]:
        me = node.me
        if orders.evaluate is not None:
            yield from self._evaluate(node, orders, orders.evaluate)
        step = me.committed + 1
        if orders.copy is not None:
            yield from self._copy(node, orders, step)
        if me.record(step).reduced:
            self._vote(node, orders, step)
        while step < self.steps:
            yield from self._run_step(node, orders, step)
            step += 1
        while True:
            yield lambda: me.orders is not orders or bool(me.commits)
            yield from self._settle(node, orders)

    def _run_step(self, node: Node, orders: Orders, step: int) -> Generator[Any, None, None]:
        me = node.me
        if step not in orders.steps:
            yield lambda: orders.steady is not None or me.orders is not orders
            self._check(me, orders)
        actions = orders.steps.get(step, orders.steady)
        for action in actions:
            yield from self._settle(node, orders)
            if action.kind in "FIWB":
                yield from self._compute(node, orders, step, action, actions)
            elif action.kind == "REDUCE":
                yield from self._await_turn(node, orders, step)
                yield from self._reduce(node, orders, step)
                self._vote(node, orders, step)
            elif action.kind.startswith("SEND"):
                key = (step, carried_by(action))
                held = node.received if key in node.received else node.log
                self.wires[orders.generation, me.worker, action.peer, key] = held[key]
            yield None
        yield from self._await_turn(node, orders, step)
        if orders.stagger and not self._is_barrier(step) and me.committed == me.applied == step - 1:
            me.speculate(step)
            return
        if step > me.committed:
            yield lambda: bool(me.commits) or me.orders is not orders
        yield from self._settle(node, orders)

    def _compute(
        self, node: Node, orders: Orders, step: int, action: Action, actions: list[Action]
    ) -> Generator[Any, None, None]:
        me, kind, mb = node.me, action.kind, action.microbatch
        assert mb is not None
        if kind != "F":
            yield from self._await_turn(node, orders, step)
        takes = consumed_by(kind, mb, me.worker.stage, self.stages)
        if takes and (step, takes) not in node.received:
            sender = next(a.peer for a in actions if a.kind.startswith("RECV") and carried_by(a) == takes)
            wire = (orders.generation, sender, me.worker, (step, takes))
            yield lambda: wire in self.wires or me.orders is not orders
            self._check(me, orders)
            node.received[step, takes] = self.wires[wire]
            me.record(step).receive(takes)
        self._check(me, orders)
        record = me.record(step)
        record.begin(kind, mb)
        if me.applied != step - 1:
            self._fail(f"{me.worker} runs {kind}{mb} of step {step} with parameters after step {me.applied}")
        if takes and node.received[step, takes] != step:
            self._fail(f"{me.worker} runs {kind}{mb} of step {step} on a tensor of step {node.received[step, takes]}")
        yield None  # it runs, and whatever may happen meanwhile happens
        if me.records.get(step) is record:
            if (step, kind, mb) in node.ran:
                self._fail(f"{me.worker} repeats {kind}{mb} of step {step}")
            node.ran.add((step, kind, mb))
        makes = made_by(kind, mb, me.worker.stage, self.stages)
        if makes:
            node.log[step, makes] = step
        if kind in "WB":
            node.sums[mb] += 1
        if takes:
            node.received.pop((step, takes))
        record.finish(takes)

    def _reduce(self, node: Node, orders: Orders, step: int) -> Generator[Any, None, None]:
        me = node.me
        key = (orders.generation, me.worker.stage, step)
        self.arrived.setdefault(key, set()).add(me.worker)
        self.offered.setdefault(key, {})[me.worker] = Counter(node.sums)
        peers = {w for w in self._members(orders.generation) if w.stage == me.worker.stage}
        yield lambda: self.arrived[key] >= peers or me.orders is not orders
        self._check(me, orders)
        node.reduced[step] = sum((self.offered[key][w] for w in peers), Counter())
        me.record(step).reduced = True

    def _copy(self, node: Node, orders: Orders, step: int) -> Generator[Any, None, None]:
        me = node.me
        key = (orders.generation, me.worker.stage, step)
        if orders.copy == me.worker:
            self.copies[key] = node.reduced[step]
            return
        yield lambda: key in self.copies or me.orders is not orders
        self._check(me, orders)
        node.reduced[step] = self.copies[key]
        me.record(step).reduced = True

    def _vote(self, node: Node, orders: Orders, step: int) -> None:
        counts = [node.reduced[step][mb] for mb in self.job.problem.microbatch_keys()]
        node.outbox.append({
            "type": "vote", "generation": orders.generation, "step": step, "finite": True, "counts": counts,
            "squares": [4.0 if step in self.clipped else 0.01], "losses": [1.0] * len(counts),
        })  # fmt: skip

    def _settle(self, node: Node, orders: Orders | None = None) -> Generator[Any, None, None]:
        me = node.me
        validate = []
        while me.commits or me.undo:
            if me.undo:
                undone = me.applied
                me.taken_back()
                node.ran = {r for r in node.ran if r[0] <= undone}
                node.log = {k: v for k, v in node.log.items() if k[0] <= undone}
                node.received = {k: v for k, v in node.received.items() if k[0] <= undone}
            commit = me.next_commit()
            if commit is None:
                continue
            me.applied = commit.step
            yield None
            if any(n != 1 for n in node.reduced[commit.step].values()):
                self._fail(f"{me.worker} applies {node.reduced[commit.step]}")
            self._feed(node, commit.step)
            node.sums.clear()
            node.reduced.pop(commit.step)
            node.log = {k: v for k, v in node.log.items() if k[0] > commit.step}
            node.received = {k: v for k, v in node.received.items() if k[0] > commit.step}
            if commit.then["evaluate"]:
                validate.append(commit.step)
            if commit.then["finish"]:
                node.outbox.append({"type": "finished", "generation": me.generation})
        if orders is not None:
            self._check(me, orders)
            for step in validate:
                yield from self._evaluate(node, orders, step)

    def _evaluate(self, node: Node, orders: Orders, step: int) -> Generator[Any, None, None]:
        me, made, losses = node.me, {}, {}
        yield lambda: orders.forward is not None or me.orders is not orders
        self._check(me, orders)
        for action in orders.forward:
            self._check(me, orders)
            mb = action.microbatch
            if action.kind == "F":
                takes = consumed_by("F", mb, me.worker.stage, self.stages)
                if takes:
                    sender = next(a.peer for a in orders.forward if a.kind == "RECV_F" and carried_by(a) == takes)
                    wire = (orders.generation, sender, me.worker, ("validation", step, takes))
                    yield lambda wire=wire: wire in self.wires or me.orders is not orders
                    self._check(me, orders)
                if me.applied != step:
                    self._fail(f"{me.worker} validates step {step} with parameters after step {me.applied}")
                makes = made_by("F", mb, me.worker.stage, self.stages)
                if makes:
                    made[makes] = step
                else:
                    losses[mb[0] * self.job.problem.counts[0] + mb[1]] = 1.0
            elif action.kind == "SEND_F":
                self.wires[orders.generation, me.worker, action.peer, ("validation", step, carried_by(action))] = step
            yield None
        if losses:
            node.outbox.append({"type": "evaluated", "generation": orders.generation, "step": step, "losses": losses})

    def _await_turn(self, node: Node, orders: Orders, step: int) -> Generator[Any, None, None]:
        me = node.me
        while step > me.committed + 1:
            yield lambda: bool(me.commits) or me.orders is not orders
            yield from self._settle(node, orders)
        yield from self._settle(node, orders)

    def _is_barrier(self, step: int) -> bool:
        return step == self.steps - 1 or (self.evaluate_every > 0 and (step + 1) % self.evaluate_every == 0)

    def _check(self, me: Participant, orders: Orders) -> None:
        if me.orders is not orders:
            raise Void

    def _members(self, generation: int) -> set[Worker]:
        note = next(n for n in self.job.notes if n["event"] == "announced" and n["generation"] == generation)
        return {Worker.parse(w) for w in note["members"]}

    # -- joining -----------------------------------------------------------------------------------------------

    def _feed(self, node: Node, step: int) -> None:
        """After a commit: new joiners get the state, the others this step's gradients."""
        for joiner, donor in list(self.donors.items()):
            if donor[0] == node.me.worker and joiner in self.joining:
                self.joining[joiner].append(step)
        for joiner in getattr(node, "donate", []):
            if joiner in self.joining:
                self.joining[joiner].clear()
                self.joining[joiner].append(step)
                self.donors[joiner] = (node.me.worker, step)
        node.donate = []  # type: ignore[attr-defined]

    def _joiner(self, node: Node) -> Generator[Any, None, None]:
        """Takes states and gradients until it is a member, then works like everybody."""
        me, line = node.me, self.joining[node.me.worker]
        while me.generation < 0:
            yield lambda: bool(line) or me.generation >= 0
            if line:
                me.applied = me.committed = line.popleft()
                node.outbox.append({"type": "synced", "step": me.applied})
        self.joining.pop(me.worker, None)
        self.donors.pop(me.worker, None)
        yield from self._program(node)


def plan_simply(problem: Problem) -> Plan:
    """All forwards, then all backwards: a valid plan of any problem without a memory limit, in one pass."""
    free = {w: problem.busy.get(w, 0.0) for w in problem.workers()}
    ops: list[Op] = []
    hosts: dict[Any, Worker] = {}
    ends: dict[Any, float] = {}
    load: Counter = Counter()

    def add(kind: str, mb: Any, stage: int, after: float) -> float:
        if (mb, stage) not in hosts:
            begun = problem.begun.get((mb, stage))
            peers = [Worker(d, stage) for d in problem.live[stage]]
            own = Worker(mb[0], stage)
            hosts[mb, stage] = (
                begun.worker if begun else own if own in peers else min(peers, key=lambda w: (load[w], w))
            )
        w = hosts[mb, stage]
        load[w] += 1
        start = max(after, free[w])
        free[w] = start + 1
        ops.append(Op(kind, mb, stage, w, start, start + 1))
        return start + 1

    todo = [s for s in range(problem.stages) if s not in problem.finished]
    for mb in problem.microbatch_keys():
        for s in todo:
            begun = problem.begun.get((mb, s))
            if not begun or "F" not in begun.kinds:
                ends["F", mb, s] = add("F", mb, s, ends.get(("F", mb, s - 1), 0.0))
    for mb in problem.microbatch_keys():
        for s in reversed(todo):
            kinds = begun.kinds if (begun := problem.begun.get((mb, s))) else frozenset()
            after = max(ends.get(("F", mb, s), 0.0), ends.get(("B", mb, s + 1), 0.0))
            if not kinds & {"I", "B"}:
                split = (mb[1] + s) % 2 == 0
                ends["B", mb, s] = add("I" if split else "B", mb, s, after)
                if split:
                    add("W", mb, s, ends["B", mb, s])
            elif "I" in kinds and "W" not in kinds:
                add("W", mb, s, 0.0)
    return Plan(problem, OpArrays.of(problem, ops))
