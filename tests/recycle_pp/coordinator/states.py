"""States of jobs, for the tests of a coordinator's handlers."""

from types import SimpleNamespace

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator.job import new_job
from recycle_pp.coordinator.state import JobState
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.timing.span_tables import SpanTables

from .held_lease import HeldLease


class Recorder:
    """A recorder in memory: names of events, causes of deaths, printed sentences."""

    def __init__(self):
        self.events, self.causes, self.said = [], [], []
        self.whole = []  # events with their fields

    def event(self, event):
        self.events.append(event.name())
        self.whole.append(event)

    layers_moved = event

    def described(self, message):
        pass

    def relaid(self, layout):
        self.layout = layout

    def say(self, sentence):
        self.said.append(sentence)

    def death(self, worker, process, now, stood=None):
        pass

    def found_dead(self, worker, process, now):
        self.events.append("found_dead")

    def suppose_death(self, process, death):
        pass

    def explain_death(self, process, death):
        self.causes.append(death.cause)

    def given_up(self, process, respawns):
        self.events.append("given_up")

    def release(self):
        pass

    def share(self, send):
        self.send = send

    def share_with(self, send):
        pass

    def stopped(self, reason):
        self.events.append("stopped")


def job_state(settings=None, job=None, folder="nowhere"):
    """A coordinator's state with a `Recorder` and a held lease. job: default: a job before its first generation."""
    settings = settings or Settings()
    job = job or new_job(settings, 0)
    return JobState(settings, RunFolder(folder), Recorder(), HeldLease(), SpanTables(), job)


class Driver:
    """A driver that records the job's events and does not handle them."""

    agreement_gate = SimpleNamespace(busy=False)

    def __init__(self):
        self.driven = []
        self.early = None

    def finish_early(self, reason, code):
        self.early = reason, code

    def drive(self, event):
        self.driven.append(event)

    def send(self, out):
        pass

    def finish_if_done(self):
        pass
