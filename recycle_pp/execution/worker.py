"""One worker process: connects to the coordinator, builds its stage, runs its orders.

    python -m recycle_pp.execution.worker       # started by a supervisor, reads its spec from standard input
    start()                                     # the same in a fork of a process that has imported torch

A failing worker sends the cause of its death (`last_words`) to its supervisor and ends. The job continues without it.
On SIGTERM (its machine will be reclaimed) the worker leaves after the commit of the current step, so no work is lost.
On SIGUSR1 the worker writes the stacks of all its threads to its log.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import torch
import torch.fx.experimental.symbolic_shapes  # otherwise the first backward imports it while peers wait

from recycle_pp.comm.device_errors import is_gpu_failure, is_out_of_memory
from recycle_pp.comm.links import Links
from recycle_pp.comm.store import ControlStore
from recycle_pp.config.mistakes import UserMistake
from recycle_pp.config.settings import Settings
from recycle_pp.data.file_tokens import probe_disks, slowest_read
from recycle_pp.fitting.understudy_policy import bytes_per_element
from recycle_pp.linux.processes import boot_id, name_process
from recycle_pp.numerics import fixed_point as reproducible
from recycle_pp.protocol.hangs import read_limit
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.participant import Participant
from recycle_pp.state.follow import Following
from recycle_pp.state.storing import Uploads
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
    StoreValue,
    WorkerHeartbeat,
    WorkerWelcome,
)
from recycle_pp.wire.worker_spec import Ahead, WorkerSpec, last_words

from .activity import Doing
from .carried_caches import Carrier
from .coordinator_client import CoordinatorClient
from .device import backend_for, choose, free_bytes, is_unfit, large_blocks_apart, settle_memory
from .first_ops import FirstOpsReport
from .injection import Injector
from .loading import Loaded, load, read_ahead
from .player import Player, ThisProcess
from .ready import ReadyReport
from .session import Session
from .transports import transport_for


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
        self._welcome, self._settings = welcome, welcome.settings
        self._client.set_keepalive(self._settings.control.suspicion)
        self._received: Callable[[], int | None] = lambda: None  # see `Links.received`
        # `spec` contains the settings of this node, which may have another interface than the coordinator's.
        self._interface = spec.settings["control"]["interface"] or self._client.local_host

    def run(self) -> int:
        settings = self._settings
        self._beat()
        probe_disks(read_limit(settings.control.suspicion))
        if settings.numerics.reproducible:
            reproducible.prepare()
        if settings.parallel.memory is not None:
            large_blocks_apart()
        try:
            device = choose(settings.run.device, self._spec.rank)
            backend = backend_for(settings.parallel.backend, device)
            if self._spec.incarnation:
                settle_memory(device)
        except ValueError as error:
            return self._refuse(error)
        session = self._connect(device, backend)
        carrier = Carrier(settings.run.compile_cache, session.log.write)
        if settings.run.compile_cache:
            self._doing.starts("kernels")
            carrier.read()
        first = FirstOpsReport(backend, device, session.send)
        try:
            loaded = self._load(session, device, first.kernels)
        except ValueError as error:
            return self._refuse(error, session)
        carrier.write()
        try:
            reason = self._train(loaded, session, backend, first, carrier)
        except UserMistake as error:
            return self._refuse(error, session)
        if reason == "left":
            last_words(self._spec, cause="eviction", detail="SIGTERM")
        return 0 if reason in ("done", "left") else 1

    def _connect(self, device: torch.device, backend: str) -> Session:
        """Starts to receive messages. Call it before long work, because the coordinator may be lost during it."""
        settings, welcome = self._settings, self._welcome
        store = ControlStore(lambda key, value: self._client.send(StoreValue(key, value)))
        transport = transport_for(
            backend,
            store,
            device,
            self._interface,
            size=settings.parallel.pipelines * settings.parallel.stages,
            keepalive=settings.control.suspicion,
            unreachable=lambda members: self._client.send(Unreachable(members)),
        )
        links = Links(transport)
        self._received = links.received
        participant = Participant(self._spec.rank, welcome.worker)
        participant.committed = participant.applied = welcome.resume - 1
        session = Session(self._client, participant, links, store, self._doing)
        about = f"rank {self._spec.rank}: pid {os.getpid()} on {socket.gethostname()}, {device}, {backend}"
        session.log.write(f"{'restarted' if self._spec.incarnation else 'started'} for {about}")
        session.start()
        return session

    def _load(self, session: Session, device: torch.device, kernels: dict[str, float]) -> Loaded:
        """See `loading.load`. Raises ValueError also if the model's kernels cannot run on this device."""
        try:
            return load(self._spec, self._welcome, device, session, kernels)
        except ValueError:
            raise
        except Exception as error:
            if is_unfit(error):
                said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                unfit = f"model.kernels: the kernels cannot run on {device} ({said}); set model.kernels=reference"
                raise ValueError(unfit) from None
            if not self._spec.incarnation:  # not for a restarted worker, which may fail for other reasons
                error.recycle_where = f"the start of stage {self._welcome.worker.stage}"  # type: ignore[attr-defined]
            raise

    def _train(
        self, loaded: Loaded, session: Session, backend: str, first: FirstOpsReport, carrier: Carrier
    ) -> str | None:
        """Runs the orders of the coordinator until the job ends or this worker leaves it. Returns the reason, see
        `Session.over`."""
        settings, welcome, participant = self._settings, self._welcome, session.participant
        stage, optimizer, island = loaded.stage, loaded.optimizer, loaded.island
        participant.holdings = Holdings(participant.member, stage.layout.ids, welcome.resume - 1)
        faults = Injector(welcome.faults, lambda **words: last_words(self._spec, **words))
        following = Following(
            stage, optimizer, participant, session.lock, self._spec.token, self._interface, faults.inject,
            settings.control.suspicion,
        )  # fmt: skip
        session.upload = Uploads(settings, welcome.run_dir, loaded.description, session.send).asked
        process = ThisProcess(
            settings, welcome.run_dir, self._spec.token, session, following, loaded.batches, backend, island
        )
        player = Player(process, stage, optimizer, faults)
        self._doing.starts("ready")
        session.log.write(f"stage {stage.stage} is ready after {time.monotonic() - self._started:.1f} s")
        report = ReadyReport(loaded, following.address, backend, settings, session.send)
        report.send()
        if island is not None:
            session.aim = island.aim
            island.start()
        first.ready(player.executor.spans)
        player.executor.on_commit.extend((first.stepped, carrier.stepped))

        def relaid() -> None:
            player.donations.relayout()
            described = player.stage.layout.described
            session.log.write(f"stage {player.stage.stage} now has layers {', '.join(map(str, described))}")
            report.add(described)

        following.relaid, following.follows = relaid, lambda layout: report.add(layout.described)
        following.room = lambda elements: (elements * bytes_per_element(settings), free_bytes(stage.device))
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
                report.recast(stage)
                session.plays(participant.worker)
        finally:
            if island is not None:
                island.close(session.over == "done")
            player.profiling.close()
            session.links.close()
            following.close()
        return reason

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
        read_ahead(msgspec.convert(ahead.settings, Settings))
    say_prepared()


if __name__ == "__main__":
    sys.exit(start())
