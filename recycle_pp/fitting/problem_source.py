"""The input of `plan` and `visualize`, read from a command line.

    parser = ...; add_arguments(parser)
    source = read_source(parser.parse_args())       # raises ValueError with one sentence
    source.problem, source.shown, source.run

The input is a file (a problem, a plan or a trace), a run folder, or a problem that flags describe. Trainer settings can
describe a problem too:

    --pipelines 3 --stages 4 --microbatches 6 --fail 1.2
    parallel=2x4 emulate=sleep optimizer.stagger=true +fail_at=20:1.2

The defaults are those of a training run (`configs/`): 3 pipelines of 4 stages, memory for two micro-batches more than
1F1B keeps in flight, split backwards allowed, and optimizer steps at the commit. Defaults of a problem file are in
docs/planner.md. Flags override the keys of a file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recycle_schedules import Plan, Problem, Trace, Worker, compiled
from recycle_schedules.layers import Layout

from recycle_pp.config.compose import compose
from recycle_pp.config.faults import faults
from recycle_pp.config.run_file import is_run_file
from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.wire.files import UnreadableFile, read

from .first_layout import counted, first_layout
from .model_layers import ModelLayers
from .problem import initial_problem
from .profile import Profile

Json = dict[str, Any]
_KEYS = (
    "pipelines",
    "stages",
    "microbatches",
    "backward",
    "optimizer",
    "reroute",
    "send",
    "send_rerouted",
    "allreduce",
)
_FLAGS = (*_KEYS, "fail", "durations", "memory", "speed")


@dataclass(frozen=True)
class Source:
    """The input.

    unit      unit of the problem's times: slots, ms or s
    shown     the plan or trace to show; None if the problem still has to be planned
    run       the reader of a run folder; None for other inputs
    step      the step of the run's trace
    settings  settings of the trainer, from the command line or from a run without traces; None otherwise
    layout    number of decoder layers of each stage in this problem; None if unknown
    """

    problem: Problem
    unit: str = "slots"
    shown: Plan | None = None
    run: RunReader | None = None
    step: int = 0
    settings: Settings | None = None
    layout: Layout | None = None

    def named(self, plan: Plan) -> Plan:
        """A copy of `plan`, a plan of this problem, with the unit of the problem's times. If the settings fix the job's
        first layout, the copy has this layout too."""
        chosen = self.settings is not None and self.settings.model.layout is not None
        return replace(plan, time_unit=self.unit, layout=self.layout if chosen else plan.layout)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the positional argument `source`, and the flags that describe a problem."""
    add = parser.add_argument
    add(
        "source",
        nargs="*",
        help="a file (a problem, a plan or a trace), a run folder, or settings of the trainer (parallel=2x4, run.yaml)",
    )
    add("--step", type=int, help="step of a run folder; default: the last step with a death")
    flags = parser.add_argument_group("flags that describe a problem; defaults as in a training run")
    add = flags.add_argument
    add("--pipelines", type=int)
    add("--stages", type=int)
    add("--microbatches", type=int, help="per pipeline")
    add("--fail", nargs="+", action="extend", metavar="D.S", help="dead workers, like 1.2")
    add("--durations", metavar="F=1,I=1,W=1,O=1", help="one number per op, or one per stage: F=1/1/2/1")
    add(
        "--memory",
        metavar="1f1b+2",
        help="micro-batches in flight: none, a number, one per stage (4/3/6/1), or 1f1b+k; for `plan` also the memory "
        "of a worker, 80GB, with --model or settings of the trainer",
    )
    add("--backward", choices=("decoupled", "coupled", "mixed"))
    add("--optimizer", choices=("staggered", "barrier", "none"))
    add("--reroute", choices=("failed_only", "any"))
    add("--send", type=float, help="latency between stages")
    add("--send-rerouted", type=float, help="latency between stages of different pipelines")
    add("--allreduce", type=float, help="time from a stage's last gradient to its optimizer steps")
    add("--speed", nargs="+", metavar="D.S=0.8", help="slow or fast workers")
    add("--unit", choices=("slots", "ms", "s"), help="unit of the problem's times (default slots)")


def read_source(arguments: argparse.Namespace, prefer_shown: bool = True, required: bool = True) -> Source:
    """The source given on the command line.

    prefer_shown   whether to keep the plan or trace of the source. If not, the result contains only the problem
    required       whether to reject an empty command line. If not, it means a training run without settings
    """
    words, settings = _split(arguments.source)
    given = any(getattr(arguments, name) is not None for name in _FLAGS)
    if words and settings:
        raise ValueError(f"either {words[0]} or settings of the trainer ({settings[0]}), not both")
    if len(words) > 1:
        raise ValueError(f"one source at a time, not {' and '.join(words)}")
    if not words:
        if required and not (given or settings):
            raise ValueError(
                "a source is needed: a file with a problem, a plan or a trace, a run folder, or flags for a problem "
                "(--pipelines 3 --stages 4 --microbatches 6)"
            )
        if arguments.step is not None:
            raise ValueError("--step needs a run folder")
        source = _of_settings(compose(settings) if settings else Settings())
    elif Path(words[0]).is_dir():
        source = _of_run(RunReader(words[0]), arguments.step)
    elif arguments.step is not None:
        raise ValueError(f"--step needs a run folder, but {words[0]} is a file")
    else:
        source = read_file(words[0])
    if given or arguments.unit:
        source = _with_flags(source, arguments)
    return source if prefer_shown else replace(source, shown=None)


def read_file(path: str | Path) -> Source:
    """Reads a file with a problem, a plan or a trace. Raises ValueError with one sentence that names the file."""
    try:
        data = json.loads(read(Path(path)).decode())
        if isinstance(data, dict) and {"pipelines", "stages", "microbatches"} & data.keys():
            return Source(Problem.from_json(data))
        if isinstance(data, dict) and "problem" in data and "ops" not in data:
            return Source(Problem.from_json(data["problem"]))
        shown = (Trace if isinstance(data, dict) and "generation" in data else Plan).from_json(data)
        return Source(shown.problem, shown.time_unit, shown)
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: not JSON ({e})") from None
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError):
        raise ValueError(f"{path}: neither a problem, a plan nor a trace") from None


def compile_planner() -> None:
    """Waits until the planner's inner loops are compiled, because the planner finds different plans until then.

    Prints a line to stderr if this takes more than a second.
    """
    if not compiled.load(timeout=1.0):
        sentence = "loading the planner's inner loops; the first time on a machine compiles them, for half a minute"
        print(sentence, file=sys.stderr, flush=True)
        compiled.load()


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the words into (files and folders, settings of the trainer)."""
    settings = [word for word in words if is_run_file(word) or ("=" in word and not Path(word).exists())]
    return [word for word in words if word not in settings], settings


def _of_settings(settings: Settings) -> Source:
    """The problem of a training step in its first layout, in which the workers of +fail_at and +hang_at are dead.

    The ops of all stages take the same time, unless `model.split=auto` is uneven. In that case the times are in
    proportion to the weights of the layers.
    """
    settings = settings.with_values({"schedule.profile_steps": 0})
    uneven = None
    with suppress(ValueError):  # no layout fits into parallel.memory
        uneven = first_layout(settings)
    if settings.model.split == "auto" and settings.model.auto_split is None:
        settings = settings.with_values({"model.auto_split": uneven})
    problem = initial_problem(settings)
    if uneven is not None:
        problem = counted(problem, settings)
    dead = sorted({fault.worker for fault in faults(settings) if fault.kind in ("kill", "hang")})
    unit = "s" if settings.emulate.mode else "slots"
    layers = ModelLayers(settings)
    layout = layers.start if layers.depth else None
    return Source(problem.replace(failed=dead), unit, settings=settings, layout=layout)


def _of_run(run: RunReader, step: int | None) -> Source:
    """A traced step of a run, by default the last one with a death.

    If the run has no traces, returns the problem of its configuration, with its measured durations.
    """
    if run.traced() or step is not None:
        at = run.last_recovery() if step is None else step
        trace = run.trace(at)
        return Source(trace.problem, trace.time_unit, trace, run, at, layout=trace.layout)
    folder = run.folder
    folder.require()
    settings = folder.read_settings().with_values({"fail_at": [], "hang_at": []})
    try:
        source = _of_settings(settings)
    except ValueError as error:
        raise UnreadableFile(folder.config, str(error)) from None
    measured = run.profile()
    if measured is None:
        return replace(source, run=run)
    profile = Profile(settings)
    if not profile.fits(measured):
        raise UnreadableFile(folder.profile, "its stages differ from those of config.yaml")
    profile.load(measured)
    try:
        layout = profile.layout or source.layout
        return Source(profile.problem(source.problem), "s", run=run, settings=settings, layout=layout)
    except ValueError as error:
        raise UnreadableFile(folder.profile, str(error)) from None


def _with_flags(source: Source, arguments: argparse.Namespace) -> Source:
    """The source after applying the flags. If they change its problem, `shown` is dropped, because it belongs to the
    old problem."""
    if arguments.microbatches is not None and arguments.microbatches < 1:
        raise ValueError("--microbatches must be at least 1")
    keys: Json = {name: getattr(arguments, name) for name in _KEYS if getattr(arguments, name) is not None}
    if arguments.fail is not None:
        keys["failed"] = [_worker("--fail", text) for item in arguments.fail for text in item.split(",")]
    if arguments.durations:
        keys["durations"] = parse_durations(arguments.durations)
    if arguments.memory:
        keys["memory_limit"] = parse_memory(arguments.memory)
    if arguments.speed:
        pairs = [_pair("--speed", item) for item in arguments.speed]
        keys["speed"] = {"{},{}".format(*_worker("--speed", key)): value for key, value in pairs}
    unit = arguments.unit or source.unit
    if not keys:
        shown = None if source.shown is None else replace(source.shown, time_unit=unit)
        return replace(source, unit=unit, shown=shown)
    layout = None if "stages" in keys else source.layout
    return replace(source, problem=source.problem.replace(**keys), unit=unit, shown=None, layout=layout)


def _worker(flag: str, text: str) -> Worker:
    try:
        return Worker.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def _pair(flag: str, text: str) -> tuple[str, Any]:
    """The (key, value) of a text KEY=NUMBER, or KEY=NUMBER/NUMBER/... with one value per stage."""
    key, _, value = text.partition("=")
    try:
        numbers = [float(x) for x in value.split("/")]
    except ValueError:
        raise ValueError(f"{flag}: {text!r} is not of the form KEY=NUMBER") from None
    return key.strip(), numbers if len(numbers) > 1 else numbers[0]


def parse_durations(text: str) -> dict[str, Any]:
    """The problem's `durations` from a text like F=1,I=1/1/2/1. Messages of ValueError start with the flag."""
    return dict(_pair("--durations", item) for item in text.split(","))


def parse_memory(text: str) -> Any:
    """The problem's `memory_limit` from a text: none, a number, one per stage, or 1f1b+k.

    Messages of ValueError start with the flag.
    """
    try:
        if text == "none":
            return None
        if text.startswith("1f1b"):
            return {"base": "1f1b", "extra": int(text[4:] or 0)}
        limits = [None if x == "none" else int(x) for x in text.split("/")]
    except ValueError:
        raise ValueError(f"--memory: {text!r} is not none, a number, one per stage (4/3/6/1), or 1f1b+k") from None
    return limits if len(limits) > 1 else limits[0]
