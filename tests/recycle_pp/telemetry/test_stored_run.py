"""Copies of run folders in a store, which `recycle status URL` and resumes on other machines read."""

import json
import os
import shutil
import time

import pytest

from recycle_pp.storage.store import Absent, Store
from recycle_pp.telemetry import heartbeat, stored_run
from recycle_pp.telemetry.heartbeat import Heartbeat, Life, Pulse
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.stored_run import PIECE, RunCopy, fetch


@pytest.fixture
def store(tmp_path):
    return Store(f"{tmp_path}/store")


@pytest.fixture
def run(tmp_path):
    return started(tmp_path / "run")


def started(path, term=0):
    run = RunFolder(path)
    run.make()
    run.config.write_text("run: {}\n")
    run.heartbeat.write_text(json.dumps({"term": term}))
    return run


def add(run, *lines):
    with run.metrics.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def fetched(store, folder):
    fetch(store, folder)
    return RunFolder(folder)


def test_the_copy_follows_a_run_folder_and_leaves_out_its_checkpoints(store, run, tmp_path):
    copy = RunCopy(run, store)
    add(run, "first")
    run.log("1.2").write_text("a worker's log\n")
    (run.checkpoints / "step-000020").mkdir(parents=True)
    (run.checkpoints / "step-000020/weights").write_bytes(b"1")
    copy.update()
    add(run, "second")
    run.config.write_text("run: {steps: 7}\n")
    copy.update()
    there = fetched(store, tmp_path / "there")
    assert there.metrics.read_text() == "first\nsecond\n" and there.config.read_text() == "run: {steps: 7}\n"
    assert there.log("1.2").read_text() == "a worker's log\n"
    assert not there.checkpoints.exists()


def test_only_the_last_piece_of_a_grown_file_is_uploaded_again(store, run, tmp_path):
    copy = RunCopy(run, store)
    run.metrics.write_bytes(os.urandom(2 * PIECE) + b"\n")
    copy.update()
    puts = []
    store.put = lambda path, content: puts.append((path, len(content)))
    add(run, "last")
    copy.update()
    assert [(path.rpartition("/")[2], size) for path, size in puts] == [(f"{2 * PIECE:012d}", 6)]


def test_the_copy_has_no_lines_that_a_resume_has_removed(store, run, tmp_path):
    add(run, *(f"line {n:08d}" for n in range(PIECE // 8)))
    RunCopy(run, store).update()
    run.metrics.write_text("line 0\n")
    RunCopy(run, store).update()
    assert fetched(store, tmp_path / "there").metrics.read_text() == "line 0\n"


def test_the_copy_of_a_lost_run_folder_is_kept(store, run, tmp_path):
    copy = RunCopy(run, store)
    add(run, "a line")
    copy.update()
    shutil.rmtree(run.path)
    copy.update()
    assert fetched(store, tmp_path / "there").metrics.read_text() == "a line\n"


@pytest.mark.parametrize("newest_first", [False, True])
def test_the_folders_of_two_coordinators_are_merged_into_one_run(store, tmp_path, newest_first):
    """The second coordinator ran on another node, without a common folder."""
    first, second = started(tmp_path / "first", term=1), started(tmp_path / "second", term=2)
    add(first, "step 0", "step 1")
    add(second, "step 2")
    second.config.write_text("run: {steps: 9}\n")
    for run in (second, first) if newest_first else (first, second):
        RunCopy(run, store).update()
    there = fetched(store, tmp_path / "there")
    assert there.metrics.read_text() == "step 0\nstep 1\nstep 2\n"
    assert there.config.read_text() == "run: {steps: 9}\n"


def test_a_common_folder_copied_by_two_hosts_has_each_line_once(store, run, tmp_path, monkeypatch):
    for host in ("node0", "node1"):
        monkeypatch.setattr(stored_run.socket, "gethostname", lambda host=host: host)
        add(run, f"a line of {host}")
        RunCopy(run, store).update()
    assert fetched(store, tmp_path / "there").metrics.read_text() == "a line of node0\na line of node1\n"


def test_a_store_without_a_run_is_reported_in_one_sentence(store, tmp_path):
    with pytest.raises(Absent, match=r"contains no run$"):
        fetch(store, tmp_path / "there")


@pytest.fixture
def gets(monkeypatch):
    """Names of the files whose objects were requested from the store."""
    asked = []
    get = Store.get
    monkeypatch.setattr(Store, "get", lambda store, path: asked.append(path.split("/")[2]) or get(store, path))
    return asked


def test_a_reader_downloads_only_what_has_changed_and_the_heartbeat_first(store, run, gets, monkeypatch):
    monkeypatch.setattr(stored_run, "REFRESH_SECONDS", 0.02)
    copy = RunCopy(run, store)
    add(run, *(f"line {n:08d}" for n in range(PIECE // 8)))
    copy.update()
    there = RunFolder(stored_run.follow(store.url))
    assert gets == ["heartbeat.json", "config.yaml", "metrics.jsonl", "metrics.jsonl"]
    gets.clear()
    add(run, "last")
    run.heartbeat.write_text(json.dumps({"term": 0, "time": 1.0}))
    copy.update()
    deadline = time.monotonic() + 10
    while there.metrics.read_bytes() != run.metrics.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there.metrics.read_bytes() == run.metrics.read_bytes()
    assert there.heartbeat.read_bytes() == run.heartbeat.read_bytes()
    assert sorted(gets) == ["heartbeat.json", "metrics.jsonl"]


def test_before_a_resume_only_the_heartbeat_is_downloaded_to_see_whether_the_job_runs(store, run, gets, tmp_path):
    RunCopy(run, store).update()
    seen = []

    def look(pulse):
        seen.extend(gets)
        return Life("alive", "it runs", None, 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_run.Pulse, "look", look)
        assert stored_run.main(store.url, str(tmp_path / "there")) == 2
    assert set(seen) == {"heartbeat.json"}


def test_a_resume_in_an_older_folder_gets_the_lines_and_the_term_of_a_later_coordinator(store, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_run.Pulse, "look", lambda pulse: Life("silent", "no heartbeat", None, 0.0))
    first, second = started(tmp_path / "first", term=1), started(tmp_path / "second", term=2)
    add(first, '{"step": 0, "term": 1}')
    add(second, '{"step": 2, "term": 2}')
    for run in (first, second):
        RunCopy(run, store).update()
    add(first, '{"step": 1, "term": 1}')  # not uploaded before the node was lost
    assert stored_run.main(store.url, str(first.path)) == 0
    assert first.newest_term == 2 and [json.loads(line)["step"] for line in first.metrics.open()] == [0, 1, 2]


def test_a_resume_in_the_newest_folder_downloads_only_the_heartbeat(store, run, gets):
    RunCopy(run, store).update()
    add(run, "not uploaded")
    assert stored_run.main(store.url, str(run.path)) == 0
    assert set(gets) == {"heartbeat.json"} and run.heartbeat.exists()


def test_a_running_job_is_not_silent_while_its_files_are_uploaded(store, run, monkeypatch):
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(heartbeat, "STORED_SILENT_SECONDS", 1.0)
    Heartbeat(run, lambda: 0, "127.0.0.1:1").write([])
    run.write_json(run.heartbeat, {**json.loads(run.heartbeat.read_text()), "boot": "another"})
    RunCopy(run, store).update()
    for folder, seconds in ((run, 0.1), (RunFolder(stored_run.follow(store.url)), 1.0)):
        life = Pulse(folder).look()
        assert life.verdict == "silent" and life.age > seconds
