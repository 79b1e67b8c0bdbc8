"""The charts of a run, and the plans to compare them with.

    charts_of(RunReader("runs/demo"), step=20, with_plan=True)
    before_move(RunReader("runs/demo"), step=20)                   # the step before, if layers moved in between
    baselines(plan)                                                # the same job without deaths

Each function raises ValueError or OSError, with one sentence, if a file cannot be read.
"""

from __future__ import annotations

from dataclasses import replace

from recycle_schedules import Plan, Problem, Trace, plan, plan_layout
from recycle_schedules.analysis.simulate import simulate

from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.telemetry.words import names, plural
from recycle_pp.wire.records import Step

from . import report
from .chart import Chart

SAME_LAYERS = " with the same layers"
"""Suffix of a plan's name: the plan has no deaths, but its stages contain the same layers as in the plan with
deaths."""


def charts_of(run: RunReader, step: int, *, with_plan: bool) -> list[Chart]:
    """The chart of the measured step. If `with_plan`, also that of the planner's plan of the same problem, in the same
    unit. For a step with a death, this is the plan of the following steps."""
    trace = Chart.of(run.trace(step), f"step {step}, as measured")
    if not with_plan or trace.problem.remainder or not trace.problem.durations:
        return [trace]
    planned = plan(trace.problem)
    planned = replace(planned, time_unit=trace.unit, layout=trace.plan.layout)
    return [trace, Chart.of(planned, "the new plan" if trace.recovery else "the plan")]


def before_move(run: RunReader, step: int) -> list[Chart]:
    """The chart of the previous step, if layers moved to other stages between the two; else []."""
    if step - 1 not in run.traced():
        return []
    before, after = run.trace(step - 1), run.trace(step)
    return [] if before.layout == after.layout else [Chart.of(before, f"step {step - 1}")]


def baselines(
    of: Plan, run: RunReader | None = None, step: int = 0, problem: Problem | None = None
) -> list[tuple[str, Plan]]:
    """The plans to compare with a step, as (name, plan).

    - A measured step is compared with the previous traced step.
    - A planned step is compared with fault-free 1F1B. With deaths, it is also compared with the fault-free plan of the
      same job and, if the problem gives layers, with the plan that only re-routes and moves no layers. With `links`, it
      is also compared with the plan that ignores them.

    of       the step's plan
    run      the run of a measured step, None for a planned step
    step     the measured step
    problem  the planned problem, if it gives layers"""
    if run is not None:
        before = [s for s in run.traced() if s < step]
        return [(f"step {before[-1]}", Chart.of(run.trace(before[-1])).plan)] if before else []
    p = of.problem
    if isinstance(of, Trace) or p.remainder:
        return []
    alive = p.replace(failed=None)
    same = ""
    extra: list[tuple[str, Plan]] = []
    if problem is not None and problem.layers is not None:
        fault_free = plan_layout(problem.replace(failed=None))
        alive, layout = fault_free.problem, fault_free.layout
        if p.dead and layout is not None:
            extra = [("re-routed", plan(problem.with_layout(layout)))]
    elif of.layout is not None and p.dead:  # keeps the layers, because the layout without deaths is unknown
        same = SAME_LAYERS
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
    """The title of a plan's chart: its dead workers, or "fault-free"."""
    dead = [f"W({w.pipeline},{w.stage})" for w in sorted(plan.problem.dead)]
    return f"{names(dead, 4)} dead" if dead else "fault-free"


def totals(run: RunReader) -> str:
    """The figures of the whole run in words; "" while it is running."""
    summary = run.summary()
    if summary is None or "lost_ops" not in summary:
        return ""
    bubbles, redone = summary.get("bubbles"), summary.get("redone_ops", 0)
    share = "" if bubbles is None else f"bubbles {report.percent(bubbles)} (median), "
    return f"the whole run: {share}{plural(summary['lost_ops'], 'op')} lost, {redone} redone"


def progress(last: Step | None) -> str:
    """The last committed step, in words."""
    if last is None:
        return "no step yet"
    words = [f"step {last.step}"]
    words += [] if last.loss is None else [f"loss {last.loss:.4f}"]
    words += [f"{last.tokens_per_second:,.0f} tokens/s"] if last.tokens_per_second else []
    words += [f"{last.live_workers} live workers"] if last.live_workers else []
    return ", ".join(words)
