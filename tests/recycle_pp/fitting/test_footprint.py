"""The messages about parameters and memory at the start of a job."""

from __future__ import annotations

from recycle_pp.fitting.footprint import footprint, needs_of

from ..in_process import small


def test_the_footprint_is_a_list_of_sentences(monkeypatch):
    monkeypatch.setattr("recycle_pp.fitting.footprint.host_memory", lambda: 1e6)
    settings = small(run__device="cpu")
    first, second, third = footprint(settings, workers_here=2)
    assert "parameters in 2 stages; each step: 8 samples, 128 tokens" in first
    assert second.startswith("a worker of stage 0, the fullest, needs about")
    assert all(name in second for name in needs_of(settings, "cpu")[0])
    assert third.startswith("the 2 workers of this machine, torch included, may need 62") and third.endswith(
        "it has 1 MB: that is not enough"
    )


def test_micro_batches_in_flight_take_memory():
    wide = {"model__sequence": 512, "parallel__microbatch_size": 8}
    most = [needs_of(small(**wide, schedule__memory_extra=extra), "cpu")[1]["activations"] for extra in (0, 2)]
    assert most[1] > 1.5 * most[0]
