"""Starts whole jobs within a second, for tests and benchmarks, by forking a process that has imported torch.

    with Zygote() as zygote:                                     # imports torch once
        with zygote.run(["parallel=2x2", "+fail_at=3:0.1"]) as job:
            assert job.wait(60) == 0, job.output
            job.run.lines(job.run.events)
        with zygote.run_nodes(["parallel=2x2"], nodes=4) as job:  # one launcher per node
            os.kill(job.supervisors()[0], signal.SIGKILL)

A job has the same processes and files as under torchrun (supervisors, workers, the coordinator, the private file). Only
torchrun itself is replaced by a small launcher. The run folder is a new temporary folder unless the overrides set
run.dir. When the `with` block ends, or the process that made the Zygote dies, all processes end and the temporary
folders are removed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from recycle_pp.config.compose import compose
from recycle_pp.linux.descriptors import readable
from recycle_pp.linux.processes import children_of
from recycle_pp.telemetry.follower import Follower
from recycle_pp.telemetry.run_folder import RunFolder

from .ports import free_ports
from .zygote import TERM_SECONDS, Part


class Closing(ABC):
    """A context manager that closes itself at the end of the block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None: ...


class LocalJob(Closing):
    """A running job. run: its run folder; output: the output of its supervisors so far."""

    def __init__(self, run: RunFolder, folder: Path, pid: int, status: int):
        self.run, self.pid = run, pid
        self._folder, self._status = folder, status
        self._code: int | None = None
        self._pidfd = os.pidfd_open(pid)

    @property
    def output(self) -> str:
        return (self._folder / "output").read_text()

    def wait(self, seconds: float) -> int:
        """Waits for the end of the job. Returns the exit code of the rank that failed first, or 0 if none failed.

        Raises TimeoutError with the output if the job still runs after `seconds`."""
        if self._code is None:
            if not readable(self._status, seconds):
                raise TimeoutError(f"the job still runs after {seconds} s; it printed:\n{self.output}")
            self._code = int(os.read(self._status, 16) or b"-1")
        return self._code

    def wait_for_event(self, event: str, seconds: float) -> dict[str, Any]:
        """Waits for the first event with this name in events.jsonl. Raises TimeoutError with the output if the job ends
        or `seconds` pass before the event."""
        deadline, events = time.monotonic() + seconds, Follower(self.run.events)
        while True:
            over = readable(self._status, 0.02) or time.monotonic() > deadline
            for record in events.new():
                if record["event"] == event:
                    return record
            if over:
                raise TimeoutError(
                    f"no event {event} within {seconds} s or before the job ended; it printed:\n{self.output}"
                )

    def supervisors(self) -> list[int]:
        """Process ids of the supervisors. The index is the rank as long as no supervisor has ended."""
        return children_of(self.pid)

    def workers(self) -> dict[int, int]:
        """rank -> process id of the rank's worker, without ranks that have no worker."""
        children = {rank: children_of(pid) for rank, pid in enumerate(self.supervisors())}
        return {rank: pids[0] for rank, pids in children.items() if pids}

    def signal(self, number: int) -> None:
        """Sends a signal to the launcher, which forwards it to all supervisors, like torchrun after Ctrl-C."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        """Ends all processes and removes the temporary folder."""
        self.signal(signal.SIGTERM)
        with suppress(TimeoutError):
            self.wait(2 * TERM_SECONDS)
        self.signal(signal.SIGKILL)  # the supervisors die with the launcher, and the workers with their supervisors
        readable(self._pidfd, 5.0)
        os.close(self._status)
        os.close(self._pidfd)
        shutil.rmtree(self._folder, ignore_errors=True)


class LocalNodes(Closing):
    """A job with several launchers, as on several nodes. It has the interface of a LocalJob."""

    def __init__(self, nodes: list[LocalJob]):
        self.run, self.nodes = nodes[0].run, nodes

    @property
    def output(self) -> str:
        return "".join(node.output for node in self.nodes)

    def wait(self, seconds: float) -> int:
        """Waits for the end of the job. Returns the exit code of the first failed node in `nodes`, 0 if none failed.

        Ignores nodes that were killed by SIGKILL, because tests kill nodes, unless all nodes were killed. Raises
        TimeoutError after `seconds`."""
        deadline = time.monotonic() + seconds
        try:
            codes = [node.wait(max(0.0, deadline - time.monotonic())) for node in self.nodes]
        except TimeoutError as error:
            raise TimeoutError(f"the job still runs after {seconds} s; it printed:\n{self.output}") from error
        survived = [code for code in codes if code != 128 + signal.SIGKILL]
        return next((code for code in survived if code), 0) if survived else codes[0]

    def wait_for_event(self, event: str, seconds: float) -> dict[str, Any]:
        return self.nodes[0].wait_for_event(event, seconds)

    def supervisors(self) -> list[int]:
        return [pid for node in self.nodes for pid in node.supervisors()]

    def workers(self) -> dict[int, int]:
        """rank -> process id of the rank's worker. Correct only if each node has one rank."""
        return {rank: pid for rank, node in enumerate(self.nodes) for pid in node.workers().values()}

    def signal(self, number: int) -> None:
        for node in self.nodes:
            node.signal(number)

    def close(self) -> None:
        self.signal(signal.SIGTERM)
        for node in self.nodes:
            node.close()


class Zygote(Closing):
    """A process that has imported all modules of a job, and forks jobs.

    preload: a Python file that runs in this process before any job, for tests that change the behaviour of jobs
    """

    def __init__(self, preload: str | Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="recycle-jobs-"))
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Limits every library to one thread, because fork copies only the calling thread.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            arguments = [str(theirs.fileno()), str(self._folder), str(preload or "")]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "recycle_pp.testing.zygote", *arguments],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **threads},
            )

    def run(
        self, overrides: Sequence[str], environment: Mapping[str, str] | None = None, part: Part | None = None
    ) -> LocalJob:
        """Starts a job with parallel.pipelines * parallel.stages workers. Raises ValueError for invalid overrides.

        environment  further variables for the job's processes
        part         the ranks to start; None: all
        """
        settings = compose(list(overrides))
        world = settings.parallel.pipelines * settings.parallel.stages
        arguments, folder = list(overrides), settings.run.dir
        if not any(text.lstrip("+").startswith("run.dir=") for text in arguments):
            folder = f"{tempfile.mkdtemp(dir=self._folder)}/run"
            arguments.append(f"run.dir={folder}")
        return self.start(arguments, RunFolder(folder), part or Part(0, world, world), environment)

    def start(
        self, arguments: Sequence[str], run: RunFolder, part: Part, environment: Mapping[str, str] | None = None
    ) -> LocalJob:
        """Starts the ranks of `part` with any command line. run: the job's run folder, which need not exist yet."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        request = {"arguments": list(arguments), "part": asdict(part), "environment": dict(environment or {})}
        status, status_end = os.pipe()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [output, status_end])
            pid = int(self._socket.recv(16))
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the zygote has ended with code {self._process.wait(5.0)}") from error
        finally:
            os.close(output)
            os.close(status_end)
        return LocalJob(run, folder, pid, status)

    def run_nodes(
        self, overrides: Sequence[str], nodes: int, environment: Mapping[str, str] | None = None
    ) -> LocalNodes:
        """Like `run`, with `nodes` launchers. Each launcher has the same number of ranks. They communicate over this
        machine's loopback interface."""
        settings = compose(list(overrides))
        world = settings.parallel.pipelines * settings.parallel.stages
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        address = f"control.address=127.0.0.1:{free_ports()}"
        arguments = [f"run.dir={folder / 'run'}", *overrides, address, "control.interface=127.0.0.1"]
        variables = {"RECYCLE_TOKEN": secrets.token_hex(16), **(environment or {})}
        count = world // nodes
        parts = [Part(first, count, world) for first in range(0, world, count)]
        return LocalNodes([self.run(arguments, variables, part) for part in parts])

    def close(self) -> None:
        """Ends the zygote and all running jobs."""
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._process.kill()  # ends the process if it is still importing modules
        self._process.wait(5.0)
        shutil.rmtree(self._folder, ignore_errors=True)
