"""Islands, each a whole job, that exchange their rounds in a folder or in S3."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from recycle_pp import export
from recycle_pp.islands.__main__ import state
from recycle_pp.storage.store import Store
from recycle_pp.testing.s3_server import S3Server

# A round every 5 steps, with half of the layers each. islands.max_local=5 makes every round apply at the same step,
# however busy the machine is.
COMMON = [
    "model=tiny", "parallel=2x2", "run.steps=17", "run.validate_every=0", "schedule.profile_steps=0", "run.standby=off",
    "numerics=reproducible", "run.sample_log=true", "control.suspicion=60", "islands.steps=10", "islands.fragments=2",
    "islands.max_local=5", "islands.patience=1000", "islands.parts=2",
]  # fmt: skip
SHAPES = {"a": [], "b": ["parallel=1x1", "parallel.microbatches=8"]}  # both islands have 8 micro-batches per step
SECONDS = 240


def run(zygote, folder, key, faults=None, more=(), names="ab"):
    """Runs islands with these names to their end. Returns ({name: job}, state of the store).

    key     prefix of the run folders and of the store, unique for each run in `folder`
    faults  additional settings, by name of the island
    more    additional settings of all islands
    """
    store = meeting_place(folder, key, names)
    jobs = {name: zygote.run(words_of(folder, key, name, (faults or {}).get(name, []), more)) for name in names}
    try:
        for job in jobs.values():
            assert job.wait(SECONDS) == 0, job.output
    finally:
        for job in jobs.values():
            job.close()
    return jobs, state(store)


def meeting_place(folder, key, names="ab"):
    """A store that already lists the islands: they wait for each other from the first round on, and always get the same
    parts of the data."""
    store = Store(str(folder / f"store-{key}"))
    for number, name in enumerate(names):
        store.put(f"islands/{name}.json", b"{}")
        store.put(f"numbers/{number:03d}", name.encode())
    return store


def words_of(folder, key, name, faults=(), more=()):
    place = [f"run.dir={folder}/{key}-{name}", f"islands.store={folder}/store-{key}", f"islands.name={name}"]
    return [*COMMON, *SHAPES[name], *place, *more, *faults]


def weights(job):
    return json.loads(job.run.summary.read_text())["weights_sha256"]


def samples(job):
    return [sample for line in job.run.lines(job.run.path / "samples.jsonl") for sample in line["samples"]]


def check(jobs, found, rounds):
    """Checks that theta is equal on all islands after each round, and that no sample is read twice, by any island."""
    assert [each["round"] for each in found["rounds"]] == list(range(rounds))
    for each in found["rounds"]:
        assert each["theta_sha256"].keys() == jobs.keys() and len({*each["theta_sha256"].values()}) == 1, each
    read = [sample for job in jobs.values() for sample in samples(job)]
    assert len(read) == len({*read})


def test_one_island_that_keeps_its_weights_has_the_bits_of_a_plain_job(zygote, tmp_path):
    own = ["islands.mix=1", "islands.lr=1", "islands.momentum=0", "islands.bits=32", "islands.parts=1"]
    jobs, found = run(zygote, tmp_path, "one", more=own, names="a")
    check(jobs, found, rounds=3)
    plain = [word for word in COMMON if not word.startswith("islands.")]
    with zygote.run([*plain, f"run.dir={tmp_path}/plain"]) as job:
        assert job.wait(SECONDS) == 0, job.output
        assert weights(job) == weights(jobs["a"])


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    """Two islands without deaths: ({name: job}, state of the store)."""
    return run(zygote, tmp_path_factory.mktemp("islands"), "undisturbed")


def test_islands_have_equal_theta_after_every_round_and_read_no_sample_twice(undisturbed):
    check(*undisturbed, rounds=3)


def test_each_island_records_its_rounds_and_traffic_and_the_other_island(undisturbed):
    for name, job in undisturbed[0].items():
        events = job.run.lines(job.run.events)
        of = {kind: [line for line in events if line["event"] == kind] for kind in {line["event"] for line in events}}
        assert [line["island"] for line in of["island_joined"]] == ["b" if name == "a" else "a"]
        assert [line["round"] for line in of["round_closed"]] == [0, 1, 2]
        assert all(line["islands"] == ["a", "b"] and line["samples"] == 160 for line in of["round_closed"])
        assert [line["round"] for line in of["round_applied"]] == [0, 1, 2] and "island_late" not in of
        assert all(line["lag_steps"] == 1 and line["dollars"] is None for line in of["round_applied"])
        pipelines = 2 if name == "a" else 1  # each pipeline reads the deltas of both islands
        read = [line["received_bytes"] / line["sent_bytes"] for line in of["round_applied"]]
        assert all(abs(factor - 2 * pipelines) < 0.5 for factor in read)


def test_an_export_of_the_common_weights_is_the_same_from_every_island(undisturbed, tmp_path):
    theta, own = [], []
    for name, job in undisturbed[0].items():
        for files, words in ((theta, ["--theta"]), (own, [])):
            out = tmp_path / f"{name}{len(files)}{words}"
            assert export.main([str(job.run.path), str(out), *words]) == 0
            files.append((out / "model.safetensors").read_bytes())
    assert len({*theta}) == 1 and len({*theta, *own}) == 3


@pytest.mark.parametrize(
    "faults",
    [
        ["+fail_at=[6:1.0,12:0.1@allreduce]", "+rejoin_at=[8:1.0,14:0.1]"],
        ["+fail_at=[5:1.1@commit,10:0.0@optimizer]", "+rejoin_at=[6:1.1,11:0.0]"],
    ],
    ids=["between rounds", "in rounds"],
)
def test_an_island_with_deaths_has_the_bits_of_one_without(zygote, tmp_path, undisturbed, faults):
    jobs, found = run(zygote, tmp_path, "deaths", {"a": faults})
    check(jobs, found, rounds=3)
    expected, _ = undisturbed
    assert {name: weights(job) for name, job in jobs.items()} == {name: weights(job) for name, job in expected.items()}


def test_a_job_whose_name_another_job_uses_stops_with_one_sentence(zygote, tmp_path):
    store = meeting_place(tmp_path, "twice", "b")
    with zygote.run(words_of(tmp_path, "twice", "b", ["run.steps=1000000"])) as job:
        deadline = time.monotonic() + SECONDS
        while not job.run.events.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        store.put("islands/b.json", b'{"owner": "another job"}')
        assert job.wait(SECONDS) == 2, job.output
        assert f"islands.name=b is now used by another job in {store.url}; choose a different name" in job.output
    assert store.get("islands/b.json") == b'{"owner": "another job"}'


def test_sharded_islands_with_a_death_have_equal_theta(zygote, tmp_path):
    jobs, found = run(zygote, tmp_path, "sharded", more=["parallel.sharded=true"], faults={"a": ["+fail_at=8:0.1"]})
    check(jobs, found, rounds=3)


def test_an_island_that_is_killed_and_resumed_under_another_shape_has_the_same_bits(zygote, tmp_path, undisturbed):
    expected, _ = undisturbed
    meeting_place(tmp_path, "resumed")
    every = ["checkpoint.every=4"]
    with zygote.run(words_of(tmp_path, "resumed", "b")) as other:
        with zygote.run(words_of(tmp_path, "resumed", "a", more=every)) as job:
            job.wait_for_event("round_applied", SECONDS)
            deadline = time.monotonic() + SECONDS
            while len(job.run.lines(job.run.metrics)) < 11 and time.monotonic() < deadline:
                time.sleep(0.05)
            os.kill(job.pid, signal.SIGKILL)  # all processes of the job die with it
        resumed = [*words_of(tmp_path, "resumed", "a", more=every), "run.resume=true", "parallel=1x2"]
        with zygote.run([*resumed, "parallel.microbatches=8"]) as job:
            assert job.wait(SECONDS) == 0, job.output
            assert weights(job) == weights(expected["a"])
        assert other.wait(SECONDS) == 0, other.output
        assert weights(other) == weights(expected["b"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["islands.store=/tmp/nowhere"], "islands.store needs islands.name"),
        (["islands.name=a"], "islands.name=a needs islands.store"),
        (["islands.store=/tmp/x", "islands.name=a", "islands.bits=9"], "islands.bits must be 8 or 32, not 9"),
        (["islands.store=/tmp/x", "islands.name=a", "optimizer.stagger=true"], "optimizer.stagger must be false"),
        (["islands.store=/tmp/x", "islands.name=a", "islands.max_local=9"], "islands.max_local must be at least"),
        (["islands.store=/tmp/x", "islands.name=a", "islands.fragments=3"], "islands.fragments must divide"),
        (["islands.store=/tmp/x", "islands.name=a", "islands.fragments=50"], "must be at most model.layers"),
        (["islands.store=/tmp/x", "islands.name=a/b"], "islands.name must be"),
    ],
)
def test_a_mistake_in_the_settings_ends_the_job_with_one_sentence_and_exit_code_2(zygote, words, sentence):
    with zygote.run(["model=tiny", "parallel=1x1", *words]) as job:
        assert job.wait(SECONDS) == 2 and sentence in job.output


def test_an_island_that_loses_its_coordinator_has_the_same_bits(zygote, tmp_path, undisturbed):
    expected, _ = undisturbed
    store = meeting_place(tmp_path, "coordinator")
    with zygote.run(words_of(tmp_path, "coordinator", "b")) as other:
        with zygote.run_nodes(words_of(tmp_path, "coordinator", "a"), nodes=4) as job:
            job.wait_for_event("round_applied", SECONDS)
            os.kill(job.nodes[0].pid, signal.SIGKILL)  # all processes of the node die with it
            assert [node.wait(SECONDS) for node in job.nodes[1:]] == [0, 0, 0], job.output
            assert "coordinator_elected" in {line["event"] for line in job.run.lines(job.run.events)}
            assert weights(job) == weights(expected["a"]), job.output
        assert other.wait(SECONDS) == 0, other.output
        assert weights(other) == weights(expected["b"])
    found = state(store)
    assert [len({*each["theta_sha256"].values()}) for each in found["rounds"]] == [1, 1, 1]


def test_islands_of_different_shapes_meet_in_s3(zygote, tmp_path):
    with S3Server() as server:
        url = f"{server.url('islands')}/run"
        shapes = {"a": "parallel=2x2", "b": "parallel=1x4"}
        jobs = {}
        for name, shape in shapes.items():
            words = [*words_of(tmp_path, "s3", name), f"islands.store={url}", shape, "islands.patience=20"]
            jobs[name] = zygote.run([*words, "parallel.microbatches=4"], server.environment())
        try:
            for job in jobs.values():
                assert job.wait(SECONDS) == 0, job.output
        finally:
            for job in jobs.values():
                job.close()
        command = [sys.executable, "-m", "recycle_pp.islands", url, "--json"]
        done = subprocess.run(
            command, env=os.environ | server.environment(), capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout)
    assert len(found["rounds"]) >= 3
    assert {len({*each["theta_sha256"].values()}) for each in found["rounds"]} == {1}
    assert any(each["islands"] == ["a", "b"] for each in found["rounds"])
    assert not {*samples(jobs["a"])} & {*samples(jobs["b"])}
