"""A whole job in this process: the real `Job`, and its workers as threads with all parts of a worker process.

with Cluster(config) as cluster:
    cluster.at(3, lambda job: [MoveWanted(layout, job.problem)])     # events after the commit of step 3
    cluster.returns(member, at=4, earliest=8)                        # a worker that is absent at first
    cluster.run()
cluster.weights[0]                       # member -> SHA-256 of each parameter of its stage
"""

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace

from msgspec import structs
from recycle_schedules import Problem, TensorKind, actions

from recycle_pp.comm.links import Links
from recycle_pp.comm.store import ControlStore
from recycle_pp.data.batches import Batches
from recycle_pp.execution.commits import Commits
from recycle_pp.execution.executor import Executor
from recycle_pp.execution.injection import Injector
from recycle_pp.execution.mailbox import Mailbox
from recycle_pp.execution.session import Session
from recycle_pp.execution.spans import Spans
from recycle_pp.execution.transports import transport_for
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.events import MessageReceived, PlanMade, WorkerDescribed, WorkerDied, WorkerReady
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.job import Job
from recycle_pp.protocol.participant import Participant
from recycle_pp.state.donations import Donations
from recycle_pp.state.follow import Following
from recycle_pp.wire.messages.generations import Report
from recycle_pp.wire.messages.lifecycle import Donate, Exit, Ready, StoreValue, StoreValues, Synced
from recycle_pp.wire.messages.saving import Finished
from recycle_pp.wire.messages.steps import Commit, Evaluated, Vote
from tests.recycle_pp.in_process import CPU
from tests.recycle_pp.protocol.planning import plan_simply

PATIENCE = 60.0  # seconds without a message


class Cluster:
    """
    weights   member -> name of each parameter of its stage -> SHA-256, at the end
    notes     the job's notes so far
    """

    def __init__(self, config):
        p = config.parallel
        self.config, self.inbox = config, queue.Queue()
        self.weights, self.notes = {}, []
        problem = Problem(pipelines=p.pipelines, stages=p.stages, microbatches=p.microbatches)
        self.job = Job(
            problem, config.run.steps, plan_simply, actions,
            clip=config.optimizer.clip, stagger=config.optimizer.stagger, copies=p.copies,
        )  # fmt: skip
        self._events = defaultdict(list)
        self._earliest = {}  # member that returns -> first step in which it takes part
        self.nodes = {member: Node(self, member, worker) for member, worker in self.job.assignment.items()}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for node in self.nodes.values():
            node.end()

    def at(self, step, events):
        """After the commit of this step, the job handles the events that `events(job)` returns."""
        self._events[step].append(events)

    def returns(self, member, at, earliest):
        """The member starts after the commit of step `at`, and takes part from step `earliest` on."""
        self._earliest[member] = earliest
        self.at(at, lambda job: self.nodes[member].start() or [])

    def run(self):
        """Runs the job to its end."""
        for member, node in self.nodes.items():
            if member in self._earliest:
                self._drive(WorkerDied(member))
            else:
                node.start()
        while self.job.phase != "finished":
            member, message = self.inbox.get(timeout=PATIENCE)
            if isinstance(message, Exception):
                raise message
            self._handle(member, message)
        for node in self.nodes.values():
            node.received.put(Exit())
            node.join(PATIENCE)

    def _handle(self, member, message):
        if isinstance(message, StoreValue):
            for other in self.nodes:
                if other != member:
                    self.nodes[other].received.put(StoreValues([(message.key, message.value)]))
        elif isinstance(message, Ready):
            self.nodes[member].address = message.address
            self._drive(WorkerDescribed(member, "", message.units))
            if member not in self.job.live:
                self._drive(WorkerReady(member, self._earliest.get(member, 0)))
        elif isinstance(message, Report | Vote | Evaluated | Finished | Synced):
            if isinstance(message, Finished):
                self.weights[member] = message.digests
            self._drive(MessageReceived(member, message))

    def _drive(self, event):
        outcome = self.job.handle(event)
        self.notes += outcome.notes
        further = []
        for send in outcome.sends:
            message = send.message
            if isinstance(message, Donate):
                message = structs.replace(message, address=self.nodes[message.to].address)
            if isinstance(message, Commit):
                further += self._events.pop(message.step, [])
            self.nodes[send.to].received.put(message)
        for make in further:
            for event in make(self.job):
                self._drive(event)
        while self.job.wants_plan:
            problem = self.job.problem_now()
            self.job.steady.plan(problem)
            self._drive(PlanMade(problem))


class Node(threading.Thread):
    """A worker in a thread, with the same parts as in `execution.worker`."""

    def __init__(self, cluster, member, worker):
        super().__init__(daemon=True)
        self.cluster, self.member, self.worker = cluster, member, worker
        self.received, self.address = queue.Queue(), None
        self.config = cluster.config

    def send(self, message):
        self.cluster.inbox.put((self.member, message))

    def run(self):
        try:
            self._run()
        except Exception as error:
            self.send(error)

    def _run(self):
        config, p = self.config, self.config.parallel
        store = ControlStore(lambda key, value: self.send(StoreValue(key, value)))
        self.links = links = Links(transport_for("tcp", store, CPU, size=p.pipelines * p.stages))
        participant = Participant(self.member, self.worker)
        client = SimpleNamespace(recv=self.received.get, send=self.send, state=None)
        self.session = session = Session(client, participant, links, store)
        session.start()
        self.stage = stage = Stage(config, self.worker.stage, CPU)
        self.optimizer = optimizer = StageOptimizer(config, stage, whole=not p.copies)
        participant.holdings = Holdings(self.member, stage.layout.ids, -1)
        batches, spans, faults = Batches(config), Spans(), Injector([], lambda **_: None)
        comes = {TensorKind.ACTIVATION: stage.module.takes, TensorKind.GRADIENT: stage.module.gives}
        mailbox = Mailbox(links, comes, CPU, (p.pipelines, p.stages, p.microbatches))
        commits = Commits(session, stage, optimizer, faults, spans)
        executor = Executor(session, stage, commits, mailbox, batches, faults, spans, config)
        executor.on_finish = lambda orders: self.send(Finished(commits.digests(orders)))
        donations = Donations(optimizer, stage.gradients, "token", faults.inject, self.send)
        executor.on_decision.append(donations.committed)
        session.donate = donations.asked
        self.following = following = Following(
            stage, optimizer, participant, session.lock, "token", "127.0.0.1", faults.inject
        )
        session.expect = following.expect
        units = stage.layout.described

        def relaid():
            donations.relayout()
            units.update(stage.layout.described)
            self.send(Ready(following.address, "", units=dict(units)))

        executor.relayout, following.relaid = following.relayout, relaid
        self.send(Ready(following.address, "", units=dict(units)))
        following.start(self.send)
        executor.run()

    def end(self):
        if self.is_alive():
            self.received.put(Exit())
            self.join(10)
        self.links.close()
        self.following.close()
