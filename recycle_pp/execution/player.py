"""The executor of one worker in this process, and all objects that the executor needs.

    player = Player(process, stage, optimizer, faults)      # sets the handlers of the session
    reason = player.executor.run()                          # "cast": the process must run another stage
    player.close()

A process runs one worker until it ends. Only an understudy (`protocol.understudies`) may take over another worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from recycle_schedules import TensorKind

from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.islands.client import Client
from recycle_pp.model.stage import Stage
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.state.donations import Donations
from recycle_pp.state.follow import Following
from recycle_pp.state.saving import StageSaving
from recycle_pp.wire.messages.saving import Finished

from .commits import Commits
from .executor import Executor
from .injection import Injector
from .mailbox import Mailbox
from .marks import marks_of
from .profiling import Profiling
from .session import Session
from .spans import Spans
from .validation import held_out

NEWS_SECONDS = 0.005  # mean seconds between two progress messages of all workers together: 200 messages a second


@dataclass(frozen=True)
class ThisProcess:
    """The objects that stay the same when the process takes over another worker. backend: see `device.backend_for`.
    island: takes part in the rounds of the islands; None if the job does not use islands."""

    settings: Settings
    run_dir: str
    token: str
    session: Session
    following: Following
    batches: Batches
    backend: str
    island: Client | None = None


class Player:
    def __init__(self, process: ThisProcess, stage: Stage, optimizer: StageOptimizer, faults: Injector) -> None:
        settings, session, following, batches = process.settings, process.session, process.following, process.batches
        pipelines, stages, device = settings.parallel.pipelines, settings.parallel.stages, stage.device
        spans = Spans(NEWS_SECONDS * pipelines * stages, marks_of(device), session.doing.on_device)
        shape = (pipelines, stages, settings.parallel.microbatches)
        gradients = [tensor for tensor in stage.module.gives if tensor.differentiable]
        comes = {TensorKind.ACTIVATION: stage.module.takes, TensorKind.GRADIENT: gradients}
        on_host = settings.state.log == "host"
        mailbox = Mailbox(session.links, comes, device, shape, on_host, held_out(settings, batches))
        commits = Commits(
            session, stage, optimizer, faults, spans, batches if settings.run.sample_log else None, process.island
        )
        executor = Executor(session, stage, commits, mailbox, batches, faults, spans, settings)
        executor.in_stream = process.backend == "nccl"

        participant, to, inject = session.participant, session.send, faults.inject
        saving = StageSaving(settings, process.run_dir, stage, optimizer, batches, participant, to, inject)
        donations = Donations(optimizer, stage.gradients, process.token, inject, to, settings.control.suspicion)
        profiling = self.profiling = Profiling(process.run_dir, participant.worker, device, to)
        executor.on_decision = [donations.committed]
        executor.on_commit = [saving.committed, profiling.committed]
        executor.on_vote = [donations.voting]
        executor.on_finish = lambda orders: session.send(Finished(commits.digests(orders)))  # the parameters are final
        executor.relayout = following.relayout
        session.save, session.assemble = saving.asked, saving.assemble
        session.donate, session.expect = donations.asked, following.expect
        session.profile = profiling.asked
        session.moment = lambda name: faults.inject(name, participant.committed + 1)
        self.stage, self.executor, self.commits, self.donations = stage, executor, commits, donations

    def close(self) -> None:
        """Stops the threads that send the state of this stage, and any profile recording."""
        self.donations.close()
        self.profiling.close()
