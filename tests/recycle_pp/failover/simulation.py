"""A simulation of supervisors that elect, host and follow coordinators, in one thread and in virtual time.

    with Simulation(Order(seed=7, ...)) as simulation:
        simulation.run()               # AssertionError with a history, if the contract is broken

`Supervisor`, `Leadership`, `Election`, `AgreementGate` and `FailoverDiscovery` are the product's own classes. Only
their sockets, clock and view of processes are replaced. The coordinator is a small one with the real rules: it welcomes
supervisors, rediscovers them after a take-over, requests agreement before a generation starts, and commits a step when
every member has voted. Workers are simulated by their supervisors.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Any
from unittest import mock

from recycle_pp.config.settings import Control, Settings
from recycle_pp.consensus import election, leader_lease, refusal, voter_client
from recycle_pp.consensus.agreement import majority
from recycle_pp.coordinator import failover_discovery
from recycle_pp.supervisor import joining, supervisor
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.launch import Address, Launch

from .clock import PROCESS, VirtualLoop
from .network import Network
from .small_coordinator import Begin, Committed, Coordinator, Step, Vote

STEP = 0.3  # seconds that a worker computes
LIVES = 120.0  # seconds after the last fault within which every member must have committed a step


@dataclass(frozen=True)
class Fault:
    """A fault of the simulation.

    at     seconds after the start of the job
    kind   kill | reset | cut | one_way | heal | pause
    whom   names of supervisors
    links  (from, to) that `one_way` cuts
    """

    at: float
    kind: str
    whom: tuple[str, ...] = ()
    seconds: float = 0.0
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Order:
    """The parameters of one simulation.

    one_machine  deaths can be proven
    latest       longest delay of a message, seconds
    pauses       number of random pauses of 0 to 2 s
    hosting      longest time to start a coordinator, seconds
    suspicion    `control.suspicion`
    """

    seed: int
    supervisors: int = 4
    one_machine: bool = True
    latest: float = 2.0
    pauses: int = 0
    hosting: float = 2.0
    suspicion: float = 10.0
    faults: tuple[Fault, ...] = ()


def connected_majorities(supervisors: int, cut: Collection[tuple[str, str]]) -> list[set[int]]:
    """All sets of ranks that are a majority and whose members reach each other in both directions."""
    return [
        set(ranks)
        for size in range(1, supervisors + 1)
        for ranks in combinations(range(supervisors), size)
        if majority(ranks, range(supervisors)) and not any((f"s{a}", f"s{b}") in cut for a, b in permutations(ranks, 2))
    ]


@dataclass
class Node:
    """A supervisor and the state of its worker."""

    name: str
    rank: int
    generation: int = -1
    applied: dict[int, int] = field(default_factory=dict)  # step -> generation that committed it
    code: int | None = None  # exit code of the supervisor, if it has ended

    @property
    def committed(self) -> int:
        return max(self.applied, default=-1)


class SimulatedSupervisor(supervisor.Supervisor):
    def __init__(self, simulation: Simulation, node: Node) -> None:
        super().__init__(
            Launch(
                rank=node.rank,
                world=simulation.order.supervisors,
                local_rank=node.rank if simulation.order.one_machine else 0,
                local_world=1,
            )
        )
        self._simulation, self._worker = simulation, node
        self._handlers |= {Begin: self._begins, Step: self._steps, Committed: self._commits}  # type: ignore[dict-item]

    def _begins(self, message: Begin) -> None:
        if message.generation >= self._worker.generation:
            self._worker.generation = message.generation
            self._simulation.adopts(self._worker, dict(message.commits), self._worker.rank in message.resetting)

    def _steps(self, message: Step) -> None:
        if message.generation == self._worker.generation:
            vote = Vote(message.generation, message.step)
            asyncio.get_running_loop().call_later(STEP, lambda: self._send(vote))  # type: ignore[arg-type]

    def _commits(self, message: Committed) -> None:
        if message.generation == self._worker.generation:
            self._worker.applied[message.step] = message.generation

    async def _start_host(self, leader: Any, takeover: Any) -> Any:
        self._simulation.record(f"{self._worker.name} was elected for term {leader.term}")
        await asyncio.sleep(self._simulation.chance.uniform(0, self._simulation.order.hosting))
        assert self._leadership.agreement is not None
        return Coordinator(self._simulation, self._leadership.agreement, leader, takeover, self._job_id)


class Simulation(ExitStack):
    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order, self.chance = order, random.Random(order.seed)
        self.settings = Settings(control=Control(suspicion=order.suspicion, heartbeat=order.suspicion / 5, health=0))
        self.loop = VirtualLoop()
        self.network = Network(self.loop, self.chance, self._delay)
        self.nodes = [Node(f"s{rank}", rank) for rank in range(order.supervisors)]
        self.history: list[str] = []
        self.supervisors: list[SimulatedSupervisor] = []
        self.begun = False
        self.lost = False  # too few supervisors were left at some time, so the job may end
        self._dead: set[str] = set()
        self._cut_off: set[str] = set()  # names that were cut off at some time and may have given up
        self._one_way: set[tuple[str, str]] = set()  # links cut in one direction
        self._healed = False
        self._agreed: dict[int, tuple[int, int]] = {}  # term -> rank that acted in it, generation
        self._memberships: dict[int, list[set[int]]] = {}
        self._committed: dict[int, list[int]] = {}  # by term
        self._replaced: dict[int, int] = {}  # by term: its newest step at the first commit of a later term
        self.errors: list[str] = []
        self._pauses = [self.chance.random() for _ in range(order.pauses)]
        self._ran = 0

    def __enter__(self) -> Simulation:
        super().__enter__()
        replaced: list[tuple[Any, str, Any]] = [
            (voter_client, "connect", self.network.connect),
            (failover_discovery, "connect", self.network.connect),
            (supervisor, "connect", self.network.connect),
            (joining, "connect", self.network.connect),
            (supervisor, "serve", self.network.serve),
            (supervisor, "identity", lambda: f"machine {PROCESS.get()} 1"),
            (supervisor, "PREPARE_SECONDS", 1e9),
            (election, "random", self.chance),
            (leader_lease, "clock", self.loop.time),
            (refusal, "is_here", lambda process: self.order.one_machine and bool(process)),
            *((of, "is_dead", self._is_dead) for of in (election, refusal)),
        ]
        for where, name, what in replaced:
            self.enter_context(mock.patch.object(where, name, what))
        return self

    def __exit__(self, *exception: Any) -> None:
        self.loop.close()
        super().__exit__(*exception)

    def run(self) -> None:
        for node in self.nodes:
            with self.loop.process(node.name):
                self.loop.call_soon(self._start, node)
        while not self.begun or any(node.generation < 0 for node in self.nodes) or not self._all_know_each_other():
            self.loop.run(self.loop.time() + 1.0)
            assert self.loop.time() < 300, self.explain("the job does not start")
        if self.order.pauses:
            self.loop.before_each = self._maybe_pause
        begun = self.loop.time()
        for fault in sorted(self.order.faults, key=lambda fault: fault.at):
            self.loop.run(begun + fault.at)
            self._inject(fault)
        self.loop.before_each = lambda process: None
        if self._one_way:
            self._check_one_way()
            return
        self.network.heal()
        self._check_continues()

    # -- checks ------------------------------------------------------------------------------------------------

    def _all_know_each_other(self) -> bool:
        """Whether every supervisor knows the full membership, so that the job survives its first coordinator."""
        return all(
            len(of._leadership.agreement.voter.memberships[-1].roster) == len(self.nodes) for of in self.supervisors
        )

    def agreed(self, agreement: Any, generation: int, members: set[int]) -> None:
        term, rank = agreement.voter.leader.term, agreement._rank
        self.record(f"rank {rank} leads term {term}: generation {generation} of {sorted(members)}")
        other, _ = self._agreed.setdefault(term, (rank, generation))
        if other != rank and self.nodes[other].name not in self._dead:  # a dead leader cannot act
            self.errors.append(f"ranks {other} and {rank} both act in term {term}")
        for earlier in self._memberships.setdefault(generation, []):
            alive = {node.rank for node in self.nodes if node.name not in self._dead}
            if not earlier & members and earlier & alive:  # proven dead members cannot act
                self.errors.append(f"generation {generation} was agreed by {earlier} and by {members}")
        self._memberships[generation].append(set(members))

    def commits(self, term: int, step: int) -> None:
        """Records a commit. After its replacement a coordinator may commit at most the step in progress."""
        self._committed.setdefault(term, []).append(step)
        late = [step for step in self._committed[term] if step > self._replaced.get(term, step)]
        if len(late) > 1:
            self.errors.append(f"the leader of term {term} committed {late} after the first commit of a later leader")
        for older in [older for older in self._committed if older < term]:
            self._replaced.setdefault(older, self._committed[older][-1])

    def adopts(self, node: Node, commits: dict[int, int], resetting: bool) -> None:
        """Records the start of a generation. A worker that keeps its state must not have commits that the job lacks."""
        if not resetting and not node.applied.items() <= commits.items():
            self.errors.append(f"{node.name} has committed {node.applied}, but the job {commits}")
        node.applied = commits

    def record(self, sentence: str) -> None:
        self.history.append(f"{self.loop.time():8.2f} {sentence}")

    def explain(self, what: str) -> str:
        return "\n".join([what, f"replay: {self.order!r}", *self.history[-60:]])

    def _check_continues(self) -> None:
        """Checks that every live supervisor becomes a member again and commits steps."""
        if self.lost:
            self.loop.run(self.loop.time() + LIVES)
            assert not self.loop.errors + self.errors, self.explain(str(self.loop.errors + self.errors))
            return
        expected = [node for node in self.nodes if node.name not in self._dead]
        expected = [node for node in expected if node.name not in self._cut_off or node.code is None]
        deadline = self.loop.time() + LIVES
        before = max(node.committed for node in self.nodes)
        while not all(node.committed > before + 2 for node in expected):
            self.loop.run(self.loop.time() + 1.0)
            expected = [node for node in expected if node.name not in self._cut_off or node.code is None]
            ended = [node.name for node in expected if node.code is not None]
            assert not ended, self.explain(f"{ended} ended although they should continue")
            where = [(node.name, node.generation, node.committed) for node in expected]
            assert not self.loop.errors + self.errors, self.explain(str(self.loop.errors + self.errors))
            assert self.loop.time() < deadline, self.explain(f"the job does not continue: {where}")
        assert not self.loop.errors + self.errors, self.explain(str(self.loop.errors + self.errors))

    def _check_one_way(self) -> None:
        """Checks after one-way cuts that each supervisor continues or has ended, and a connected majority continues."""
        self.loop.run(self.loop.time() + LIVES)
        before = {node.rank: node.committed for node in self.nodes}
        self.loop.run(self.loop.time() + 20 * STEP)
        assert not self.loop.errors + self.errors, self.explain(str(self.loop.errors + self.errors))
        left = [node for node in self.nodes if node.code is None]
        where = [(node.name, node.code, node.generation, node.committed) for node in self.nodes]
        stuck = [node.name for node in left if node.committed <= before[node.rank]]
        assert not stuck, self.explain(f"{stuck} neither continue nor exit: {where}")
        both = set.intersection(*(set(node.applied) for node in left)) if left else set()
        jobs = {tuple(node.applied[step] for step in sorted(both)) for node in left}
        assert len(jobs) <= 1, self.explain(f"two jobs: {where}")
        ranks = range(len(self.nodes))
        if connected := connected_majorities(len(self.nodes), self._one_way):
            assert majority([node.rank for node in left], ranks), self.explain(f"{connected} could continue: {where}")
        assert not left or majority([node.rank for node in left], ranks), self.explain(f"too few continue: {where}")
        if not self._healed:
            codes = [node.code for node in self.nodes if node.code is not None]
            assert all(code == 1 for code in codes), self.explain(f"a lost supervisor must exit with 1: {where}")

    # -- faults ------------------------------------------------------------------------------------------------

    def _start(self, node: Node) -> None:
        async def main() -> None:
            of = SimulatedSupervisor(self, node)
            self.supervisors.append(of)
            where = Address("10.0.0.1", 29501, "")
            if node.rank == 0:
                await of.start_job(where, self.settings, RunFolder("simulated"))
            try:
                node.code = (await of.run(where)).code
            except Exception as error:
                self.loop.errors.append(error)
                raise
            of.close()
            self.record(f"{node.name} ended with {node.code}")
            self.network.lost(node.name)
            self.loop.kill(node.name)

        self.loop.create_task(main())

    def _inject(self, fault: Fault) -> None:
        self.record(f"{fault.kind} {' '.join(fault.whom)} {fault.seconds or ''}")
        match fault.kind:
            case "kill":
                for name in fault.whom:
                    self._dead.add(name)
                    self.loop.kill(name)
                    self.network.lost(name)
                self._update_lost()
            case "pause":
                for name in fault.whom:
                    self.loop.pause(name, fault.seconds)
            case "reset":
                self.network.reset()
            case "cut":
                others = [node.name for node in self.nodes if node.name not in fault.whom]
                pairs = [(one, other) for one in fault.whom for other in others]
                self.network.cut(*pairs, *((other, one) for one, other in pairs))
                self._cut_off |= set(fault.whom)
                self._update_lost()
            case "one_way":
                self._one_way |= set(fault.links)
                self.network.cut(*fault.links)
            case "heal":
                self._healed = True
                self.network.heal()

    def _update_lost(self) -> None:
        """Sets `lost` if a membership that may still be needed has lost its majority."""
        dead = {node.rank for node in self.nodes if node.name in self._dead}
        left = {node.rank for node in self.nodes if node.name not in self._dead | self._cut_off}
        for of in self.supervisors:
            known = of._leadership.agreement.voter.memberships if of._worker.rank in left else []  # type: ignore[union-attr]
            for membership in known:
                self.lost |= not majority(left, membership.roster, dead if self.order.one_machine else ())

    def _maybe_pause(self, process: str | None) -> None:
        """Pauses a process before a random callback."""
        self._ran += 1
        if self._pauses and self.chance.random() < 0.01 and process is not None:
            self.loop.pause(process, 2.0 * self._pauses.pop())

    def _delay(self) -> float:
        """Seconds of delay: short for most messages, up to `latest` for any."""
        if self.chance.random() < 0.9 or not self.order.latest:
            return self.chance.uniform(0.0001, 0.01)
        return self.chance.uniform(0.0, self.order.latest)

    def _is_dead(self, process: str) -> bool:
        return self.order.one_machine and process.split()[1:2] in self._gone()

    def _gone(self) -> list[list[str]]:
        return [[name] for name in self._dead] + [[node.name] for node in self.nodes if node.code is not None]
