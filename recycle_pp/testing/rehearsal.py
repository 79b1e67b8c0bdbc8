"""Runs communication scenarios in real processes: with forked workers, messages from a coordinator, and SIGKILL.

    def scenario(node: Node) -> None:                 # runs in every worker
        node.links.rebuild(0, node.members, node.me)
        node.report("built")

    with Rehearsal(members, scenario) as play:
        play.reports(len(members))                    # [(member, "built"), ...]
        play.kill(3)
        play.send("abort")                            # like a coordinator's message; aborts the links of all nodes

For tests and bench scripts. Workers are forked from a server process that has imported torch and has no other threads.
A worker imports `scenario` by file and name, so `scenario` has to be a function at the top level of a module.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import queue
import sys
import threading
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from recycle_pp.protocol.assignment import initial
from recycle_pp.wire.messages.members import Assignment, Member

MEETING = 1 << 24  # a tag that no scenario uses
CONTEXT = multiprocessing.get_context("forkserver")


grid = initial


class Rehearsal(contextlib.AbstractContextManager["Rehearsal"]):
    """Starts one process per member. The end of the `with` block ends all processes."""

    def __init__(self, members: Assignment, scenario: Callable[[Node], None]):
        CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "recycle_pp.comm.links", "pytest"])
        self.members = members
        self._source = (sys.modules[scenario.__module__].__file__, scenario.__name__)
        self._pipes: dict[Member, Connection] = {}
        self._processes: dict[Member, BaseProcess] = {}
        self._gone: list[BaseProcess] = []
        self._reports: queue.Queue[tuple[Member, Any]] = queue.Queue()
        self._over = threading.Event()
        for member in self.members:
            self.start(member)
        self._mail = threading.Thread(target=self._carry, daemon=True)
        self._mail.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._mail.join()
        for process in [*self._processes.values(), *self._gone]:
            process.kill()
            process.join()
        for pipe in self._pipes.values():
            pipe.close()

    def start(self, member: Member) -> None:
        """Starts or restarts the member's process."""
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_work, args=(self._source, theirs, self.members, member), daemon=True)
        process.start()
        theirs.close()
        if member in self._processes:
            self._gone.append(self._processes[member])
        self._pipes[member], self._processes[member] = ours, process

    def send(self, *message: Any, to: Collection[Member] | None = None) -> None:
        """Puts a message into the inbox of each receiver's node; "abort" also aborts the node's links.

        to: the receivers; None: all members"""
        for member in self.members if to is None else to:
            with contextlib.suppress(OSError):
                self._pipes[member].send(message)

    def reports(self, count: int, timeout: float = 60.0) -> list[tuple[Member, Any]]:
        """The next `count` reports, as (member, value). Raises AssertionError if a report takes longer than `timeout`
        seconds, or if a scenario raised an exception."""
        got: list[tuple[Member, Any]] = []
        for _ in range(count):
            try:
                got.append(self._reports.get(timeout=timeout))
            except queue.Empty:
                raise AssertionError(f"expected {count} reports, got {got}") from None
            assert not isinstance(got[-1][1], Failure), f"{got[-1][0]}: {got[-1][1].traceback}"
        return got

    def kill(self, member: Member) -> None:
        """Sends SIGKILL and waits until the process has ended."""
        self._processes[member].kill()
        self._processes[member].join()

    def wait_for_exit(self, member: Member, timeout: float = 30.0) -> int | None:
        """The exit code of the member's process; None if the process is still running after `timeout` seconds."""
        self._processes[member].join(timeout)
        return self._processes[member].exitcode

    def _carry(self) -> None:
        """Acts as the coordinator: forwards each value that a node sets in its store to all other nodes, and collects
        the reports."""
        closed: set[Connection] = set()
        while not self._over.is_set():
            pipes = {pipe: member for member, pipe in list(self._pipes.items()) if pipe not in closed}
            for pipe in wait(list(pipes), timeout=0.05):
                assert isinstance(pipe, Connection)
                try:
                    kind, *rest = pipe.recv()
                except (EOFError, OSError):
                    closed.add(pipe)
                    continue
                if kind == "set":
                    self.send(kind, *rest, to=[member for member in self.members if member != pipes[pipe]])
                else:
                    self._reports.put((pipes[pipe], rest[0]))


class Failure(NamedTuple):
    """A node's report that its scenario has raised an exception."""

    traceback: str


class Node:
    """The links, the inbox and the reports of the member `me`. worker: the worker W(d, s) that this member runs as."""

    def __init__(self, pipe: Connection, members: Assignment, me: Member):
        import torch

        from recycle_pp.comm.links import Links
        from recycle_pp.comm.store import ControlStore
        from recycle_pp.execution.transports import transport_for

        self.members, self.me, self.worker = members, me, members[me]
        self.inbox: queue.Queue[tuple] = queue.Queue()
        self.store = ControlStore(lambda key, value: self._send("set", key, value))
        self.links = Links(transport_for("tcp", self.store, torch.device("cpu"), size=len(members)))
        self._pipe, self._lock = pipe, threading.Lock()
        threading.Thread(target=self._listen, daemon=True).start()

    def report(self, value: Any) -> None:
        self._send("report", value)

    def meet(self) -> None:
        """A barrier of all members: each member sends a message to every other member."""
        import torch

        others = [member for member in self.members if member != self.me]
        byte, tag = torch.zeros(1, dtype=torch.uint8), MEETING
        messages = [self.links.receive(torch.empty_like(byte), member, tag) for member in others]
        messages += [self.links.send(byte, member, tag) for member in others]
        for message in messages:
            message.wait()

    def receive(self) -> tuple:
        """The next message to this node. Blocks."""
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
            os._exit(1)  # the parent has closed the pipe, so the rehearsal is over


def _work(source: tuple[str | None, str], pipe: Connection, members: Assignment, me: Member) -> None:
    import traceback

    node = Node(pipe, members, me)
    assert source[0] is not None
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
