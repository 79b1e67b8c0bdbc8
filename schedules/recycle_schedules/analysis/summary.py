"""The key figures of a plan.

for name, text in summary(plan): print(name, text)
"""

from __future__ import annotations

from dataclasses import dataclass

from ..in_flight import peaks
from ..ops import O
from ..planner import plan as make_plan
from ..plans import Plan
from ..problem import Problem
from .one_f_one_b import one_f_one_b
from .simulate import simulate


@dataclass(frozen=True)
class Baselines:
    """Two plans of the same step with every worker alive and of equal speed: 1F1B, and zero-bubble."""

    one_f_one_b: Plan
    zero_bubble: Plan

    @classmethod
    def of(cls, problem: Problem, seconds: float = 0.0) -> Baselines:
        """Both plans of a whole step. 1F1B disregards the memory limit; zero-bubble (split backward) keeps to it.

        seconds: search time of the zero-bubble plan."""
        whole = problem.replace(failed=[], speed={}, done=None, busy_until=None, committed=None)
        split = "decoupled" if whole.backward == "coupled" else whole.backward
        return cls(
            one_f_one_b(whole.replace(backward="coupled")), make_plan(whole.replace(backward=split), seconds=seconds)
        )


def bubble_share(plan: Plan) -> float:
    """Share of the live workers' time (a period, or the makespan) in which no F, I, W or B runs."""
    a = plan.arrays
    compute = a.kind != O
    busy = float((a.end - a.start)[compute].sum())
    time = plan.value * len(plan.problem.workers())
    return 1 - busy / time if time else 0.0


def summary(plan: Plan, baselines: Baselines | None = None) -> list[tuple[str, str]]:
    """Rows of (name, formatted value); with `baselines` also how far the plan is above them."""
    unit = plan.time_unit
    top = peaks(plan)
    fullest = max(top, key=lambda w: top[w])
    limit = plan.problem.limit(fullest)
    rows = [
        ("makespan", f"{plan.makespan:g} {unit}"),
        ("period", "- (remainder of a step)" if plan.period is None else f"{plan.period:g} {unit}"),
        ("lower bound", f"{plan.lower_bound:g} {unit}"),
        ("gap", f"{100 * plan.gap:.2f} %" + (" (optimal)" if plan.gap < 1e-6 else "")),
        ("bubble share", f"{100 * bubble_share(plan):.1f} %"),
        ("peak in flight", f"{top[fullest]:g} micro-batches on {fullest} (limit {limit:g})"),
    ]
    if plan.problem.links is not None:
        ignoring = simulate(make_plan(plan.problem.replace(links=None)), links=plan.problem.links).value
        rows.append(("against ignoring links", f"{_over(plan, ignoring):+.1f} % ({ignoring:g} {unit})"))
    if baselines is not None:
        for name, base in (("1F1B", baselines.one_f_one_b), ("zero-bubble", baselines.zero_bubble)):
            rows.append((f"against fault-free {name}", f"{_over(plan, base.value):+.1f} % ({base.value:g} {unit})"))
    return rows


def _over(plan: Plan, value: float) -> float:
    """By how many per cent the plan's value is above another one."""
    return 100 * (plan.value / value - 1) if value else 0.0
