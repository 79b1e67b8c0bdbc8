"""Tokens in a file: reading them, detecting a changed file, measuring a disk's silence."""

import os
import threading
import time

import numpy as np
import pytest

from recycle_pp.config.mistakes import UserMistake
from recycle_pp.data import file_tokens
from recycle_pp.data.file_tokens import FileTokens, Read, probe, slowest_read

U2 = np.dtype("<u2")


@pytest.fixture
def path(tmp_path):
    np.arange(5000, dtype=U2).tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


def test_slices_equal_those_of_an_array(path):
    tokens = FileTokens.open(path, U2, 5000)
    assert len(tokens) == 5000 and tokens[7:12].tolist() == [*range(7, 12)]
    part = tokens.part(100, 200)
    assert len(part) == 100 and part[90:150].tolist() == [*range(190, 200)] and part.fingerprint == tokens.fingerprint


def test_a_truncated_file_is_reported_in_one_sentence(path):
    tokens = FileTokens.open(path, U2, 5000)
    os.truncate(path, 5000)
    with pytest.raises(UserMistake, match=rf"^{path} was truncated from 10000 to 5000 bytes while the job read it"):
        tokens[0:10]


def test_an_overwritten_file_is_rejected_and_a_touched_one_is_not(path):
    tokens = FileTokens.open(path, U2, 5000)
    os.utime(path)
    assert tokens[5:7].tolist() == [5, 6]
    with path.open("r+b") as file:
        file.seek(9000)
        file.write(b"other")
    with pytest.raises(UserMistake, match="was overwritten while the job read it"):
        tokens[0:10]


def test_after_a_rename_over_it_the_opened_file_is_still_read(path):
    tokens = FileTokens.open(path, U2, 5000)
    np.zeros(5000, U2).tofile(path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    assert tokens[5:7].tolist() == [5, 6]


@pytest.mark.parametrize("read", [lambda tokens: tokens[0:10], lambda tokens: probe()])
def test_another_thread_can_see_a_blocked_read(read, path, monkeypatch):
    tokens = FileTokens.open(path, U2, 5000)
    answers, pread = threading.Event(), os.pread

    def slow(*arguments):
        answers.wait(10)
        return pread(*arguments)

    assert slowest_read() == Read(str(path), 0.0)
    monkeypatch.setattr(file_tokens.os, "pread", slow)
    reader = threading.Thread(target=read, args=(tokens,))
    reader.start()
    time.sleep(0.1)
    assert 0.05 < slowest_read().seconds < 5
    answers.set()
    reader.join()
    assert slowest_read() == Read(str(path), 0.0)
