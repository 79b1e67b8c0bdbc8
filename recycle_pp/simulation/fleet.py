"""The cheapest machines for a target speed, as a mixed-integer linear program.

    fleet = cheapest(kinds, target=40.0, repair=1200, lost=8.0)       # needs scipy
    fleet.counts, fleet.dollars_an_hour

Whole machines n_k of each kind k, of which a share a_k is there, are paid while they are there, work s_k times as fast
as the job's own, and are interrupted i_k times an hour. Each interruption costs the whole job `lost` seconds:

    minimise    sum n_k a_k price_k
    subject to  sum n_k a_k s_k  >=  target (1 + sum n_k a_k i_k lost / 3600)
                sum n_k a_k      >=  least,      n_k <= limit_k
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from .availability import HOUR
from .broken_step import BrokenSteps
from .costs import Costs
from .job import Job
from .prices import Kind
from .step_times import StepTimes


@dataclass(frozen=True)
class Fleet:
    """counts: machines of each kind, in their order. All else on average, counting only machines that are there."""

    counts: tuple[int, ...]
    dollars_an_hour: float
    machines: float
    speed: float  # of all together, in machines of speed 1, after what interruptions cost
    interruptions: float  # an hour


@dataclass(frozen=True)
class Demand:
    """machines: of speed 1, always there, that a speed takes. lost: seconds of the job that an interruption costs."""

    machines: float
    lost: float


def demand(job: Job, costs: Costs, per_hour: float) -> Demand:
    """What so many tokens (micro-batches, where the job has none) an hour take, by the plan of the job with nobody
    dead: a fleet is as efficient as that, whatever its size. An interruption costs a stall, what it adds to the step,
    and the replacement's start and transfer, which keep one worker of all from working. ValueError if `per_hour` is
    not above 0."""
    if not per_hour > 0:
        raise ValueError("--fleet must be above 0")
    times = StepTimes(job, plans=1)
    step = times.seconds(job.whole, job.layout)
    each_hour = HOUR / step * (job.tokens or job.total)
    broken = BrokenSteps(times)
    stages = range(job.stages) if job.pipelines > 1 else ()  # a single pipeline has no peers: the step is lost
    excess = mean([broken.excess(job.whole, job.layout, stage) for stage in stages] or [step])
    absent = (costs.start + costs.transfer(job.state_bytes(job.layout))) / job.workers
    return Demand(job.workers * per_hour / each_hour, mean(costs.recovery.stalls) + excess + absent)


def cheapest(kinds: Sequence[Kind], target: float, *, repair: float, lost: float, least: float = 0.0) -> Fleet:
    """The fleet of the least cost.

    target  speed, in machines of speed 1 that are always there and never interrupted
    repair  seconds until a machine that was taken away is replaced
    lost    seconds of the whole job that an interruption costs
    least   machines that must be there on average, for instance the stages of the job
    ValueError if there is none within the limits, or if scipy is not installed."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        raise ValueError("--fleet needs scipy: pip install -e '.[fleet]' in the clone of recycle_pp") from None
    up = np.array([kind.up(repair) for kind in kinds])
    worth = np.array([net_speed(kind, target, repair, lost) for kind in kinds])
    price = up * [kind.dollars_an_hour for kind in kinds]
    limit = np.array([math.inf if kind.limit is None else kind.limit for kind in kinds])
    found = milp(
        price,
        constraints=[LinearConstraint(worth[None, :], lb=target), LinearConstraint(up[None, :], lb=least)],
        integrality=np.ones(len(kinds)),
        bounds=Bounds(0, limit),
    )
    if found.x is None:
        raise ValueError("--fleet: within the limits of --prices no machines reach the target")
    return of(kinds, tuple(round(n) for n in found.x), repair=repair, lost=lost)


def of(kinds: Sequence[Kind], counts: Sequence[int], *, repair: float, lost: float) -> Fleet:
    """The figures of a fleet."""
    there = [n * kind.up(repair) for n, kind in zip(counts, kinds, strict=True)]
    interruptions = sum(n * kind.interruptions for n, kind in zip(there, kinds, strict=True))
    speed = sum(n * kind.speed for n, kind in zip(there, kinds, strict=True)) / (1 + interruptions * lost / HOUR)
    dollars = sum(n * kind.dollars_an_hour for n, kind in zip(there, kinds, strict=True))
    return Fleet(tuple(counts), dollars, sum(there), speed, interruptions)


def net_speed(kind: Kind, target: float, repair: float, lost: float) -> float:
    """What one more machine adds to a job that is to run at the target: its speed, less what its interruptions cost."""
    return kind.up(repair) * (kind.speed - target * kind.interruptions * lost / HOUR)
