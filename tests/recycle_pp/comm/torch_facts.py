"""Helpers for tests of torch's internals: a fact that a test checks, and Gloo groups within this process.

@fact("shutting down Gloo's listening socket ends the process")
def test_a_listener_must_not_be_shut_down(): ...
"""

import functools
import os
import stat
import threading
import time

import torch
import torch.distributed as dist

from recycle_pp.comm.torch_internals import (
    address_key,
    gloo_backend,
    listening_address,
    start_connections,
)


def fact(sentence: str):
    """Decorates a test so that any failure starts with the sentence that no longer holds."""

    def wrap(test):
        @functools.wraps(test)
        def run(*arguments, **named):
            try:
                test(*arguments, **named)
            except Exception as error:
                raise AssertionError(f"no longer true in torch {torch.__version__}: {sentence}") from error

        return run

    return wrap


class Member:
    """One rank of a Gloo group; this process has several."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.store, self.rank, self.size = store, rank, size
        self.backend = gloo_backend(store, rank, size, "127.0.0.1", 60.0)
        self.address = listening_address(store.get(address_key(rank)))

    def peers(self) -> set:
        return {listening_address(self.store.get(address_key(k))) for k in range(self.size)} - {self.address}

    def connect(self) -> None:
        self.kept = start_connections(self.backend)

    def blocks_in_a_receive(self, tag: int = 5) -> list:
        work = self.backend.recv([torch.empty(4)], 1 - self.rank, tag)
        result = outcome_of(work.wait)
        time.sleep(0.1)
        assert not result
        return result


def pair() -> list[Member]:
    store = dist.HashStore()
    return [Member(store, rank, 2) for rank in range(2)]


def connected_pair() -> list[Member]:
    """Two members that have exchanged a first message."""
    members = pair()
    for member in members:
        member.connect()
    everybody_sums(members)
    return members


def everybody_sums(members) -> None:
    for work in [member.backend.allreduce([torch.ones(1)]) for member in members]:
        work.wait()


def sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


def outcome_of(function) -> list:
    """Runs a function in a thread; a list that then receives its error or None, and the time."""
    result: list = []

    def run() -> None:
        try:
            function()
            result.append((None, time.monotonic()))
        except RuntimeError as error:
            result.append((error, time.monotonic()))

    threading.Thread(target=run, daemon=True).start()
    return result


def wait_for(result: list, seconds: float = 5.0) -> tuple:
    deadline = time.monotonic() + seconds
    while not result and time.monotonic() < deadline:
        time.sleep(0.001)
    assert result, "still blocked"
    return result[0]
