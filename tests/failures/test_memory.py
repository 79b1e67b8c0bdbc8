"""Workers with limited memory, whose allocations really fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle_pp.config.compose import compose
from recycle_pp.config.sizes import format_size
from recycle_pp.model.memory import PROCESS, stage_memory
from recycle_pp.testing.local_cluster import Zygote

LONG = [
    "parallel=2x2", "parallel.microbatches=6", "parallel.microbatch_size=16", "model.sequence=512", "model.split=null",
    "schedule.memory_extra=4", "schedule.profile_steps=0", "numerics=reproducible", "run.steps=2", "run.device=cpu",
    "run.validate_every=0", "run.standby=off", "control.suspicion=60",
]  # fmt: skip
# bytes for the stacks of later threads and for malloc's reserves, which count toward the limit, too
OTHERS = 300_000_000
FIT = 3  # number of micro-batches in flight that fit


@pytest.fixture(scope="module")
def zygote():
    with Zygote(preload=Path(__file__).parent / "scarce.py") as made:
        yield made


def scarce() -> int:
    """The limit in bytes with which FIT micro-batches in flight fit in stage 0. The schedule alone would allow six."""
    memory = stage_memory(compose(LONG), 0)
    return int(OTHERS + FIT * memory.each() + memory.op + 6 * memory.boundary)


@pytest.fixture(scope="module")
def plenty(zygote):
    return outcome(zygote, {"SCARCE": str(1 << 40)})[0]


def outcome(zygote: Zygote, environment: dict[str, str], *words: str):
    """Runs a job. Returns (digest of the final weights, deaths)."""
    with zygote.run([*LONG, *words], environment) as job:
        assert job.wait(280) == 0, job.output
        deaths = [event for event in job.run.lines(job.run.events) if event["event"] == "death_detected"]
        return json.loads(job.run.summary.read_text())["weights_sha256"], deaths


@pytest.mark.slow
def test_a_worker_that_ran_out_of_memory_returns_with_fewer_micro_batches_in_flight(zygote, plenty):
    found, deaths = outcome(zygote, {"SCARCE": str(scarce()), "SCARCE_WORKERS": "1.0"})
    assert deaths and {(death["worker"], death["cause"]) for death in deaths} == {("1.0", "out_of_memory")}
    assert found == plenty


@pytest.mark.slow
def test_a_worker_short_of_memory_after_a_death_recomputes_and_no_bit_changes(zygote, plenty):
    memory = stage_memory(settings := compose(LONG), 0)
    held = sum(memory.always(settings.parallel.pipelines, 6).values()) + memory.whole_op
    capacity = format_size(PROCESS + held + 2 * memory.flight + memory.boundary).replace(" ", "")
    words = [f"parallel.memory={capacity}", "model.recompute=auto", "+fail_at=[0:1.0@forward]"]
    with zygote.run([*LONG, *words], {"SCARCE": str(1 << 40)}) as job:
        assert job.wait(280) == 0, job.output
        said = {who: "are recomputed in" in (job.run.logs / f"worker-{who}.log").read_text() for who in ("0.0", "0.1")}
        assert said == {"0.0": True, "0.1": False}, (
            "only 0.0, whose log has twice as many boundary tensors, must recompute"
        )
        assert json.loads(job.run.summary.read_text())["weights_sha256"] == plenty


@pytest.mark.slow
def test_no_worker_runs_out_of_memory_if_its_size_is_known(zygote, plenty):
    memory = stage_memory(settings := compose(LONG), 0)
    held = sum(memory.always(settings.parallel.pipelines, 6).values()) + memory.op
    capacity = format_size(PROCESS + held + (FIT + 0.5) * memory.each())
    found, deaths = outcome(
        zygote, {"SCARCE": str(scarce()), "SCARCE_WORKERS": "0.0 1.0"}, f"parallel.memory={capacity.replace(' ', '')}"
    )
    assert not deaths
    assert found == plenty
