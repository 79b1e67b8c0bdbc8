"""A model whose state is three times the memory limit of each worker (a control group)."""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import stage_memory
from recycle_pp.testing.local_cluster import Zygote

from .harness import fails, rejoins

CONTROLLER = Path("/sys/fs/cgroup/memory")
WORKERS = 12
JOB = [
    "model.layers=9", "model.width=512", "model.heads=8", "model.kv_heads=8", "model.ffn=2048", "model.sequence=16",
    "model.split=null", "parallel.stages=1", "parallel.microbatch_size=1", "numerics=bf16",
    "numerics.reproducible=true", "numerics.sums=int32", "schedule.profile_steps=0", "run.steps=5", "run.device=cpu",
    "run.validate_every=0", "run.standby=off", "run.respawns=0", "control.suspicion=120", "checkpoint.minutes=0",
    "parallel.memory=1GB",  # so that malloc returns freed memory; limits no micro-batches, because they are tiny
]  # fmt: skip
ALONE = ["parallel.pipelines=1", f"parallel.microbatches={WORKERS}"]
SHARDED = [f"parallel.pipelines={WORKERS}", "parallel.microbatches=1", "parallel.sharded=true"]
DEATHS = fails("1:3.0@backward", "2:7.0@spread", "3:0.0@allreduce") + rejoins("2:3.0", "3:7.0")


def held(settings: Settings) -> float:
    """Peak size of a worker's state in bytes: weights, optimizer state, sums, copies for a checkpoint."""
    parts = stage_memory(settings, 0).peak(settings.parallel.pipelines, 1, in_flight=1)
    return sum(size for name, size in parts.items() if name not in ("activations", "replay log"))


LIMIT = held(compose([*JOB, *ALONE])) / 3


@pytest.fixture(scope="module")
def zygote():
    with Zygote(preload=Path(__file__).with_name("confined.py")) as made:
        yield made


@pytest.fixture
def confined():
    """Environment of a job whose workers are limited to LIMIT bytes each."""
    try:
        above = Path(tempfile.mkdtemp(prefix="recycle-", dir=CONTROLLER))
    except OSError as error:
        pytest.skip(f"cannot create a memory control group (cgroup v1): {error}")
    yield {"CONFINED": str(int(LIMIT)), "CONFINED_IN": str(above)}
    for group in [*filter(Path.is_dir, above.iterdir()), above]:
        for _ in range(100):  # the processes in the group may still be ending
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def run(zygote: Zygote, environment: dict[str, str], *words: str):
    """Runs a job. Returns (exit code, digest of the final weights, deaths)."""
    with zygote.run([*JOB, *words], environment) as job:
        code = job.wait(280)
        deaths = [event for event in job.run.lines(job.run.events) if event["event"] == "death_detected"]
        summary = json.loads(job.run.summary.read_text()) if job.run.summary.exists() else {}
        assert code or summary["weights_sha256"], job.output
        return code, summary.get("weights_sha256"), deaths


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sharded_state_of_three_times_a_workers_memory_has_the_same_bits_after_deaths(zygote, confined):
    code, _, deaths = run(zygote, confined, *ALONE)
    assert code and [death["detail"] for death in deaths] == ["SIGKILL"], (
        "with unsharded state the kernel must kill the worker"
    )

    _, whole, _ = run(zygote, {}, *ALONE)
    code, found, deaths = run(zygote, confined, *SHARDED, *DEATHS)
    assert (code, {death["worker"] for death in deaths}) == (0, {"3.0", "7.0", "0.0"}), deaths
    assert len(deaths) == 3, deaths
    assert found == whole
