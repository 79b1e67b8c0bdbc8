"""Objects shared by the parts of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

from recycle_pp.config.settings import Settings
from recycle_pp.consensus.leader_lease import LeaderLease
from recycle_pp.telemetry.recorder import Recorder
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.timing.span_tables import SpanTables

from .lifecycle import Lifecycle
from .restart_policy import RestartPolicy
from .roster import Roster
from .timers import Timers


@dataclass(frozen=True)
class Context:
    settings: Settings
    run: RunFolder
    roster: Roster
    restarts: RestartPolicy
    timers: Timers
    recorder: Recorder
    lifecycle: Lifecycle
    lease: LeaderLease
    spans: SpanTables = field(default_factory=SpanTables)
