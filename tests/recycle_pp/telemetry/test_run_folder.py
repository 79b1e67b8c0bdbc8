"""The files of a run folder, and the jobs that may use it."""

import json
import tracemalloc

import pytest

from recycle_pp.config.loading import load
from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.run_folder import RunFolder


def settings_for(path, **groups):
    return load({**groups, "run": {"dir": str(path), **groups.get("run", {})}})


def test_the_resolved_configuration_is_read_back_unchanged(tmp_path):
    settings = settings_for(tmp_path / "run", fail_at="20:1.2", model={"split": [1, 2, 2, 3]})
    run = RunFolder.create(settings)
    assert load(run.read_config()) == settings
    assert load(RunFolder(tmp_path / "run").read_config()).fail_at == ["20:1.2"]
    assert (
        run.log("1.2").name == "worker-1.2.log"
        and run.log("1.2").parent.is_dir()
        and run.trace(20).name == "step-000020.json"
    )


def test_another_run_is_rejected_and_a_resume_continues_from_its_checkpoint(tmp_path):
    before = RunFolder.create(settings_for(tmp_path))
    before.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in (0, 1, 2, 1, 2, 3)))
    before.unlock()
    with pytest.raises(ValueError, match=r"contains another run; continue it with run\.resume=true"):
        RunFolder.create(settings_for(tmp_path))
    resumed = settings_for(tmp_path, run={"resume": True, "steps": 100})
    with pytest.raises(ValueError, match="needs a checkpoint to continue from"):
        RunFolder.create(resumed, done=0)
    run = RunFolder.create(resumed, done=3)
    assert load(run.read_config()) == resumed.with_values({"run.resume": False})
    assert run.lines(run.metrics) == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_a_resume_of_a_long_run_takes_little_memory(tmp_path):
    before = RunFolder.create(settings_for(tmp_path))
    samples = list(range(10_000))
    with before.samples.open("w") as file:
        for step in [*range(200), *range(100, 300)]:
            file.write(json.dumps({"step": step, "samples": samples}) + "\n")
    size = before.samples.stat().st_size
    before.unlock()
    tracemalloc.start()
    run = RunFolder.create(settings_for(tmp_path, run={"resume": True}), done=150)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < size / 5
    assert [line["step"] for line in run.lines(run.samples)] == list(range(150))


def test_a_resume_removes_the_summary_of_the_earlier_end_but_a_refused_start_does_not(tmp_path):
    before = RunFolder.create(settings_for(tmp_path))
    before.metrics.write_text('{"step": 0}\n')
    before.write_json(before.summary, {"steps": 1})
    before.unlock()
    with pytest.raises(ValueError, match="contains another run"):
        RunFolder.create(settings_for(tmp_path))
    assert before.summary.exists()
    RunFolder.create(settings_for(tmp_path, run={"resume": True}), done=1).unlock()
    assert not before.summary.exists()


def test_a_coordinator_on_a_node_without_the_folder_makes_one_that_is_a_run(tmp_path):
    settings = settings_for(tmp_path, run={"steps": 7, "resume": True})
    run = RunFolder(tmp_path / "elsewhere")
    run.take_over(settings)
    assert run.read_settings() == settings.with_values({"run.resume": False}) and run.logs.is_dir()
    run.take_over(settings.with_values({"run.steps": 8}))
    assert run.read_settings().run.steps == 7, "an existing file stays"


def test_a_second_job_is_rejected_while_the_first_one_runs(tmp_path):
    first = RunFolder.create(settings_for(tmp_path))
    with pytest.raises(ValueError, match="belongs to a job that still runs"):
        RunFolder.create(settings_for(tmp_path))
    first.unlock()
    RunFolder.create(settings_for(tmp_path)).unlock()


def test_a_failed_start_removes_its_new_folder(tmp_path):
    RunFolder.create(settings_for(tmp_path / "runs" / "mine")).remove_new()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_unrelated_files_may_be_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(settings_for(tmp_path))
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.yaml", "summary.json"])
def test_a_file_of_the_user_is_not_replaced_by_a_run(name, tmp_path):
    (tmp_path / name).write_text("# my own\n")
    with pytest.raises(ValueError, match=f"contains a {name} that no run has written; move this file, or choose"):
        RunFolder.create(settings_for(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "# my own\n"


def test_a_run_may_start_in_the_folder_of_a_failed_start(tmp_path):
    failed = RunFolder.create(settings_for(tmp_path))
    failed.remove_new()  # keeps the folder, which existed before
    assert failed.config.exists()
    RunFolder.create(settings_for(tmp_path)).unlock()


def test_an_incomplete_last_line_is_skipped(tmp_path):
    run = RunFolder(tmp_path)
    assert run.lines(run.metrics) == []
    run.metrics.write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert run.lines(run.metrics) == [{"step": 0}, {"step": 1}]


def test_a_follower_gets_each_line_once_as_soon_as_it_is_complete(tmp_path):
    path = tmp_path / "lines.jsonl"
    follower = Follower(path)
    assert follower.new() == []
    text = "".join(json.dumps({"n": n, "says": "ä\u2028"}, ensure_ascii=False) + "\n" for n in range(50)).encode()
    found = []
    for end in range(0, len(text) + 7, 7):  # even in the middle of a character
        path.write_bytes(text[:end])
        found += follower.new()
    assert [record["n"] for record in found] == list(range(50))


def test_a_file_is_written_completely_or_not_at_all(tmp_path):
    run = RunFolder(tmp_path)
    run.write_json(run.profile, {"F": 1.0})
    with pytest.raises(TypeError):
        run.write_json(run.profile, {"F": object()})
    assert json.loads(run.profile.read_text()) == {"F": 1.0}
    assert list(tmp_path.iterdir()) == [run.profile]
