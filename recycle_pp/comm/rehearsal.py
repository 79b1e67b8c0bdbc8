"""Real processes to try communication with: forked workers, a coordinator's voice, SIGKILL.

    def scenario(node: Node) -> None:                 # runs in every worker
        node.links.rebuild(0, node.members, node.me)
        node.report("built")

    with Rehearsal(members, scenario) as play:
        play.reports(len(members))                    # [(worker, "built"), ...]
        play.kill(members[3])
        play.tell("abort")                            # what the coordinator would announce: aborts every node's links

Tests and bench scripts only. Workers are forked from a server process that has imported torch once and has no threads.
`scenario` is found again in the worker by its file and name, so it is a plain function of a module.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

CONTEXT = multiprocessing.get_context("forkserver")


class Place(NamedTuple):
    """Stands for a worker: what Links wants to know of one."""

    pipeline: int
    stage: int


def grid(pipelines: int, stages: int) -> list[Place]:
    return [Place(d, s) for d in range(pipelines) for s in range(stages)]


class Rehearsal:
    """Starts one process per member. Every process it started is gone when the `with` block ends."""

    def __init__(self, members: Sequence[Any], scenario: Callable[[Node], None]):
        CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "recycle_pp.comm.links", "pytest"])
        self.members = list(members)
        self._pipes: dict[Any, Connection] = {}
        self._processes = {}
        self._reports: queue.Queue[tuple[Any, Any]] = queue.Queue()
        source = (sys.modules[scenario.__module__].__file__, scenario.__name__)
        for me in self.members:
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_work, args=(source, theirs, self.members, me), daemon=True)
            process.start()
            theirs.close()
            self._pipes[me], self._processes[me] = ours, process
        self._mail = threading.Thread(target=self._carry, daemon=True)
        self._mail.start()

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._mail.join()

    def tell(self, *message: Any, to: Sequence[Any] | None = None) -> None:
        """Puts a message into the inbox of each node; "abort" also aborts its links."""
        for member in self.members if to is None else to:
            with contextlib.suppress(OSError):
                self._pipes[member].send(message)

    def reports(self, count: int, timeout: float = 60.0) -> list[tuple[Any, Any]]:
        """The next `count` reports. AssertionError when they do not come in time, or when a scenario raises."""
        got: list[tuple[Any, Any]] = []
        for _ in range(count):
            try:
                got.append(self._reports.get(timeout=timeout))
            except queue.Empty:
                raise AssertionError(f"{count} reports expected, came: {got}") from None
            assert not isinstance(got[-1][1], Failure), got[-1]
        return got

    def kill(self, member: Any) -> None:
        """SIGKILL, and waits until the process is gone."""
        self._processes[member].kill()
        self._processes[member].join()

    def exit_code(self, member: Any, timeout: float = 30.0) -> int | None:
        self._processes[member].join(timeout)
        return self._processes[member].exitcode

    def _carry(self) -> None:
        """The coordinator's part: what one node sets goes to all others."""
        open_pipes = {pipe: me for me, pipe in self._pipes.items()}
        while open_pipes:
            for pipe in wait(list(open_pipes)):
                try:
                    kind, *rest = pipe.recv()  # type: ignore[union-attr, call-arg]
                except (EOFError, OSError):
                    del open_pipes[pipe]  # type: ignore[arg-type]
                    continue
                if kind == "set":
                    for other in open_pipes:
                        if other is not pipe:
                            with contextlib.suppress(OSError):
                                other.send((kind, *rest))
                else:
                    self._reports.put((open_pipes[pipe], rest[0]))  # type: ignore[index]


class Failure(NamedTuple):
    """What a node reports when its scenario raises."""

    traceback: str


class Node:
    """A worker's side: its links, an inbox for the messages told to it, and `report`."""

    def __init__(self, pipe: Connection, members: list[Any], me: Any):
        import torch

        from recycle_pp.comm.links import Links
        from recycle_pp.comm.store import ControlStore

        self.members, self.me = members, me
        self.inbox: queue.Queue[tuple] = queue.Queue()
        self.store = ControlStore(lambda key, value: self._send("set", key, value))
        self.links = Links(self.store, "gloo", torch.device("cpu"), workers=members)
        self._pipe, self._lock = pipe, threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self, value: Any) -> None:
        self._send("report", value)

    def hear(self) -> tuple:
        """The next message told to this node."""
        return self.inbox.get()

    def _send(self, *message: Any) -> None:
        with self._lock:
            self._pipe.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message = self._pipe.recv()
                if message[0] == "set":
                    self.store.deliver(*message[1:])
                    continue
                if message[0] == "abort":
                    self.links.abort()
                self.inbox.put(message)
        except (EOFError, OSError):
            os._exit(1)  # the rehearsal is over


def _work(source: tuple[str, str], pipe: Connection, members: list[Any], me: Any) -> None:
    import traceback

    node = Node(pipe, members, me)
    spec = importlib.util.spec_from_file_location("scenario", source[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        getattr(module, source[1])(node)
    except BaseException:
        node.report(Failure(traceback.format_exc()))
        raise
    finally:
        node.links.close()
