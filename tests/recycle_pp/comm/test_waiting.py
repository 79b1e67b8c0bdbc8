"""Waits that other threads can end."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from recycle_pp.comm.waiting import Generation, LinkBroken, Pending, Pool


def stuck(release: threading.Event):
    """Behaves like Gloo while its peer is alive and silent."""
    assert release.wait(30)


def test_the_end_of_a_generation_ends_waits_even_if_the_operation_does_not_end():
    pool, generation, release = Pool(), Generation(3), threading.Event()
    job = pool.start(lambda: stuck(release))
    threading.Timer(0.05, generation.end).start()
    start = time.monotonic()
    with pytest.raises(LinkBroken, match="generation 3: aborted") as caught:
        generation.wait(job)
    assert time.monotonic() - start < 5 and caught.value.aborted
    release.set()


def test_a_wait_that_starts_after_the_end_does_not_block():
    pool, generation, release = Pool(), Generation(3), threading.Event()
    generation.end()
    with pytest.raises(LinkBroken):
        generation.wait(pool.start(lambda: stuck(release)))
    release.set()


def test_a_broken_connection_is_distinguished_from_an_abort():
    generation = Generation(3)

    def fails():
        raise RuntimeError("Connection closed by peer\nand much more")

    for attempt in (lambda: generation.wait(Pool().start(fails)), lambda: generation.attempt(fails)):
        with pytest.raises(LinkBroken, match=r"^generation 3: Connection closed by peer$") as caught:
            attempt()
        assert not caught.value.aborted


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.30.7"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=lambda error: str(error)[:30],
)
def test_a_failure_of_the_workers_gpu_is_never_a_broken_link(error):
    """A sticky error would return in each generation, and healthy peers would look unreachable."""

    def fails():
        raise error

    generation = Generation(3)
    for attempt in (lambda: generation.wait(Pool().start(fails)), lambda: generation.attempt(fails)):
        with pytest.raises(type(error)) as caught:
            attempt()
        assert caught.value is error


def test_other_errors_are_raised_unchanged():
    def mistaken():
        raise TypeError("no tensor")

    with pytest.raises(TypeError, match="no tensor"):
        Generation(3).wait(Pool().start(mistaken))


def test_jobs_never_wait_for_each_other_and_idle_threads_are_reused():
    pool, release = Pool(), threading.Event()
    blocked = [pool.start(lambda: stuck(release)) for _ in range(8)]
    quick = pool.start(lambda: None)
    quick.wait()
    assert quick.error is None
    release.set()
    for job in blocked:
        job.wait()
    for _ in range(50):
        pool.start(lambda: None).wait()
    assert pool.threads <= Pool.KEPT + 1


def test_a_job_can_be_waited_for_twice():
    finished = []
    pending = Pending(lambda: finished.append(1))
    pending.wait()
    pending.wait()
    assert finished == [1]


def test_many_threads_can_wait_for_a_finished_job():
    job = Pool().start(lambda: None)
    threads = [threading.Thread(target=job.wait) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
