"""The state shared by the handlers of a coordinator.

    state = JobState(settings, run, recorder, lease, spans, job)
    state.begin(job)      # replaces the job, on a successor

Handlers must read `state.job` each time and keep no reference to the job, because `begin` replaces it.
"""

from __future__ import annotations

from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.fitting.model_layers import ModelLayers
from recycle_pp.fitting.profile import Profile
from recycle_pp.protocol.job import Job
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.timing.span_tables import SpanTables

from .checkpoints import Saving
from .ending import Ending
from .lifecycle import Lifecycle
from .restart_policy import RestartPolicy
from .roster import Roster
from .storing import Storing
from .timers import Timers


class JobState:
    """
    job      the protocol
    digests  digests of parameters at the end, by finished worker
    """

    def __init__(
        self,
        settings: Settings,
        run: RunFolder,
        recorder: Recorder,
        lease: LeaderLease,
        spans: SpanTables,
        job: Job,
    ) -> None:
        self.settings = settings
        self.run = run
        self.recorder = recorder
        self.lease = lease
        self.spans = spans
        self.job = job
        self.profile = Profile(settings)
        self.layers = ModelLayers(settings)
        self.roster = Roster(settings, lambda: self.job.assignment)
        self.restarts = RestartPolicy(settings)
        store = settings.checkpoint.store
        self.saving = Saving(run.checkpoints, lambda: self.job.assignment, job.first_step, store)
        self.storing = Storing(lambda: self.job.assignment, lambda member: self.roster[member].node)
        self.ending = Ending(settings, recorder)
        self.lifecycle = Lifecycle(self.roster, recorder)
        self.timers = Timers(self.lifecycle, lease)
        self.digests: dict[Worker, dict[str, str]] = {}

    def begin(self, job: Job) -> None:
        """Continues with the job of a lost coordinator."""
        self.job = job
        self.recorder.began(job)
