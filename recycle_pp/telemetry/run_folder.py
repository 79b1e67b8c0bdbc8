"""The folder with all files of a run.

run = RunFolder.create(settings)     # ValueError if the folder contains another run and run.resume is false
run = RunFolder("runs/mine")         # to read
run.lines(run.metrics), run.log("1.2"), run.write_json(run.summary, {...})
run.later(run.write_json, run.summary, {...})            # the same in a thread, see Background

config.yaml      the resolved configuration          profile.json     measured durations
metrics.jsonl    one line a step                     summary.json     the run in a dozen numbers (records.Summary)
events.jsonl     deaths, plans, rejoins, ...         traces/          step-000020.json around every event
samples.jsonl    with run.sample_log=true: the samples that each step was trained on
protocol.jsonl   every event of the protocol since the newest checkpoint, for python -m recycle_pp.replay
logs/            worker-1.2.log                      checkpoints/     step-000020/
heartbeat.json   the coordinator's heartbeat         hangs/           the op of every worker during a hang
health.json      figures of all GPUs and hosts       quarantine.json  GPUs on which no worker may start
profiles/        step-000020-1.2.json: traces of torch's profiler
evaluations/     outputs of run.evaluate, step-000020.log
receipts/        reports of processes for recycle_pp.doctor: first-forward.jsonl, supervisor-3.jsonl

docs/run-folder.md explains every field.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from recycle_pp.config.loading import known, load
from recycle_pp.config.settings import Settings
from recycle_pp.wire.files import UnreadableFile, open_regular, read
from recycle_pp.wire.records import Term
from recycle_pp.wire.terms import EARLIER, without_undone

from .background import Background
from .checkpoint_folders import finished
from .follower import CHECKS, Follower, record_of
from .unwritten import Unwritten
from .warn import warn_once

ONE_LINE_A_STEP = ("metrics.jsonl", "samples.jsonl")


class _Termed(msgspec.Struct):
    term: Term = EARLIER


class RunFolder:
    """Paths and small files of a run's folder. The only open file is the lock, in the process that called `create`."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.protocol = self.path / "protocol.jsonl"
        self.profile = self.path / "profile.json"
        self.summary = self.path / "summary.json"
        self.heartbeat = self.path / "heartbeat.json"
        self.health = self.path / "health.json"
        self.quarantine = self.path / "quarantine.json"
        self.logs = self.path / "logs"
        self.traces = self.path / "traces"
        self.hangs = self.path / "hangs"
        self.receipts = self.path / "receipts"
        self.first_ops = self.receipts / "first-forward.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.copy = self.path / ".copy"
        self.later = Background("run folder")  # for writes that must not block the caller
        self.kept = Unwritten()  # copies of lines that the coordinator cannot write
        self.made: list[Path] = []  # folders made by `create`
        self.first_term = 0  # first term of the job that called `create`; higher than every term in the folder
        self._lock = -1

    @classmethod
    def create(cls, settings: Settings, done: int = 0, may_restart: bool = False) -> RunFolder:
        """Creates the folder, or continues the run in it. Holds its lock until `unlock` or the end of the process.

        done:        number of steps in the checkpoint from which the run continues; the lines of later steps and an old
                     summary.json are removed
        may_restart: whether a run that ended before its first checkpoint may start again

        Raises:
            ValueError: the folder contains another run, or a user's file with the name of a run's file, or is in use,
                or the disk rejects a file.
        """
        run = cls(Path(settings.run.dir).absolute())
        if run.path.exists() and not run.path.is_dir():
            raise ValueError(f"run.dir must name a folder; {str(run.path)!r} is a file")
        if settings.run.resume and not done:
            raise ValueError(
                f"run.resume=true needs a checkpoint to continue from, and run.dir={settings.run.dir} has none; "
                "run.resume=auto starts a new run"
            )
        if run.begun and not settings.run.resume and not may_restart:
            raise ValueError(
                f"run.dir={settings.run.dir} contains another run; continue it with run.resume=true, "
                "or choose a new folder"
            )
        theirs = next((path for path in (run.config, run.summary) if path.exists()), None)
        if theirs is not None and not settings.run.resume and not run.is_written:
            raise ValueError(
                f"run.dir={settings.run.dir} contains a {theirs.name} that no run has written; move this file, "
                "or choose a new folder"
            )
        files = [path for path in (run.metrics, run.samples) if path.exists()]
        places = {path: [place for place in _places(path) if place.step < done] for path in files}
        made = [path for path in (run.path, *run.path.parents) if not path.exists()]
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.lock()
            run.make()
            # At least 1 for a resumed run, even if this folder shows no term: it may have been copied from the store
            # before the lines of the previous job arrived there, which may have term 0.
            run.first_term = 1 + max(run.newest_term, 0 if done else EARLIER)
            run._write_config(settings)
            for path, kept in places.items():
                _rewrite(path, kept)
            run.summary.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"run.dir={settings.run.dir} cannot be written: {error.strerror}") from error
        run.made = made
        return run

    @property
    def begun(self) -> bool:
        """Whether the folder has a committed step or a checkpoint. A run that failed to start has neither."""
        steps = self.metrics.exists() and self.metrics.stat().st_size > 0
        return steps or bool(finished(self.checkpoints))

    @property
    def is_written(self) -> bool:
        """Whether a run has written into the folder, even one that failed to start."""
        return self.begun or any(path.exists() for path in (self.receipts, self.heartbeat, self.protocol, self.copy))

    @property
    def is_copy(self) -> bool:
        """Whether the folder follows a run in a store (`telemetry.stored_run`)."""
        return self.copy.exists()

    @property
    def newest_term(self) -> int:
        """The highest term of the coordinators that have written into this folder; EARLIER if there is none."""
        return _newest_term((self.metrics, self.samples, self.events, self.heartbeat))

    def lock(self) -> None:
        """Locks the folder until `unlock` or the end of this process. Raises ValueError if another job has locked
        it."""
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.unlock()
            raise ValueError(f"run.dir={self.path} belongs to a job that still runs; end it first") from None
        except OSError:  # a file system without locks; heartbeat.json is the only protection
            pass

    def lock_if_free(self) -> None:
        """Locks the folder, unless this process or another one has locked it. A missing folder stays unlocked."""
        with suppress(ValueError, OSError):
            if self._lock < 0:
                self.lock()

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def remove_new(self) -> None:
        """Removes the folders that `create` has made, after a failed start."""
        self.unlock()
        for path in self.made[:1]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self.made[1:]:
            with suppress(OSError):
                path.rmdir()

    def make(self) -> None:
        """Creates the folder and its subfolders, if they do not exist."""
        for folder in (self.logs, self.traces, self.receipts, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)

    def take_over(self, settings: Settings) -> None:
        """Creates the missing files and folders on a new coordinator's node, which may not share the lost
        coordinator's run folder."""
        self.make()
        if not self.config.exists():
            self._write_config(settings)

    def _write_config(self, settings: Settings) -> None:
        """Writes config.yaml with run.resume=false, because the file can also start a new run."""
        self.write_text(self.config, _yaml(asdict(settings.with_values({"run.resume": False}))))

    def log(self, worker: object) -> Path:
        """The log of a worker, given as "d.s" or a Worker."""
        return self.logs / f"worker-{worker}.log"

    def contact(self, rank: object) -> Path:
        """The receipt of a supervisor about its coordinators. rank: a number, or "*" for a pattern."""
        return self.receipts / f"supervisor-{rank}.jsonl"

    def trace(self, step: int) -> Path:
        return self.traces / f"step-{step:06d}.json"

    def require(self) -> None:
        """Raises ValueError if the folder contains no run."""
        if not self.config.exists() and not self.config.is_symlink():
            raise ValueError(f"{self.path} contains no run: there is no {self.config.name}")

    def read_config(self) -> dict[str, Any]:
        """config.yaml as plain data.

        Raises:
            UnreadableFile: it is missing or damaged, or has no keys.
        """
        return read_yaml(self.config)

    def read_settings(self) -> Settings:
        """The settings in config.yaml, without keys of earlier versions. Raises UnreadableFile like `read_config`, and
        if a value has the wrong type or range."""
        from recycle_pp.config.checks import check_ranges  # imported here, because supervisors do not import numpy

        try:
            settings: Settings = load(known(self.read_config()))
            check_ranges(settings)
        except UnreadableFile:
            raise
        except ValueError as error:
            raise UnreadableFile(self.config, str(error)) from None
        return settings

    def steps(self) -> int:
        """The length of the run in config.yaml. Raises UnreadableFile like `read_settings`."""
        return self.read_settings().run.steps

    def write_json(self, path: Path, data: Any, indent: int | None = 1) -> None:
        """Writes a JSON file. If the disk rejects it, prints a warning instead."""
        try:
            # The trace of many workers takes megabytes. `json` would hold the interpreter's lock ten times as long as
            # msgspec.
            text = json.dumps(data, indent=indent) if indent else msgspec.json.encode(data).decode()
            self.write_text(path, text + "\n")
        except OSError as error:
            warn_once(f"{path.parent} cannot be written: {error.strerror}")

    @staticmethod
    def write_text(path: Path, text: str) -> None:
        """Writes the file atomically, so a reader never sees a partial file."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)

    @staticmethod
    def lines(path: Path) -> list[dict[str, Any]]:
        """The records of a .jsonl file. Records of rolled-back steps are left out.

        Skips lines that a crash has cut short, and lines that a replaced coordinator wrote (`wire.terms`). Raises
        UnreadableFile if any other line is not a record.
        """
        records = Follower(path).whole()
        return without_undone(records, _step) if path.name in ONE_LINE_A_STEP else records


def newest_run(path: str | None) -> RunFolder:
    """The run in the folder `path`; None: the newest run under runs/. Raises ValueError if there is none."""
    if path is not None:
        return RunFolder(path)
    runs = sorted(Path("runs").glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise ValueError("there is no run under runs/; name a run folder")
    return RunFolder(runs[-1].parent)


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file. Raises UnreadableFile if it is missing or damaged, or has no keys."""
    import yaml

    try:
        data = yaml.load(read(path).decode(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except FileNotFoundError:
        raise UnreadableFile(path, "there is no such file") from None
    except UnicodeDecodeError:
        raise UnreadableFile(path, "it is not text") from None
    except RecursionError:
        raise UnreadableFile(path, "it is nested too deeply") from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as error:  # a date such as 2026-99-99 is a ValueError
        if isinstance(error, UnreadableFile):
            raise
        raise UnreadableFile(path, f"it is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UnreadableFile(path, "it is empty" if data is None else "it has no keys")
    return data


def _yaml(data: dict[str, Any]) -> str:
    from recycle_pp.config.run_file import dumped  # imported here, because only rank 0 needs it

    return dumped(data, sort_keys=False)


def _step(record: dict[str, Any]) -> int:
    step: int = record["step"]
    return step


def _newest_term(paths: Iterable[Path]) -> int:
    """The highest term in the readable lines of these files; EARLIER if there is none."""
    decoder = msgspec.json.Decoder(_Termed)
    newest = EARLIER
    for path in paths:
        with suppress(FileNotFoundError, UnreadableFile), open_regular(path) as file:
            for line in file:
                with suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    newest = max(newest, decoder.decode(line).term)
    return newest


class _Place(NamedTuple):
    """A line of a file: its step, the offset of its first byte, and the offset after its last byte."""

    step: int
    begin: int
    end: int


def _places(path: Path) -> list[_Place]:
    """The lines of metrics.jsonl or samples.jsonl whose records `RunFolder.lines` returns. In a long run the records
    may not fit into memory. Raises UnreadableFile like `RunFolder.lines`."""
    end = 0

    def parse(line: bytes) -> tuple[_Place, int]:
        nonlocal end
        begin, end = end, end + len(line)
        record, term = record_of(line, CHECKS[path.name])
        return _Place(record["step"], begin, end), term

    return without_undone(Follower(path, 0, parse).whole(), lambda place: place.step)


def _rewrite(path: Path, places: Sequence[_Place]) -> None:
    """Removes all lines of the file except those at `places`, atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with path.open("rb") as before, temporary.open("wb") as after:
        for place in places:
            before.seek(place.begin)
            after.write(before.read(place.end - place.begin))
    temporary.replace(path)
