"""Trains a model. torchrun starts this module once for every worker.

    torchrun --nproc-per-node=12 -m recycle_pp.train parallel=3x4 +fail_at=20:1.2 +rejoin_at=40:1.2
    recycle train parallel=3x4 +fail_at=20:1.2 +rejoin_at=40:1.2            # the same; runs torchrun in this process
    python -m recycle_pp.train parallel=1x1 model=tiny          # one worker needs no torchrun
    torchrun --nproc-per-node=4 -m recycle_pp.train +join=10.0.0.1:29501    # replaces a lost node of a running job
    torchrun --nproc-per-node=4 -m recycle_pp.train +join=runs/mine         # the same, with a shared run folder
    python -m recycle_pp.train --help                           # every key

Each of these processes becomes a supervisor (`recycle_pp.supervisor`). Rank 0 first reads the configuration. If it
contains a mistake, rank 0 prints one sentence and exits with code 2 before any worker starts. torchrun's summary
repeats the sentence. Other exit codes: 0 done, 1 the job failed, 130 Ctrl-C, 143 SIGTERM (docs/exit-codes.md).
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from recycle_pp.command import open_streams, os_errors_as_mistakes, say
from recycle_pp.config.settings import Run, Settings
from recycle_pp.linux import addresses
from recycle_pp.linux.processes import die_with_parent
from recycle_pp.state.late_upload import upload_late
from recycle_pp.state.survey import Survey, survey
from recycle_pp.supervisor.dismissal import REFUSED_SECONDS, dismiss
from recycle_pp.supervisor.supervisor import Ended, supervise
from recycle_pp.telemetry import startup
from recycle_pp.telemetry.checkpoint_folders import finished, name
from recycle_pp.telemetry.failure import record_failure, refuse
from recycle_pp.telemetry.heartbeat import address_of, refuse_running
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.words import plural
from recycle_pp.wire.join import find_place
from recycle_pp.wire.launch import Address, Launch

if TYPE_CHECKING:
    from recycle_pp.config.node_settings import NodeSettings

# Maximum bytes of text to tokenise at the start of a job with several processes, which wait only ten minutes for rank 0
AT_MOST = 256_000_000
STORE_SECONDS = 20.0  # how long to retry requests to a store that does not answer, before the job starts
RESUME_SECONDS = 300.0  # longer limit if the run folder exists, because the store worked when the run started


def main(arguments: list[str]) -> int:
    """The exit code of this rank's process. arguments: the command line without the program's name."""
    try:
        return _main(arguments)
    finally:
        startup.end()


def _main(arguments: list[str]) -> int:
    launch = Launch()
    try:
        launch = Launch.from_environment()
        if {"--help", "-h"} & set(arguments):
            if launch.rank == 0:
                from recycle_pp.config.help import help_text

                say(help_text())
            return 0
        with os_errors_as_mistakes():
            job = find_place(_with_address(arguments))
        if job is not None:
            return finish(asyncio.run(supervise(launch, job, joins=True)))
        if launch.local_rank == 0:
            startup.begin("imports the configuration")
        with os_errors_as_mistakes():
            settings, run, address, complete, node, done = prepare(launch, arguments)
        if complete:
            startup.end()
            say(f"recycle_pp: {complete}")
            asyncio.run(dismiss(launch, address, complete))
    except ValueError as error:
        return refuse(str(error), launch.local_rank)
    ended = Ended(0, settings, run) if complete else asyncio.run(supervise(launch, address, settings, run, node))
    return finish(ended, done)


def _with_address(arguments: list[str]) -> list[str]:
    """The arguments, with `+join=HOST:PORT` instead of `+join=RUN_DIR`."""
    folders = {text: RunFolder(text.partition("=")[2]) for text in arguments if text.lstrip("+").startswith("join=")}
    found = {text: run for text, run in folders.items() if run.path.is_dir()}
    return [f"+join={address_of(found[text])}" if text in found else text for text in arguments]


class Prepared(NamedTuple):
    """The result of `prepare`.

    settings  the validated settings of the job, with the values of a resumed run and numbers for `auto`; only on rank 0
    run       the run folder; only on rank 0
    address   the coordinator's address; None if all ranks are on one node and read the address from a private file
    complete  a sentence for the user if the run is already complete, else empty
    node      the settings that this node was started with; None if the job has a single node
    done      number of steps in the newest checkpoint; 0 without a resume
    """

    settings: Settings | None = None
    run: RunFolder | None = None
    address: Address | None = None
    complete: str = ""
    node: NodeSettings | None = None
    done: int = 0


def prepare(launch: Launch, arguments: list[str]) -> Prepared:
    """Collects the information that this rank needs to join the job.

    In a job on one node, only rank 0 reads the configuration.
    """
    if launch.rank > 0 and launch.one_node:
        return Prepared()
    from recycle_pp.config.compose import compose

    startup.update("reads the configuration")
    settings = compose(arguments)
    if settings.control.interface is not None:
        addresses.address_of(settings.control.interface)  # raises ValueError if this machine does not have it
    address = node = None
    if not launch.one_node or settings.control.address is not None:
        address = Address.of_cluster(launch, settings.control.address)
    if not launch.one_node:
        from recycle_pp.config.node_settings import NodeSettings

        node = NodeSettings.of(settings, arguments)
    if launch.rank > 0:
        if launch.local_rank == 0:  # copies while this rank waits for rank 0
            threading.Thread(target=_copy_ahead, args=(settings,), name="copies", daemon=True).start()
        return Prepared(address=address, node=node)
    try:
        with os_errors_as_mistakes():
            return _prepare_job(launch, arguments, settings, address, node)
    except ValueError as error:
        if not launch.one_node:  # only rank 0 runs these checks, so the other nodes do not know of the error
            startup.update("notifies the other nodes of the error")
            asyncio.run(dismiss(launch, address, str(error), code=2, seconds=REFUSED_SECONDS))
        raise


def _prepare_job(
    launch: Launch, arguments: list[str], settings: Settings, address: Address | None, node: NodeSettings | None
) -> Prepared:
    """Does the work of rank 0: validates the settings, prepares the data and creates the run folder."""
    from recycle_pp.config.checks import validate
    from recycle_pp.config.compose import beyond_positions, keys_of
    from recycle_pp.config.run_file import split
    from recycle_pp.telemetry.exporters.exporter import refuse_missing

    settings, said = continued(settings, arguments)
    folder = RunFolder(settings.run.dir)
    validate(settings, launch.world)
    refuse_missing(settings)
    startup.update(f"checks whether a job still runs in {folder.path}")
    refuse_running(folder)
    stored = look_into_store(settings)
    startup.update(f"looks for checkpoints in {folder.path}")
    done = _steps_done(folder, stored) if settings.run.resume else 0
    if settings.run.epochs is not None and "run.steps" in keys_of(split(arguments)[0]):
        unused = f"run.epochs={settings.run.epochs:g} sets run.steps; to choose run.steps, add run.epochs=null"
        if not done:
            raise ValueError(unused)
        say(f"recycle_pp: {unused}")
    if settings.islands.store is not None:
        startup.update(f"checks the islands in {settings.islands.store}")
        from recycle_pp.islands.admission import admitted

        settings = settings.with_values({"islands.part": admitted(settings, done)})
    if settings.run.epochs is not None:
        settings = _with_steps(settings, launch.world)
    if done > stored.step and (done >= settings.run.steps or not launch.one_node):
        bring_to_store(settings, folder.checkpoints / name(done))
    if done >= settings.run.steps:
        complete = f"run.dir={folder.path} has completed {plural(done, 'step')}, and {_length(settings.run)}"
        if settings.run.resume is True:
            key = "run.steps" if settings.run.epochs is None else "run.epochs"
            raise ValueError(f"{complete}; raise {key} to continue")
        return Prepared(settings, folder, address, f"the run is complete: {complete}", node, done)
    if settings.run.epochs is None:
        prepare_data(settings, launch.world)
    if (sentence := beyond_positions(settings.model)) is not None:
        say(f"recycle_pp: {sentence}")
    startup.update("plans the stages")
    may_restart = settings.run.resume == "auto"
    settings = with_numbers(settings.with_values({"run.resume": settings.run.resume is True or done > 0}))
    validate(settings, launch.world)
    startup.update(f"makes the run folder {settings.run.dir}")
    run = RunFolder.create(settings, done, may_restart)
    startup.update("imports the coordinator")
    if settings.run.resume:
        found = run.checkpoints if done in finished(run.checkpoints) else settings.checkpoint.store
        say("\n".join([f"continues with step {done}, from {found}/step-{done:06d}", *said]))
    return Prepared(settings, run, address, node=node, done=done)


def _length(run: Run) -> str:
    """The key that sets the number of steps, in words."""
    epochs = "" if run.epochs is None else f"run.epochs={run.epochs:g} gives "
    return f"{epochs}run.steps={run.steps}"


def with_numbers(settings: Settings) -> Settings:
    """The settings, with numbers for parallel.memory=auto and model.split=auto."""
    if settings.parallel.memory == "auto":
        from recycle_pp.fitting.machine import memory_of_a_worker

        settings = settings.with_values({"parallel.memory": memory_of_a_worker(settings.run.device)})
    if settings.model.split == "auto":
        from recycle_pp.fitting.first_layout import with_first_layout

        settings = with_first_layout(settings)
    return settings


def continued(settings: Settings, arguments: list[str]) -> tuple[Settings, list[str]]:
    """Returns the settings of the resumed run, and a sentence for each key that changes.

    Returns `settings` and no sentences if the command line resumes no run.
    """
    folder = RunFolder(settings.run.dir)
    if settings.run.resume in (True, "auto"):
        from recycle_pp.config.compose import chosen

        url = settings.checkpoint.store
        if url is None and "checkpoint.store" not in chosen(arguments):
            url = _stored_at(folder)
        stored = fetch_run(url, folder)
        if folder.config.exists() and (stored or finished(folder.checkpoints)):
            from recycle_pp.config.resume import take_up

            return take_up(arguments, folder.read_config())
    return settings, []


def _stored_at(folder: RunFolder) -> str | None:
    """checkpoint.store in the folder's config.yaml."""
    group = folder.read_config().get("checkpoint") if folder.config.exists() else None
    url = group.get("store") if isinstance(group, dict) else None
    return url if isinstance(url, str) else None


def fetch_run(url: str | None, folder: RunFolder) -> bool:
    """Copies the run's small files from its store if they are newer there, because a later coordinator of the run used
    another folder. Returns whether the store has a checkpoint.

    Raises ValueError if the store does not answer, if it seems to contain another run, or if the run's job still runs
    elsewhere.
    """
    here = folder.config.exists()
    if url is None:
        return False
    found = survey(url, RESUME_SECONDS if here else STORE_SECONDS, folder=folder.checkpoints)
    if not found.step:
        return False
    if here and url != _stored_at(folder):  # the store may contain a different run
        if not found.copied:
            raise ValueError(
                f"checkpoint.store={url} contains step-{found.step:06d}, of which run.dir={folder.path} has no copy, "
                "so it may belong to another run; choose a different store, or a new run.dir to continue that run"
            )
        return True
    startup.update(f"copies the run's files from {url}")
    command = [sys.executable, "-m", "recycle_pp.telemetry.stored_run", url, str(folder.path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stdout.strip() or f"{url} could not be read: exit code {done.returncode}")
    return True


def look_into_store(settings: Settings) -> Survey:
    """The checkpoints in `checkpoint.store`. Raises ValueError if it cannot be used, or if it contains another run."""
    url = settings.checkpoint.store
    if url is None:
        return Survey()
    startup.update(f"looks for checkpoints in {url}")
    again = settings.run.resume and RunFolder(settings.run.dir).config.exists()
    found = survey(url, RESUME_SECONDS if again else STORE_SECONDS, probe=True)
    if found.step and not settings.run.resume:
        raise ValueError(
            f"checkpoint.store={url} contains step-{found.step:06d} of another run; continue that run with "
            "run.resume=true, or choose a different store"
        )
    return found


def bring_to_store(settings: Settings, checkpoint: Path) -> None:
    """Uploads this checkpoint of the run folder to `checkpoint.store`, if there is one. Raises StoreError if that
    fails."""
    url = settings.checkpoint.store
    if url is not None:
        startup.update(f"uploads {checkpoint} to {url}")
        upload_late(url, checkpoint, settings.checkpoint)


def _with_steps(settings: Settings, world: int) -> Settings:
    """The settings, with run.steps computed from run.epochs. Prepares the data to count the samples."""
    samples, epochs = prepare_data(settings, world), settings.run.epochs
    assert epochs is not None
    each = settings.parallel.pipelines * settings.parallel.microbatches * settings.parallel.microbatch_size
    steps = math.ceil(epochs * samples / each)
    say(f"recycle_pp: run.epochs={epochs:g} of {plural(samples, 'sample')} gives run.steps={steps}")
    return settings.with_values({"run.steps": steps})


def prepare_data(settings: Settings, world: int) -> int:
    """Copies data and models from their stores, and tokenises the text of data.path, if necessary. Shows the progress
    and checks the result. Blocks.

    Returns the number of training samples, or 0 without counting them if the data need no preparation and run.epochs
    does not need the number.

    Tokenises in a separate process, so that this process stays small. A signal ends both processes, and the next start
    of the job continues the tokenisation.
    """
    from recycle_pp.data.sources import needs_preparation, untokenised

    copy_inputs(settings)
    if settings.run.epochs is None and not needs_preparation(settings.data):
        return 0
    startup.update("prepares the data")
    if world > 1 and (size := untokenised(settings)) > AT_MOST:
        data = settings.data
        more = f" --sequence={settings.model.sequence}" if data.format == "chat" else ""
        more += f" --column={data.column}" if data.column != "text" else ""
        more += f" --separator={shlex.quote(data.separator)}" if data.separator is not None else ""
        raise ValueError(
            f"data.path holds {size / 1e9:.1f} GB of text, too much to tokenise while {world - 1} processes wait; "
            f"tokenise it once with python -m recycle_pp.tokenize TEXT --tokenizer=...{more} --out=FILE.bin, and set "
            "data.path=FILE.bin"
        )
    command = [sys.executable, "-m", "recycle_pp.tokenize", "--settings"]
    done = subprocess.run(command, input=json.dumps(asdict(settings)), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stdout.strip() or f"data.path could not be tokenised: exit code {done.returncode}")
    *said, numbers = done.stdout.splitlines()
    held_outs, samples = map(int, numbers.split())
    for sentence in said:
        say(f"recycle_pp: {sentence}")
    if settings.run.validate_every and held_outs < settings.parallel.microbatch_size:
        key = (
            "data.validation_share must leave"
            if settings.data.validation_path is None
            else "data.validation_path must hold"
        )
        raise ValueError(
            f"{key} at least {settings.parallel.microbatch_size} held-out samples (one micro-batch), but there are "
            f"{held_outs}; change it, or set run.validate_every=0"
        )
    return samples


def copy_inputs(settings: Settings) -> None:
    """Copies data and models that lie in a store to this machine, in a separate process, which prints the progress.
    Raises ValueError if that fails."""
    from recycle_pp.config.stored_inputs import stored_inputs
    from recycle_pp.storage.local_copy import copy_apart

    if urls := stored_inputs(settings):
        startup.end()
        copy_apart(urls)
        startup.begin("prepares the data")


def _copy_ahead(settings: Settings) -> None:
    """Copies data and models to this node before its workers start. The workers wait for the copies. Ignores errors,
    because the workers will report them."""
    from recycle_pp.config.stored_inputs import stored_inputs
    from recycle_pp.storage.local_copy import copy_apart

    with suppress(ValueError):
        copy_apart(stored_inputs(settings))


def finish(ended: Ended, done: int = 0) -> int:
    """Exports and evaluates the last checkpoint, if the settings ask for it and this rank was the last coordinator.

    done: number of steps in the newest checkpoint; a complete run may have more than `run.steps`

    Returns the exit code of this rank.
    """
    code, settings, run = ended
    if settings is None or run is None:
        return code
    steps = max(done, settings.run.steps)
    if settings.checkpoint.hf_at_end:
        code = export(run, steps)
    if settings.run.evaluate and code <= 1:
        code = evaluate(run, steps) or code
    return code


def export(run: RunFolder, step: int) -> int:
    """Exports the last checkpoint to a Hugging Face folder in a separate process.

    Returns 0, 1 after a failure, or 128 + the signal that ended it.
    """
    out = run.path / "hf" / f"step-{step:06d}"
    if out.exists():  # an earlier start of this run has exported it
        return 0
    return _run(f"its export to {out}", "recycle_pp.export", run.path, out, "--step", step)


def evaluate(run: RunFolder, step: int) -> int:
    """Evaluates the last checkpoint, unless it already has a result, and waits for the result.

    Returns 0, 1 after a failure, or 128 + the signal that ended it.
    """
    return _run("run.evaluate for its last checkpoint", "recycle_pp.evaluate", run.path, "--step", step, "--beside")


def _run(what: str, *words: object) -> int:
    """Runs a module in a separate process, and records a failure. A signal to this process ends both processes.

    what: the subject of the sentence about a failure
    """
    caught: list[int] = []
    running: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        for process in running:
            process.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):  # no longer ignored, as the supervisor has left them
        signal.signal(number, stop)
    running.append(subprocess.Popen([sys.executable, "-m", *map(str, words)]))
    if caught:  # a signal arrived before the process was in the list
        running[0].terminate()
    if not (code := running[0].wait()):
        return 0
    ending = f"was ended by {signal.Signals(caught[0]).name}" if caught else f"failed with exit code {code}"
    sentence = f"the training is done, but {what} {ending}"
    record_failure(sentence)
    if not caught:  # the process has printed its reason
        return 1
    say(f"recycle_pp: {sentence}")
    return 128 + caught[0]


def _steps_done(run: RunFolder, stored: Survey) -> int:
    """Number of steps in the newest intact checkpoint; 0 without checkpoints. Raises ValueError if all are damaged."""
    from recycle_pp.coordinator.checkpoints import newest_of

    done, damaged = newest_of(run.checkpoints, stored)
    if damaged and not done:
        damage = next(iter(damaged.values()))
        raise ValueError(f"run.resume: all checkpoints in {run.checkpoints} are damaged: {damage}")
    return done


if __name__ == "__main__":
    open_streams()
    # Until the supervisor installs its own handlers, a signal ends this process without a traceback. torchrun's summary
    # lists every rank that exits with a nonzero code, so only one rank of each node does so.
    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number if speaks else 0))
    faulthandler.enable()
    if "RANK" in os.environ:
        die_with_parent(os.getppid(), signal.SIGTERM)  # the parent is torchrun's agent
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    # os._exit, because threads blocked by a disk or a pipe must not wake up while the interpreter shuts down.
    os._exit(code)
