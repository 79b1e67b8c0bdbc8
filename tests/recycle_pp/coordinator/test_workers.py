"""Handling workers' messages."""

from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator.checkpoints import Saving
from recycle_pp.coordinator.context import Context
from recycle_pp.coordinator.lifecycle import Lifecycle
from recycle_pp.coordinator.restart_policy import RestartPolicy
from recycle_pp.coordinator.roster import Roster
from recycle_pp.coordinator.timers import Timers
from recycle_pp.coordinator.workers import Workers
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.messages.saving import Assembled

from .held_lease import HeldLease


@pytest.mark.parametrize(("ends", "expected"), [(False, ["checkpoint_saved"]), (True, ["stopped"])])
def test_the_last_line_is_the_reason_of_the_stop_even_if_a_checkpoint_finishes_later(ends, expected, tmp_path):
    events = []
    recorder = SimpleNamespace(
        event=lambda event: events.append(event.name()), stopped=lambda _: events.append("stopped")
    )
    settings, lifecycle = Settings(), Lifecycle(recorder, lambda: None)
    driver = SimpleNamespace(
        saving=Saving(tmp_path),
        ending=SimpleNamespace(saved=lambda: None),
        finish_if_done=lambda: None,
        job=SimpleNamespace(generation=0),
    )
    context = Context(
        settings,
        RunFolder(tmp_path),
        Roster(settings),
        RestartPolicy(settings),
        Timers(pytest.fail, HeldLease()),
        recorder,
        lifecycle,
        HeldLease(),
    )
    workers = Workers(context, driver, deaths=None, hangs=None, returns=None)
    if ends:
        lifecycle.stop("memory has failed")
    workers.handle(context.roster.enter(0), Assembled(8))
    assert events == expected and driver.saving.newest().name == "step-000008"
