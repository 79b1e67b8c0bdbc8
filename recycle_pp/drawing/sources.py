"""Where charts come from: a file with a plan, trace or problem, a run folder, or a problem on flags.

    read("plan.json"); read("traces/step-000020.json"); read("problem.json")      # a problem is planned
    run = Run("runs/demo"); run.steps; run.newest; run.trace(20)
    baselines(plan)                                                               # the same job with nobody dead

Everything wrong with them is a ValueError or OSError in one sentence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recycle_schedules import Plan, Problem, Trace, plan

from .chart import Chart


def read(path: str | Path) -> Plan:
    """The plan or trace of a file; a file with a problem is planned."""
    try:
        data = json.loads(Path(path).read_text())
        if isinstance(data, dict) and "pipelines" in data:
            return plan(Problem.from_json(data))
        return (Trace if isinstance(data, dict) and "generation" in data else Plan).from_json(data)
    except json.JSONDecodeError as e:
        raise ValueError(f"{path}: not JSON ({e})") from None
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    except (TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError):
        raise ValueError(f"{path}: neither a plan, a trace nor a problem") from None


class Run:
    """The traces of a run folder. Only steps around a death or a rejoin leave one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{path} is no folder")

    @property
    def steps(self) -> list[int]:
        found = (p.stem.removeprefix("step-") for p in (self.path / "traces").glob("step-*.json"))
        return sorted(int(s) for s in found if s.isdecimal())

    def trace(self, step: int) -> Plan:
        steps = self.steps
        if step not in steps:
            known = f"there are {', '.join(map(str, steps))}" if steps else "there are none yet"
            raise ValueError(f"{self.path} has no trace of step {step}; {known}")
        return read(self.path / "traces" / f"step-{step:06d}.json")

    @property
    def newest(self) -> int:
        """The last step in which somebody died, else the last that was traced."""
        steps = self.steps
        if not steps:
            raise ValueError(f"{self.path} has no traces; steps around a death or a rejoin leave one")
        hit = (s for s in reversed(steps) if (t := self.trace(s)) and isinstance(t, Trace) and t.phases)
        return next(hit, steps[-1])

    @property
    def ended(self) -> bool:
        return (self.path / "summary.json").exists()

    def progress(self) -> str:
        """The last line of the metrics, in words."""
        last = _last_line(self.path / "metrics.jsonl")
        if not last:
            return "no step yet"
        words = [f"step {last.get('step')}"]
        words += [f"loss {last['loss']:.4f}"] if isinstance(last.get("loss"), float) else []
        words += [f"{last['tokens_per_second']:,.0f} tokens/s"] if last.get("tokens_per_second") else []
        words += [f"{last['live_workers']} live workers"] if last.get("live_workers") else []
        return ", ".join(words)


def charts_of(run: Run, step: int, *, with_plan: bool) -> list[Chart]:
    """The step as it went, and beside it what the planner makes of the same problem in the same unit: for a step in
    which somebody died, the plan of the steps that follow."""
    trace = Chart.of(run.trace(step), f"step {step}, as it went")
    if not with_plan or trace.problem.remainder or not trace.problem.durations:
        return [trace]
    planned = plan(trace.problem)
    planned = type(planned)(planned.problem, planned.arrays, planned.lower_bound, trace.unit)
    return [trace, Chart.of(planned, "the new plan" if trace.recovery else "the plan")]


def baselines(of: Plan, run: Run | None = None, step: int = 0) -> list[tuple[str, Plan]]:
    """What a step is compared with: a measured one with the traced step before, a planned one with fault-free 1F1B and,
    where somebody is dead, with the fault-free plan of the same job."""
    if run is not None:
        before = [s for s in run.steps if s < step]
        return [(f"step {before[-1]}", Chart.of(run.trace(before[-1])).plan)] if before else []
    p = of.problem
    if isinstance(of, Trace) or p.remainder:
        return []
    alive = p.replace(failed=None)
    one_f_one_b = alive.replace(backward="coupled", optimizer="barrier" if p.optimizer != "none" else "none",
                                memory_limit={"base": "1f1b", "extra": 0}, reroute=None)  # fmt: skip
    found = [("fault-free 1F1B", plan(one_f_one_b)), *([("fault-free", plan(alive))] if p.dead else [])]
    return [(name, type(b)(b.problem, b.arrays, b.lower_bound, of.time_unit)) for name, b in found]


def title_of(plan: Plan) -> str:
    """Fault-free, or who is dead."""
    dead = sorted(plan.problem.dead)
    names = ", ".join(f"W({w.pipeline},{w.stage})" for w in dead[:4]) + (
        f" and {len(dead) - 4} more" if len(dead) > 4 else ""
    )
    return f"{names} dead" if dead else "fault-free"


def _last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a .jsonl file that grows; {} if there is none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return {}
