"""What follows a commit."""

import json
from types import SimpleNamespace

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator.after_commit import AfterCommit
from recycle_pp.protocol.events import Outcome
from recycle_pp.wire.messages.saving import Assembled, Saved
from recycle_pp.wire.messages.steps import Commit

from .states import Driver, job_state


class Quiet(Driver):
    def change(self, problem):
        pass


def test_the_profile_is_written_after_every_measurement(tmp_path):
    state = job_state(folder=tmp_path)
    state.job.live |= {*state.job.assignment}
    state.run.later = lambda write, *arguments: write(*arguments)
    measured = {3, 8}  # steps; layers have moved between them

    def add(spans, again):
        state.profile.measured += state.job.committed in measured
        state.profile.layout = (state.job.committed,)
        return []

    state.profile.add = add
    handler, written = AfterCommit(state, Quiet()), []
    for step in range(10):
        state.job.committed = step
        commit = Commit(0, step, 1.0, 1.0, 1.0)
        handler.handled(None, Outcome([], [{"event": "committed", "commit": commit, "skipped": False}]))
        if state.run.profile.exists():
            written.append(json.loads(state.run.profile.read_text())["layout"][0])
            state.run.profile.unlink()
    assert written == [3, 8]


def test_the_wait_for_the_last_upload_is_shorter_after_a_signal(monkeypatch):
    state = job_state(Settings().with_values({"checkpoint.store": "s3://bucket/run", "run.steps": 20}))
    monkeypatch.setattr(state, "timers", SimpleNamespace(after=lambda *call: None), raising=False)
    monkeypatch.setattr(state.storing, "begin", lambda *about: [])
    handler = AfterCommit(state, Driver())
    for signal, seconds in ((None, 600), ("SIGTERM", 22)):
        if signal:
            state.ending.request(signal, 143)
        handler.store(Assembled(20), last=False)
        assert state.recorder.said[-1].endswith(f"is in the store, or after {seconds} s")


def test_the_members_that_wrote_the_parts_upload_them(monkeypatch):
    state = job_state(Settings().with_values({"checkpoint.store": "s3://bucket/run"}))
    begun = []
    monkeypatch.setattr(state.storing, "begin", lambda *about: begun.append(about) or [])
    state.saving.begin(20, [0], False, {0})
    state.saving.saved(0, Saved(20, False, "stage-0-0-aa"))
    AfterCommit(state, Driver()).store(Assembled(20, False, ["stage-0-0-aa"]), last=False)
    assert begun[0][-1] == {"stage-0-0-aa": 0}
