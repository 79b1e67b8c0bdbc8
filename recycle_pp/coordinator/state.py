"""The state shared by the handlers of a coordinator.

    state = JobState(settings, run, recorder, lease, spans, job)
    state.begin(job)      # replaces the job, on a successor
    state.change({"checkpoint.minutes": 5.0})     # settings that may change while the job runs

Handlers must read `state.job` each time and keep no reference to the job, because `begin` replaces it. They must also
read settings that are in `config.live` each time, because `change` replaces `state.settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """The state shared by the handlers.

    job      the recovery protocol's state machine
    digests  digests of the final parameters, by finished worker
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
        self.storing = Storing(lambda: self.job.assignment, lambda member: self.roster[member].node)
        self.saving = Saving(
            run.checkpoints, lambda: self.job.assignment, job.first_step, store, lambda: self.storing.uploading
        )
        self.ending = Ending(settings, recorder)
        self.lifecycle = Lifecycle(self.roster, recorder)
        self.timers = Timers(self.lifecycle, lease)
        self.digests: dict[Worker, dict[str, str]] = {}

    def change(self, values: Mapping[str, Any]) -> None:
        """Applies changed settings to the coordinator, except those that `protocol.Job` applies itself. values: see
        `config.live.checked`."""
        self.settings = self.settings.with_values(values)
        self.ending.minutes = self.settings.checkpoint.minutes
        self.restarts.respawns = self.settings.run.respawns

    def begin(self, job: Job) -> None:
        """Continues with the job of a lost coordinator."""
        self.job = job
        self.recorder.began(job)
