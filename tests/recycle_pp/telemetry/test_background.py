"""Nobody waits for a disk or for who reads: what is called runs in order in another thread, and what is too much is
left out."""

import asyncio
import os
import threading
import time

import pytest

from recycle_pp.telemetry.background import Background, BackgroundStream, in_thread


def test_calls_run_in_their_order_and_are_all_done_after_a_flush():
    background, seen = Background("test"), []
    for number in range(1000):
        background(seen.append, number)
    assert background.flush(10) and seen == [*range(1000)]


def test_what_does_not_fit_into_the_queue_is_dropped_and_nobody_waits():
    background, runs, gate, seen = Background("test", most=10), threading.Event(), threading.Event(), []
    background(lambda: (runs.set(), gate.wait()))
    assert runs.wait(10)
    begun = time.monotonic()
    for number in range(100):
        background(seen.append, number)
    assert not background.flush(0.05) and time.monotonic() - begun < 1.0
    gate.set()
    assert background.flush(10)
    assert seen == [*range(10)] and background.dropped == 90


def test_a_call_that_fails_stops_none_that_follow():
    background, seen = Background("test"), []
    background(seen.pop)
    background(seen.append, 1)
    assert background.flush(10) and seen == [1]


def test_a_pipe_that_nobody_reads_delays_nobody_and_says_later_how_much_is_missing():
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as pipe, os.fdopen(writes, "w") as stream:
        screen, line = BackgroundStream(stream), "x" * 99 + "\n"
        screen._background._waiting.maxsize = 1000
        begun = time.monotonic()
        for _ in range(2000):  # 200 kB, and a pipe holds 64
            screen.write(line)
        assert time.monotonic() - begun < 1.0
        assert not asyncio.run(screen.flushed(0.1))
        read = b""
        while not screen._background.idle:
            read += os.read(pipe.fileno(), 1 << 16)
        screen.write("the end\n")
        assert asyncio.run(screen.flushed(10))
        read += os.read(pipe.fileno(), 1 << 16)
    *lines, missing, end = read.decode().splitlines()
    assert end == "the end" and missing == f"... {2000 - len(lines)} lines were not read"


def test_who_reads_no_more_is_told_by_an_error():
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as stream:
        screen = BackgroundStream(stream)
        screen.write("lost\n")
        assert asyncio.run(screen.flushed(10))
        with pytest.raises(BrokenPipeError):
            screen.write("lost, too\n")


def test_the_loop_goes_on_while_something_is_read_apart():
    async def both():
        ticks = 0
        reading = asyncio.create_task(in_thread(time.sleep, 0.2))
        while not reading.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks

    assert asyncio.run(both()) > 5
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divmod, 1, 0))
