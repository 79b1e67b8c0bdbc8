"""Records a trace of torch's profiler over some steps of this worker (`python -m recycle_pp.ctl RUN profile 1.2`).

    profiling = Profiling(run_dir, worker, device, send)
    profiling.asked(message)                           # any thread; recording begins after the next commit
    executor.on_commit.append(profiling.committed)     # the main thread
    profiling.close()                                  # the main thread

The file `profiles/step-000020-1.2.json` in the run folder contains the steps from step 20 on. chrome://tracing and
Perfetto can open it. Ops have the names `recycle/F`, `recycle/I`, ... A thread writes the file, so the job does
not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
from recycle_schedules import Worker
from torch.autograd.profiler import profile

from recycle_pp.numerics.gradients import Reduced
from recycle_pp.wire.messages.lifecycle import Profile, Profiled
from recycle_pp.wire.messages.steps import Commit


class Profiling:
    def __init__(self, run_dir: str, worker: Worker, device: torch.device, send: Callable[[Profiled], None]) -> None:
        self._folder = Path(run_dir) / "profiles"
        self._worker = worker
        self._send = send
        self._device = None if device.type == "cpu" else device.type
        self._wanted = 0  # number of steps to record, if a recording is requested and has not begun; else 0
        self._profile: profile | None = None  # the current recording
        self._first = self._last = -1  # first and last step of the recording

    def asked(self, message: Profile) -> None:
        self._wanted = message.steps

    def committed(self, commit: Commit, reduced: Reduced) -> None:
        """Starts a requested recording, or ends the current one after its last step. Arguments: see `Executor`."""
        if self._profile is not None:
            if commit.step >= self._last or commit.last:
                self._end(commit.step)
        elif self._wanted:
            self._first, self._last = commit.step + 1, commit.step + self._wanted
            self._wanted = 0
            try:
                # Not torch.profiler.profile, because it would import torch._inductor here, which takes seconds.
                self._profile = profile(use_device=self._device, use_kineto=True)
                self._profile.__enter__()
            except RuntimeError as error:
                self._profile = None
                self._failed(error)

    def close(self) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)  # a process that ends during a recording would crash
            self._profile = None
            self._send(Profiled("", 0, "the worker has ended or taken over another role"))

    def _end(self, last: int) -> None:
        recorded, self._profile = self._profile, None
        assert recorded is not None
        recorded.__exit__(None, None, None)
        path = self._folder / f"step-{self._first:06d}-{self._worker}.json"
        steps = last - self._first + 1
        threading.Thread(target=self._write, args=(recorded, path, steps), name="profile", daemon=True).start()

    def _write(self, recorded: profile, path: Path, steps: int) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            recorded.export_chrome_trace(str(temporary))
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            self._failed(error)
        else:
            self._send(Profiled(str(path), steps))

    def _failed(self, error: Exception) -> None:
        self._send(Profiled("", 0, str(error) or type(error).__name__))
