"""One worker process: connects to the coordinator, builds its stage, runs its orders.

    python -m recycle_pp.execution.worker       # started by a supervisor, reads its spec from standard input
    start()                                     # the same in a fork of a process that has imported torch

A failing worker sends the cause of its death (`last_words`) to its supervisor and ends. The job continues without it.
On SIGTERM (its machine will be reclaimed) the worker leaves after the commit of the current step, so no work is lost.
On SIGUSR1 the worker writes the stacks of all its threads to its log.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.fx.experimental.symbolic_shapes  # otherwise the first backward imports it while peers wait
from msgspec import structs

from recycle_pp.comm.device_errors import is_gpu_failure, is_out_of_memory
from recycle_pp.comm.links import Links
from recycle_pp.comm.store import ControlStore
from recycle_pp.config.mistakes import UserMistake
from recycle_pp.config.settings import Control, Settings
from recycle_pp.config.stored_inputs import stored_inputs
from recycle_pp.data.batches import Batches
from recycle_pp.data.file_tokens import probe_disks, slowest_read
from recycle_pp.fitting.understudy_policy import bytes_per_element
from recycle_pp.islands.admission import RESUME_SECONDS
from recycle_pp.islands.client import Client
from recycle_pp.linux.processes import boot_id, name_process
from recycle_pp.model.document_check import refuse_leaks
from recycle_pp.model.measured_memory import measured_memory
from recycle_pp.model.stage import Stage
from recycle_pp.numerics import fixed_point as reproducible
from recycle_pp.numerics.optimizer import StageOptimizer
from recycle_pp.protocol.hangs import read_limit
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.participant import Participant
from recycle_pp.state import checkpoint
from recycle_pp.state.follow import Following
from recycle_pp.state.stored import here
from recycle_pp.state.storing import Uploads
from recycle_pp.storage.local_copy import copy, is_copied
from recycle_pp.supervisor.lifeline import Lifeline
from recycle_pp.supervisor.vital_signs import Board
from recycle_pp.supervisor.worker_start import say_prepared
from recycle_pp.wire.messages.generations import Unreachable
from recycle_pp.wire.messages.lifecycle import (
    CannotRun,
    Exit,
    Leave,
    Leaving,
    Reading,
    Ready,
    StoreValue,
    WorkerHeartbeat,
    WorkerWelcome,
)
from recycle_pp.wire.worker_spec import Ahead, WorkerSpec, last_words

from .activity import Doing
from .carried_caches import Carrier
from .compile_caches import compiling
from .coordinator_client import CoordinatorClient
from .device import backend_for, choose, free_bytes, is_unfit, large_blocks_apart, notes, platform, settle_memory
from .emulate import EmulatedOptimizer, EmulatedStage
from .first_ops import FirstOpsReport
from .injection import Injector
from .player import Player, ThisProcess
from .session import Session
from .transports import transport_for
from .validation import held_out

_read_ahead: dict[str, Batches] = {}  # key from `_of_data` -> data that this process has read in standby


def start() -> int:
    """Waits in standby for the spec on standard input, then runs it (see `main`)."""
    name_process("recycle-standby")
    spec = WorkerSpec.read(_prepare)
    name_process("recycle-worker")
    return main(spec)


def main(spec: WorkerSpec) -> int:
    """Runs until the end of the job. Returns the exit code: 0 if the coordinator ended the job or this worker left
    it."""
    lifeline = Lifeline(spec.lifeline)
    lifeline.hold()
    threading.excepthook = lambda failed: _die(spec, failed)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # `_watch_for_eviction` receives the signal instead
    try:
        return Process(spec, Doing(Board(lifeline.memory))).run()
    except BaseException as error:
        where = getattr(error, "recycle_where", "")
        last_words(spec, cause=_cause(error), detail=traceback.format_exc(), where=where, mistake=_mistake(spec, error))
        raise


def _cause(error: BaseException | None) -> str:
    """The cause of a death by this exception, see `Death.cause`."""
    if is_out_of_memory(error):
        return "out_of_memory"
    return "gpu" if is_gpu_failure(error) else "exception"


def _mistake(spec: WorkerSpec, error: BaseException) -> str:
    """The mistake in user code that raised the exception, see `Death.mistake`; "" if there is none.

    Always "" for the project's own models and optimizers. With those, the dataset is the only user code. Its exceptions
    are raised as UserMistake, which stops the job before a worker dies."""
    kind, optimizer = spec.settings["model"]["kind"], spec.settings["optimizer"]["name"]
    if (kind not in ("custom", "hf") and optimizer != "custom") or _cause(error) != "exception":
        return ""
    from recycle_pp.data.user_code import from_user

    return from_user(error)


def _die(spec: WorkerSpec, failed: threading.ExceptHookArgs) -> None:
    """Ends the process after a failure in a thread. Otherwise the process would send heartbeats without working."""
    detail = "".join(traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback))
    print(detail, file=sys.stderr, flush=True)
    last_words(spec, cause=_cause(failed.exc_value), detail=detail)
    os._exit(1)


class Process:
    def __init__(self, spec: WorkerSpec, doing: Doing) -> None:
        self._doing = doing
        self._started = time.monotonic()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._spec = spec
        self._client = CoordinatorClient(spec)
        welcome = self._client.recv()
        assert isinstance(welcome, WorkerWelcome)  # always the first message of a coordinator
        self._welcome, self._settings, self._worker = welcome, welcome.settings, welcome.worker
        self._client.set_keepalive(self._settings.control.suspicion)
        self._received: Callable[[], int | None] = lambda: None  # see `Links.received`
        # `spec` contains the settings of this node, which may have another interface than the coordinator's.
        self._interface = spec.settings["control"]["interface"] or self._client.local_host

    def run(self) -> int:
        settings, welcome, worker = self._settings, self._welcome, self._worker
        self._beat()
        probe_disks(read_limit(settings.control.suspicion))
        if settings.numerics.reproducible:
            reproducible.prepare()
        if settings.parallel.memory is not None:
            large_blocks_apart()
        store = ControlStore(self._publish)
        try:
            device = choose(settings.run.device, self._spec.rank)
            backend = backend_for(settings.parallel.backend, device)
            if self._spec.incarnation:
                settle_memory(device)
        except ValueError as error:
            return self._refuse(error)
        pipelines, stages = settings.parallel.pipelines, settings.parallel.stages
        keepalive = settings.control.suspicion
        links = Links(
            transport_for(
                backend,
                store,
                device,
                self._interface,
                size=pipelines * stages,
                keepalive=keepalive,
                unreachable=lambda members: self._client.send(Unreachable(members)),
            )
        )
        self._received = links.received
        participant = Participant(self._spec.rank, worker)
        participant.committed = participant.applied = welcome.resume - 1
        session = Session(self._client, participant, links, store, self._doing)
        about = f"rank {self._spec.rank}: pid {os.getpid()} on {socket.gethostname()}, {device}, {backend}"
        session.log.write(f"{'restarted' if self._spec.incarnation else 'started'} for {about}")
        session.start()  # before long calls, because the coordinator may be lost during them

        carrier = Carrier(settings.run.compile_cache, session.log.write)
        if settings.run.compile_cache:
            self._doing.starts("kernels")
            carrier.read()
        first = FirstOpsReport(backend, device, session.send)
        try:
            self._copy_inputs(settings)
            self._doing.starts("model")
            stage, optimizer = _stage(
                settings, worker.stage, device, welcome.run_dir, self._doing, first.kernels, not welcome.joins
            )
            carrier.write()
            self._doing.starts("data")
            batches = _read_ahead.pop(_of_data(settings), None) or Batches(settings)
            held_out(settings, batches)  # raises ValueError if a validation has too many micro-batches
            description = checkpoint.describe(settings, batches.fingerprint, stage.module.origin)
            if welcome.resume:
                self._doing.starts("state")
                folder = Path(welcome.run_dir) / "checkpoints"
                path = here(settings.checkpoint.store, folder, welcome.resume, lambda: self._doing.starts("state"))
                checkpoint.refuse_mismatch(path, description)
                optimizer.resume(lambda names: checkpoint.load(path, names))
            island, outer = None, None
            if settings.islands.store is not None:
                self._doing.starts("inputs")
                island = Client(settings, optimizer, session.send)
                at = checkpoint.position_in(path) if welcome.resume else None
                # In a running job the other workers keep training, so the wait is unlimited. In a resumed job they wait
                # for this worker.
                running = self._spec.incarnation > 0 or welcome.joins
                patience = math.inf if running else RESUME_SECONDS if welcome.resume else 0.0
                outer = island.open(at, patience, None if running or welcome.resume else stage.module.origin)
                session.aim = island.aim
            takes = measured_memory(stage) if settings.parallel.memory and not settings.model.own else []
            participant.holdings = Holdings(participant.member, stage.layout.ids, welcome.resume - 1)
        except ValueError as error:
            return self._refuse(error, session)
        except Exception as error:
            if is_unfit(error):
                said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                unfit = f"model.kernels: the kernels cannot run on {device} ({said}); set model.kernels=reference"
                return self._refuse(ValueError(unfit), session)
            if not self._spec.incarnation:  # not for a restarted worker, which may fail for other reasons
                error.recycle_where = f"the start of stage {worker.stage}"  # type: ignore[attr-defined]
            raise

        faults = Injector(welcome.faults, lambda **words: last_words(self._spec, **words))
        following = Following(
            stage, optimizer, participant, session.lock, self._spec.token, self._interface, faults.inject,
            settings.control.suspicion,
        )  # fmt: skip
        token, run_dir = self._spec.token, welcome.run_dir
        process = ThisProcess(settings, run_dir, token, session, following, batches, backend, island)
        session.upload = Uploads(settings, run_dir, description, session.send).asked
        player = Player(process, stage, optimizer, faults)
        self._doing.starts("ready")
        session.log.write(f"stage {worker.stage} is ready after {time.monotonic() - self._started:.1f} s")
        ready = Ready(
            following.address,
            platform(device, backend, settings.numerics.precision),
            *_described(stage),
            socket.gethostname(),
            os.cpu_count() or 1,
            stage.layout.described,
            [{key: float(value) for key, value in asdict(way).items()} for way in takes],
            notes(settings.parallel.backend, backend, device),
            batches.fingerprint,
            stage.module.depth,
            stage.module.stays,
            stage.module.origin,
            outer,
        )
        session.send(ready)
        if island is not None:
            island.start()
        first.ready(player.executor.spans)
        player.executor.on_commit.extend((first.stepped, carrier.stepped))

        def describe(described: dict[int, list[tuple[str, int]]], again: bool = False) -> None:
            nonlocal ready
            if again or not ready.units.keys() >= described.keys():
                ready = structs.replace(ready, units=ready.units | described)
                session.send(ready)

        def relaid() -> None:
            player.donations.relayout()
            described = player.stage.layout.described
            session.log.write(f"stage {player.stage.stage} now has layers {', '.join(map(str, described))}")
            describe(described)

        following.relaid, following.follows = relaid, lambda layout: describe(layout.described)
        following.room = lambda elements: (elements * bytes_per_element(settings), free_bytes(device))
        # Every worker may become a joiner, because the other workers may start the job without it.
        following.start(session.send)
        self._watch_for_eviction(session)
        try:
            while (reason := player.executor.run()) == "cast":
                player.close()
                early = following.take_over()
                none = Injector([], faults.last_words)  # the faults that have not fired belong to the old role
                player = Player(process, stage, optimizer, none)
                player.commits.reduced |= early
                boundary, deferred = _described(stage)
                ready = structs.replace(ready, boundary_bytes=boundary, deferred_share=deferred, memory=[])
                describe(stage.layout.described, again=True)
                session.plays(participant.worker)
        except UserMistake as error:
            return self._refuse(error, session)
        finally:
            if island is not None:
                island.close(session.over == "done")
            player.profiling.close()
            links.close()
            following.close()
        if reason == "left":
            last_words(self._spec, cause="eviction", detail="SIGTERM")
        return 0 if reason in ("done", "left") else 1

    def _copy_inputs(self, settings: Settings) -> None:
        """Copies data and models from a store to this machine. A restarted worker uses the copies that exist, and needs
        no store. Raises ValueError if an input cannot be copied."""
        self._doing.starts("inputs")
        for url, small in stored_inputs(settings).items():
            if not self._spec.incarnation or not is_copied(url, small):
                copy(url, small, lambda done, total: self._doing.starts("inputs"))

    def _refuse(self, error: ValueError, session: Session | None = None) -> int:
        """Stops the job with the error's message, because the input is invalid, and waits for the end of the job. If
        this process ended at once, the coordinator could notice its end before the message arrives."""
        if error.__cause__ is not None:  # to the log, because the message contains only one line of the cause
            traceback.print_exception(error.__cause__)
        self._client.send(CannotRun(str(error)))
        while session is None and not isinstance(self._client.recv(), Exit | Leave):
            pass
        if session is not None:
            session.wait_for_the_end()
        return 2

    def _watch_for_eviction(self, session: Session) -> None:
        """Reports SIGTERM to the coordinator. Uses a thread, because a signal handler runs only after the main thread
        has returned from C++."""

        def watch() -> None:
            signal.sigwait({signal.SIGTERM})
            session.send(Leaving())

        threading.Thread(target=watch, name="eviction", daemon=True).start()

    def _publish(self, key: str, value: bytes) -> None:
        self._client.send(StoreValue(key, value))

    def _beat(self) -> None:
        """Sends heartbeats from a separate thread, so that they stop only with the whole process."""

        boot = boot_id()

        def beat() -> None:
            while True:
                read = slowest_read()
                reading = None if read is None else Reading(*read)
                doing = self._doing
                about = doing.delivered(), reading, doing.lacks(), self._received()
                self._client.send(WorkerHeartbeat(time.monotonic(), boot, *about))
                time.sleep(self._settings.control.heartbeat)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()


def _described(stage: Stage) -> tuple[int, float]:
    """(bytes of the stage's output for a micro-batch, share of the stage's parameters whose gradients wait for W)."""
    sizes = {name: parameter.numel() for name, parameter in stage.parameters.items()}
    deferred = sum(sizes[name] for name in stage.module.deferred)
    return sum(tensor.nbytes for tensor in stage.module.gives), round(deferred / sum(sizes.values()), 4)


def _stage(
    settings: Settings,
    stage: int,
    device: torch.device,
    run_dir: str,
    doing: Doing,
    kernels: dict[str, float],
    filled: bool,
) -> tuple[Stage, StageOptimizer]:
    """Builds the stage and its optimizer. On a GPU also compiles all kernels now, because compiling takes long and no
    other worker waits for this one yet. Raises ValueError if the model cannot be trained with these settings.

    kernels: filled with kernel -> seconds of its compilation
    filled: see `Stage`
    """
    whole = not settings.parallel.copies
    if settings.emulate.mode:
        emulated = EmulatedStage(settings, stage, device, run_dir, filled)
        return emulated, EmulatedOptimizer(settings, emulated, whole)
    real = Stage(settings, stage, device, run_dir, filled)
    optimizer = StageOptimizer(settings, real, whole)
    if device.type == "cuda":
        doing.starts("kernels")
        with compiling(kernels):
            real.warm()
            optimizer.warm()
    if settings.data.masked and not settings.model.own:
        refuse_leaks(real)
    return real, optimizer


def import_ahead(settings: Mapping[str, Any]) -> None:
    """Imports modules that a worker needs only later, for its first checkpoint and for a Hugging Face model."""
    import torch.distributed.checkpoint  # noqa: F401

    if settings["model"]["kind"] == "hf":
        import transformers.modeling_utils  # noqa: F401


def _prepare(ahead: Ahead) -> None:
    """In a standby process: imports and reads the data. Ignores errors, because the worker reports them when it needs
    the data."""
    with suppress(Exception):
        import_ahead(ahead.settings)
        settings = msgspec.convert(ahead.settings, Settings)
        _read_ahead[_of_data(settings)] = Batches(settings)
    say_prepared()


def _of_data(settings: Settings) -> str:
    """A key for the settings that determine the samples. Excludes `control`, which may differ between nodes."""
    return repr(replace(settings, control=Control()))


if __name__ == "__main__":
    sys.exit(start())
