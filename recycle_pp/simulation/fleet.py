"""The cheapest machines for a target speed, as a mixed-integer linear program.

    fleet = cheapest(kinds, target=40.0, repair=1200, lost=8.0)       # needs scipy
    fleet.counts, fleet.dollars_an_hour

There are n_k whole machines of kind k. Each is up for a share a_k of the time and is paid for while it is up. It works
s_k times as fast as the job's own machines and is interrupted i_k times an hour. Each interruption costs the whole job
`lost` seconds. The fleet must have the speed of `target` of the job's own machines, and at least `least` machines must
be up on average:

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
    """A number of machines of each kind, in the order of the kinds, and averages over time.

    A machine counts in the averages only while it is up.
    """

    counts: tuple[int, ...]
    dollars_an_hour: float
    machines: float
    speed: float  # total speed, in machines of speed 1, after the cost of interruptions
    interruptions: float  # per hour


@dataclass(frozen=True)
class Demand:
    """The machines that a throughput requires.

    machines   machines of speed 1 that would be enough without interruptions
    lost       seconds that one interruption costs the whole job
    """

    machines: float
    lost: float


def demand(job: Job, costs: Costs, per_hour: float) -> Demand:
    """The machines that a throughput requires, computed from the job's plan without deaths.

    Any fleet is assumed to be as efficient as that plan. An interruption costs a stall and the extra time of the step.
    In addition, one worker is missing while its replacement starts and receives the state.

    per_hour: tokens per hour (micro-batches if the job has no tokens). Raises ValueError if it is not above 0.
    """
    if not per_hour > 0:
        raise ValueError("--fleet must be above 0")
    times = StepTimes(job, plans=1)
    step = times.seconds(job.whole, job.layout)
    each_hour = HOUR / step * (job.tokens or job.total)
    broken = BrokenSteps(times)
    stages = range(job.stages) if job.pipelines > 1 else ()  # a single pipeline has no peers, so the step is lost
    excess = mean([broken.excess(job.whole, job.layout, stage) for stage in stages] or [step])
    absent = (costs.start + costs.transfer(job.state_bytes(job.layout))) / job.workers
    return Demand(job.workers * per_hour / each_hour, mean(costs.recovery.stalls) + excess + absent)


def cheapest(kinds: Sequence[Kind], target: float, *, repair: float, lost: float, least: float = 0.0) -> Fleet:
    """The cheapest fleet.

    target  speed, in machines of speed 1 that are always up and never interrupted
    repair  seconds until an interrupted machine is replaced
    lost    seconds that one interruption costs the whole job
    least   number of machines that must be up on average, for instance the number of stages

    Raises ValueError if no fleet within the limits reaches the target, or if scipy is not installed."""
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
        raise ValueError("--fleet: no fleet within the limits of --prices reaches the target")
    return of(kinds, tuple(round(n) for n in found.x), repair=repair, lost=lost)


def of(kinds: Sequence[Kind], counts: Sequence[int], *, repair: float, lost: float) -> Fleet:
    """The figures of the fleet with these counts."""
    there = [n * kind.up(repair) for n, kind in zip(counts, kinds, strict=True)]
    interruptions = sum(n * kind.interruptions for n, kind in zip(there, kinds, strict=True))
    speed = sum(n * kind.speed for n, kind in zip(there, kinds, strict=True)) / (1 + interruptions * lost / HOUR)
    dollars = sum(n * kind.dollars_an_hour for n, kind in zip(there, kinds, strict=True))
    return Fleet(tuple(counts), dollars, sum(there), speed, interruptions)


def net_speed(kind: Kind, target: float, repair: float, lost: float) -> float:
    """The gain in speed from one more machine, for a job of speed `target`: the machine's own speed, minus the cost of
    its interruptions, both averaged over the time that it is up and down."""
    return kind.up(repair) * (kind.speed - target * kind.interruptions * lost / HOUR)
