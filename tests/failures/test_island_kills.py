"""A worker, the coordinator or a whole island is killed at each moment of a round.

Theta after each round, the samples in each round and the final weights are those of a run without deaths, bit for bit.
"""

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest

from recycle_pp.islands.__main__ import state
from recycle_pp.testing.local_cluster import Zygote

from .island_moments import MOMENTS
from .table import RESULTS
from .test_islands import SECONDS, check, meeting_place, run, samples, weights, words_of

ROUND = 1  # the round in which the kill occurs; one round comes before it and one after it
MORE = ["checkpoint.every=4"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def killers():
    with Zygote(preload=Path(__file__).with_name("island_moments.py")) as zygote:
        yield zygote


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    return run(zygote, tmp_path_factory.mktemp("islands"), "undisturbed", more=MORE)


class Kill:
    """Two islands, of which island a suffers a kill.

    words   settings of island a
    victim  the file with the id of the process to kill, see `island_moments`
    """

    def __init__(self, zygote, folder, moment):
        self.zygote, self.folder, self.victim = zygote, folder, folder / "victim"
        self.store = meeting_place(folder, "kill")
        self.words = words_of(folder, "kill", "a", more=MORE)
        orders = {"moment": moment, "round": ROUND, "once": str(folder / "killed"), "victim": str(self.victim)}
        self.orders = {"RECYCLE_ISLAND_KILL": json.dumps(orders)}
        passive = {"RECYCLE_ISLAND_KILL": '{"passive": true}'} if moment == "close" else {}
        self.other = zygote.run(words_of(folder, "kill", "b", more=MORE), passive)

    def worker(self):
        self.victim.touch()
        with self.zygote.run(self.words, self.orders) as job:
            assert job.wait(SECONDS) == 0, job.output
            assert json.loads(job.run.summary.read_text())["deaths"] == 1
            return job

    def sharded(self):
        """One of four workers of a single stage. Each unit has copies on two of them."""
        self.words += ["parallel=4x1", "parallel.microbatches=2", "parallel.sharded=true"]
        return self.worker()

    def coordinator(self):
        with self.zygote.run_nodes(self.words, nodes=4, environment=self.orders) as job:
            self._aim(job.nodes[0].pid)
            assert [node.wait(SECONDS) for node in job.nodes[1:]] == [0, 0, 0], job.output
            assert "coordinator_elected" in {line["event"] for line in job.run.lines(job.run.events)}
            return job

    def island(self):
        with self.zygote.run(self.words, self.orders) as job:
            self._aim(job.pid)
            assert job.wait(SECONDS) != 0, job.output
        with self.zygote.run([*self.words, "run.resume=true"]) as job:
            assert job.wait(SECONDS) == 0, job.output
            return job

    def _aim(self, pid):
        new = self.folder / "new"
        new.write_text(str(pid))
        os.rename(new, self.victim)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.other.close()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["worker", "sharded", "coordinator", "island"])
def test_a_kill_at_any_moment_of_a_round_changes_no_bit(killers, tmp_path, undisturbed, victim, moment):
    expected, rounds = undisturbed
    begun = time.monotonic()
    with Kill(killers, tmp_path, moment) as kill:
        job = getattr(kill, victim)()
        assert kill.other.wait(SECONDS) == 0, kill.other.output
        found, jobs = state(kill.store), {"a": job, "b": kill.other}
    assert (tmp_path / "killed").exists()
    check(jobs, found, rounds=3)
    assert found["rounds"] == rounds["rounds"], "islands, samples and thetas must be the same"
    assert {name: weights(each) for name, each in jobs.items()} == {name: weights(of) for name, of in expected.items()}
    assert {name: sorted(samples(of)) for name, of in jobs.items()} == {
        name: sorted(samples(of)) for name, of in expected.items()
    }
    times = sorted(line["time"] for line in job.run.lines(job.run.metrics))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    RESULTS[f"{victim}, {moment}"].append({"deaths": 1, "stalls": [max(gaps)], "seconds": time.monotonic() - begun})
