"""Compares measured step times with the plan, with all workers and with one dead. Only the compute is emulated.

    python bench/emulated.py [--steps 12] [--slot 0.02] [schedule.memory_extra=0 ...]
    chrt --rr 1 python bench/emulated.py          # works on a busy machine too; needs CAP_SYS_NICE

Twelve workers (3 x 4, 6 micro-batches per pipeline) sleep for every op: F = I = W = one slot, O = three. Each job runs
`--steps` steps with all workers, then loses W(1,2), then runs as many steps without it. The measured step is the median
from commit to commit. The planner assumes these durations, and messages and sums that take no time.

The last line tests the claim of ReCycle that, with enough memory and a staggered optimizer, a step without W(1,2) takes
as long as a 1F1B step with all workers.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from recycle_schedules import Plan, Worker, plan
from results import save

from recycle_pp.config.compose import compose
from recycle_pp.config.settings import Settings
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.testing.local_cluster import Zygote

DEAD = Worker(1, 2)
SETTLE = 2  # steps not counted after the start and after the death
JOBS = {
    ("coupled 1F1B", "at the commit"): ["schedule=coupled"],
    ("coupled 1F1B", "staggered"): ["schedule=coupled", "optimizer=staggered"],
    ("planner's best", "at the commit"): ["schedule=mixed"],
    ("planner's best", "staggered"): ["schedule=mixed", "optimizer=staggered"],
    ("any memory", "staggered"): ["schedule=mixed", "schedule.memory_extra=null", "optimizer=staggered"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured steps, with all workers and without W(1,2)")
    parser.add_argument("--slot", type=float, default=0.02, help="seconds")
    parser.add_argument("overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        f"{'schedule':<16}{'optimizer':<16}{'dead':<8}{'plan':>9}{'measured':>11}{'over':>8}{'least':>10}{'most':>10}"
    )
    with Zygote() as zygote:
        for (schedule, optimizer), overrides in JOBS.items():
            for row in measure(zygote, [*overrides, *arguments.overrides], arguments.steps, arguments.slot):
                rows.append({"schedule": schedule, "optimizer": optimizer, **row})
                show(rows[-1])
    over = rows[-1]["median"] / rows[0]["median"] - 1
    print(f"{DEAD} dead, any memory, staggered, against 1F1B with all workers: {over:+z.1%}")
    save("emulated.json", rows)


def measure(zygote: Zygote, overrides: list[str], steps: int, slot: float) -> list[dict[str, Any]]:
    """Two rows: with all workers, and without W(1,2)."""
    death = SETTLE + steps
    overrides = [
        *("parallel=3x4", "emulate=sleep", "model=tiny", "run.validate_every=0", f"run.steps={2 * death}"),
        *(f"emulate.{kind}={slot * slots}" for kind, slots in {"F": 1, "I": 1, "W": 1, "O": 3}.items()),
        f"+fail_at={death}:{DEAD}",
        *overrides,
    ]
    settings = compose(overrides)
    with zygote.run(overrides) as job:
        if job.wait(600):
            raise SystemExit(job.output)
        seconds = [line["step_seconds"] for line in job.run.lines(job.run.metrics)]
    return [
        row(None, expected(settings, []), seconds[SETTLE:death]),
        row(str(DEAD), expected(settings, [DEAD]), seconds[death + SETTLE :]),
    ]


def expected(settings: Settings, failed: list[Worker]) -> Plan:
    """The plan that the job follows, which is a pure function of the problem. After a death it may split backwards."""
    problem = initial_problem(settings)
    return plan(problem.replace(failed=failed, backward="mixed") if failed else problem)


def row(dead: str | None, plan: Plan, seconds: list[float]) -> dict[str, Any]:
    assert plan.period is not None
    median = statistics.median(seconds)
    over = median / plan.period - 1
    return {
        **{"dead": dead, "period": plan.period, "makespan": plan.makespan, "lower_bound": plan.lower_bound},
        **{"median": median, "over": over, "seconds": seconds},
    }


def show(row: dict[str, Any]) -> None:
    plan, median, *extremes = (
        1e3 * x for x in (row["period"], row["median"], min(row["seconds"]), max(row["seconds"]))
    )
    print(f"{row['schedule']:<16}{row['optimizer']:<16}{row['dead'] or '-':<8}{plan:>6.0f} ms{median:>8.0f} ms", end="")
    print(f"{row['over']:>+z8.1%}" + "".join(f"{x:>7.0f} ms" for x in extremes), flush=True)


if __name__ == "__main__":
    main()
