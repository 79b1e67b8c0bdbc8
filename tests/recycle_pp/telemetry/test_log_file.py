"""Writing to a log never blocks, and the log reports its missing lines."""

import os
import threading
import time

import pytest

from recycle_pp.telemetry import log_file
from recycle_pp.telemetry.log_file import LogFile


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """(path, gate): the log's disk blocks until the gate is set."""
    gate, write = threading.Event(), os.write

    def slowly(descriptor, data):
        gate.wait(30)
        return write(descriptor, data)

    monkeypatch.setattr(log_file.os, "write", slowly)
    yield tmp_path / "logs" / "worker-1.2.log", gate
    gate.set()


def test_a_blocked_disk_delays_no_writer_and_the_log_reports_the_missing_lines(slow, monkeypatch):
    monkeypatch.setattr(log_file, "CAPACITY", 1000)
    path, gate = slow
    log, begun = LogFile(path), time.monotonic()
    for number in range(1000):
        log.write(f"line {number:04}\n".encode())
    assert time.monotonic() - begun < 1.0 and not log.flush(0.1)
    gate.set()
    assert log.flush(10)
    log.write(b"the end\n")
    assert log.flush(10)
    *lines, missing, end = path.read_text().splitlines()
    assert end == "the end" and lines == [f"line {number:04}" for number in range(len(lines))] and 50 < len(lines) < 150
    assert missing == f"... {1000 - len(lines)} lines left out: the disk rejected them"


def test_a_log_continues_once_its_folder_can_be_created(tmp_path):
    (tmp_path / "logs").write_text("in the way")
    log = LogFile(tmp_path / "logs" / "worker-0.0.log")
    log.write(b"one\ntwo\n")
    assert log.flush(10)
    (tmp_path / "logs").unlink()
    log.write(b"three\n")
    log.close()
    assert log.flush(10)
    assert log.path.read_text() == "... 2 lines left out: the disk rejected them\nthree\n"
