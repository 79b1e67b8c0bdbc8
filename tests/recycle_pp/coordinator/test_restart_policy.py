"""Which dead workers are restarted."""

from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.coordinator.ranks import Rank
from recycle_pp.coordinator.restart_policy import RestartPolicy
from recycle_pp.wire.messages.supervisors import Death

GPU = Death("gpu", "CUDA error: unspecified launch failure")


def rank(number):
    return Rank(number, lambda: {number: Worker(number, 0)}, supervisor=object())


def test_a_worker_whose_gpu_failed_is_restarted_once():
    restarts, first, other = RestartPolicy(Settings()), rank(0), rank(1)
    assert restarts.is_respawned(first, GPU)
    assert not restarts.is_respawned(first, GPU) and restarts.is_given_up(first, GPU)
    assert restarts.is_respawned(other, GPU), "another GPU"


def test_after_other_causes_workers_are_restarted_run_respawns_times():
    restarts, worker = RestartPolicy(Settings()), rank(0)
    for worker.respawns in range(Settings().run.respawns):
        assert restarts.is_respawned(worker, Death("exception", "no"))
    worker.respawns += 1
    assert not restarts.is_respawned(worker, Death("exception", "no"))
