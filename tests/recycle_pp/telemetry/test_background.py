"""Calls run in order in a background thread, so no caller waits for a disk or a reader. Excess calls are dropped."""

import asyncio
import os
import select
import threading
import time

import pytest

from recycle_pp.telemetry.background import Background, BackgroundStream, in_thread


def test_calls_run_in_order_and_are_done_after_a_flush():
    background, seen = Background("test"), []
    for number in range(1000):
        background(seen.append, number)
    assert background.flush(10) and seen == [*range(1000)]


def test_calls_are_dropped_without_blocking_if_the_queue_is_full():
    background, runs, gate, seen = Background("test", capacity=10), threading.Event(), threading.Event(), []
    background(lambda: (runs.set(), gate.wait()))
    assert runs.wait(10)
    begun = time.monotonic()
    for number in range(100):
        background(seen.append, number)
    assert not background.flush(0.05) and time.monotonic() - begun < 1.0
    gate.set()
    assert background.flush(10)
    assert seen == [*range(10)] and background.dropped == 90


def test_calls_after_a_failed_one_still_run():
    background, seen = Background("test"), []
    background(seen.pop)
    background(seen.append, 1)
    assert background.flush(10) and seen == [1]


def test_an_unread_pipe_does_not_block_the_writer_and_reports_the_missing_lines_later():
    reads, writes = os.pipe()
    with os.fdopen(reads, "rb") as pipe, os.fdopen(writes, "w") as stream:
        screen, line = BackgroundStream(stream), "x" * 99 + "\n"
        screen._background._waiting.maxsize = 1000
        begun = time.monotonic()
        for _ in range(2000):  # 200 kB; a pipe holds 64 kB
            screen.write(line)
        assert time.monotonic() - begun < 1.0
        assert not asyncio.run(screen.flushed(0.1))
        read = b""
        while not screen._background.idle:
            ready, _, _ = select.select([pipe], [], [], 0.01)  # because os.read would block if no further line comes
            read += os.read(pipe.fileno(), 1 << 16) if ready else b""
        screen.write("the end\n")
        assert asyncio.run(screen.flushed(10))
        read += os.read(pipe.fileno(), 1 << 16)
    *lines, missing, end = read.decode().splitlines()
    dropped = f"... {2000 - len(lines)} lines were dropped, because this output was not read"
    assert end == "the end" and missing == dropped


def test_writing_raises_once_the_reader_has_closed_the_pipe():
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as stream:
        screen = BackgroundStream(stream)
        screen.write("lost\n")
        assert asyncio.run(screen.flushed(10))
        with pytest.raises(BrokenPipeError):
            screen.write("lost, too\n")


def test_the_event_loop_runs_while_a_thread_reads():
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
