"""A recovery ends when all live workers have resumed in the generation that follows the newest death."""

from types import SimpleNamespace

from recycle_schedules import Worker

from recycle_pp.telemetry.recovery import Recovery

A, B, C = (Worker(pipeline, 0) for pipeline in range(3))
JOB = SimpleNamespace(live={0, 1}, assignment={0: A, 1: B, 2: C})


def times(at):
    return dict.fromkeys(("unblocked", "grouped", "followed", "resumed"), at)


def test_workers_that_resumed_before_the_newest_death_do_not_end_its_recovery():
    """After the loss of a stage, no generation follows until all workers have restarted."""
    recovery = Recovery(step=3)
    recovery.death(C, 10.0)
    for worker in (A, B):
        recovery.resumed(worker, 8, times(9.5))
    assert not recovery.complete(JOB)
    recovery.announced(9, 10.1)
    recovery.resumed(A, 9, times(10.2))
    recovery.resumed(B, 8, times(9.6))  # a late message
    assert not recovery.complete(JOB)
    recovery.resumed(B, 9, times(10.3))
    assert recovery.complete(JOB) and recovery.stall == 10.3 - 10.0


def test_a_second_death_restarts_the_wait_for_all_workers():
    recovery = Recovery(step=3)
    recovery.death(C, 10.0)
    recovery.announced(9, 10.1)
    recovery.resumed(A, 9, times(10.2))
    recovery.death(B, 10.25)
    recovery.resumed(B, 9, times(10.2))
    assert not recovery.complete(JOB)
