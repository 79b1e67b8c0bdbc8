"""The plans with which charts are compared, and the traces of a run folder.

    run = Run("runs/demo"); run.steps; run.newest; run.trace(20)
    baselines(plan)                                                # the same job without deaths

Every mistake in them is a ValueError or OSError with one sentence.
"""

from __future__ import annotations

from pathlib import Path

from recycle_schedules import Plan, Problem, Trace, load, plan, plan_layout
from recycle_schedules.analysis.simulate import simulate

from recycle_pp.wire.files import UnreadableFile, decode, open_regular, read
from recycle_pp.wire.records import Step, Summary
from recycle_pp.wire.terms import EARLIER, Terms

from . import report
from .chart import Chart


class Run:
    """The traces of a run folder. Only steps around a death or a rejoin have one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise ValueError(f"{path} is not a folder")

    @property
    def steps(self) -> list[int]:
        found = (p.stem.removeprefix("step-") for p in (self.path / "traces").glob("step-*.json"))
        return sorted(int(s) for s in found if s.isdecimal())

    def trace(self, step: int) -> Plan:
        steps = self.steps
        if step not in steps:
            known = f"there are {', '.join(map(str, steps))}" if steps else "there are none yet"
            raise ValueError(f"{self.path} has no trace of step {step}; {known}")
        path = self.path / "traces" / f"step-{step:06d}.json"
        with open_regular(path):  # reading a pipe would never end
            pass
        try:
            return load(path)
        except UnicodeDecodeError:
            raise UnreadableFile(path, "it is not text") from None
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError) as e:
            raise UnreadableFile(path, f"it is not a trace ({str(e).removeprefix(f'{path}: ')})") from None

    @property
    def newest(self) -> int:
        """The last step with a death, otherwise the last one with a trace."""
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
        last = _last_step(self.path / "metrics.jsonl")
        if last is None:
            return "no step yet"
        words = [f"step {last['step']}"]
        words += [f"loss {loss:.4f}"] if (loss := last.get("loss")) is not None else []
        words += [f"{speed:,.0f} tokens/s"] if (speed := last.get("tokens_per_second")) else []
        words += [f"{live} live workers"] if (live := last.get("live_workers")) else []
        return ", ".join(words)


def charts_of(run: Run, step: int, *, with_plan: bool) -> list[Chart]:
    """The measured step, and with it the planner's plan of the same problem in the same unit. For a step with a death,
    that is the plan of the following steps."""
    trace = Chart.of(run.trace(step), f"step {step}, as it went")
    if not with_plan or trace.problem.remainder or not trace.problem.durations:
        return [trace]
    planned = plan(trace.problem)
    planned = type(planned)(planned.problem, planned.arrays, planned.lower_bound, trace.unit)
    return [trace, Chart.of(planned, "the new plan" if trace.recovery else "the plan")]


def baselines(
    of: Plan, run: Run | None = None, step: int = 0, problem: Problem | None = None
) -> list[tuple[str, Plan]]:
    """The plans for comparison with a step.

    - a measured step: the previous traced step
    - a planned step: fault-free 1F1B; with deaths also the fault-free plan of the same job; with layers also re-routing
      without moving them

    problem: the planned problem, if it gives layers."""
    if run is not None:
        before = [s for s in run.steps if s < step]
        return [(f"step {before[-1]}", Chart.of(run.trace(before[-1])).plan)] if before else []
    p = of.problem
    if isinstance(of, Trace) or p.remainder:
        return []
    alive, same, extra = p.replace(failed=None), "", list[tuple[str, Plan]]()
    if problem is not None and problem.layers is not None:
        fault_free = plan_layout(problem.replace(failed=None))
        alive, layout = fault_free.problem, fault_free.layout
        if p.dead and layout is not None:
            extra = [("re-routed", plan(problem.with_layout(layout)))]
    elif of.layout is not None and p.dead:  # the job's layers without deaths are unknown
        same = " with the same layers"
    one_f_one_b = alive.replace(backward="coupled", optimizer="barrier" if p.optimizer != "none" else "none",
                                memory_limit={"base": "1f1b", "extra": 0}, reroute=None)  # fmt: skip
    found = [(f"fault-free 1F1B{same}", plan(one_f_one_b)), *extra]
    if p.dead:
        found.insert(1, (f"fault-free{same}", plan(alive)))
    if p.links is not None:
        ignoring = simulate(plan(p.replace(links=None)), links=p.links)
        found.append(("ignoring links", Plan(ignoring.problem, ignoring.arrays)))
    return [(name, type(b)(b.problem, b.arrays, b.lower_bound, of.time_unit)) for name, b in found]


def title_of(plan: Plan) -> str:
    """Fault-free, or the dead workers."""
    dead = sorted(plan.problem.dead)
    names = ", ".join(f"W({w.pipeline},{w.stage})" for w in dead[:4]) + (
        f" and {len(dead) - 4} more" if len(dead) > 4 else ""
    )
    return f"{names} dead" if dead else "fault-free"


def totals(run: Run) -> str:
    """The figures of the whole run; "" while it is running."""
    path = run.path / "summary.json"
    try:
        summary = decode(path, read(path), Summary)
    except FileNotFoundError:
        return ""
    if "lost_ops" in summary:
        bubbles, redone = summary.get("bubbles"), summary.get("redone_ops", 0)
        share = "" if bubbles is None else f"bubbles {report.percent(bubbles)} (median), "
        return f"the whole run: {share}{report.count_of(summary['lost_ops'], 'op')} lost, {redone} redone"
    return ""


def _last_step(path: Path) -> Step | None:
    """The last complete and valid line of a growing metrics.jsonl; None if there is none."""
    try:
        lines = read(path).splitlines()
    except FileNotFoundError:
        return None
    last, terms = None, Terms()
    for line in lines:
        try:
            record = decode(path, line, Step)
        except UnreadableFile:
            if not line.startswith(b"{"):
                raise
            continue
        if terms.counts(record.get("term", EARLIER)):
            last = record
    return last
