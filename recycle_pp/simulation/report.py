"""The result of a comparison, as a table, as JSON, and in sentences.

console.print(table([comparison]))                 # one comparison: all its figures; several: one figure each
as_json(comparison) == {"policies": {"restart": {"relative": 0.53, ...}, ...}}
for sentence in (*summary(comparison), *remarks(comparison)): print(sentence)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from recycle_pp.config.sizes import format_size
from recycle_pp.config.times import format_seconds
from recycle_pp.telemetry.words import plural

from .availability import HOUR
from .compare import Comparison
from .moves import Moves
from .policies import DEFAULT, MOVING
from .prices import Kind
from .run import CAUSES, Outcome
from .shapes import Found

SHOWN = 8
"""Number of shapes in a table, fastest first."""


def table(found: Sequence[Comparison]) -> Table:
    """A table with a row for each policy. A single comparison gets a column for each of its figures. If there are
    several comparisons, each gets one column, with the figure `relative`."""
    out = Table(box=None, pad_edge=False)
    out.add_column("policy")
    names = found[0].outcomes
    if len(found) > 1:
        for comparison in found:
            out.add_column(f"M = {comparison.job.problem.counts[0]}", justify="right")
        for name in names:
            out.add_row(name, *(f"{comparison.outcomes[name].relative:.3f}" for comparison in found))
        return out
    comparison = found[0]
    unit = "tokens/h" if comparison.job.tokens else "micro-batches/h"
    for column in ("fault-free 1F1B = 1", unit, "work", *CAUSES, "steps redone"):
        out.add_column(column, justify="right")
    for name, outcome in names.items():
        shares = (f"{100 * outcome.shares[key]:z.1f} %" for key in ("work", *CAUSES))
        rate = f"{_rate(comparison, outcome):,.0f}"
        out.add_row(name, f"{outcome.relative:.3f}", rate, *shares, f"{outcome.redone:.0f}")
    return out


def as_json(comparison: Comparison, kinds: Sequence[Kind] = ()) -> dict[str, Any]:
    """The figures of each policy.

    relative              throughput relative to fault-free 1F1B
    shares                shares of the time of all D x P workers: `work`, and each cause of lost time
    dollars_per_million   price of a million tokens (or micro-batches, if the job has no tokens), by kind of machine;
                          None if no work was done
    """
    prices = {kind.name: dollars(comparison, kind) for kind in kinds}

    def million(name: str) -> dict[str, Any]:
        of = {kind: price[name] if math.isfinite(price[name]) else None for kind, price in prices.items()}
        return {"dollars_per_million": of} if kinds else {}

    rate = "tokens_per_hour" if comparison.job.tokens else "microbatches_per_hour"
    return {
        "policies": {
            name: {
                "relative": outcome.relative,
                "steps": outcome.steps,
                rate: _rate(comparison, outcome),
                "steps_redone": outcome.redone,
                "shares": outcome.shares,
                **million(name),
            }
            for name, outcome in comparison.outcomes.items()
        }
    }


def summary(comparison: Comparison) -> list[str]:
    """Sentences about the throughput of the trainer, without and with moves of layers, and of the best other policy."""
    shares = {name: outcome.relative for name, outcome in comparison.outcomes.items()}
    out = []
    if DEFAULT in shares:
        out.append(f"recycle_pp re-routes ({DEFAULT}): {shares[DEFAULT]:.3f} of the throughput of fault-free 1F1B")
    if MOVING in shares:
        out.append(f"with schedule.rebalance=auto it also moves layers ({MOVING}): {shares[MOVING]:.3f}")
    others = [name for name in shares if name not in (DEFAULT, MOVING, "bound")]
    if others:
        best = max(others, key=lambda name: shares[name])
        out.append(f"best of the other policies: {best}, {shares[best]:.3f}")
    return out


def remarks(comparison: Comparison) -> list[str]:
    """The assumptions and measurements behind the figures."""
    job, there, costs, times = comparison.job, comparison.there, comparison.costs, comparison.times
    p = job.problem
    share = there.mean / job.workers
    out = [
        f"{p.pipelines} x {p.stages} workers, {p.counts[0]} micro-batches per pipeline, {p.model.count} layers; a "
        f"fault-free step of 1F1B takes {format_seconds(times.reference)} ({job.source})",
        f"{there.machines} machines for {format_seconds(there.seconds)}: {there.losses} losses, {there.mean:.1f} up "
        f"on average ({share:.1%} of the job's workers)",
        f"stalls: {costs.recovery.source}",
        *([moves_in_words(costs.moves)] if MOVING in comparison.outcomes else []),
        f"assumed: a worker's state of {format_size(job.state_bytes(job.layout))} at {format_size(costs.bandwidth)}/s, "
        f"start {format_seconds(costs.start)}, restart {format_seconds(costs.restart)}, checkpoint "
        f"{format_seconds(costs.checkpoint)}, spare {format_seconds(costs.swap)}, Oobleck and Bamboo reconfigure "
        f"{format_seconds(costs.reconfigure)}",
    ]
    if times.covered < 0.999:
        out.append(
            f"planned: {plural(len(times.planned), 'membership')}, {times.covered:.0%} of the time that needs plans; "
            f"the others are estimated by their load (plans differ from such estimates by {times.spread:.1%})"
        )
    return out


def moves_in_words(moves: Moves) -> str:
    """The measured costs of moves of layers, with their source."""
    return (
        f"moves of layers: {moves.source}; in addition to the transfer a move takes {moves.steps:.2f} steps, which are "
        f"{moves.slowed:.1%} slower, and its switch stalls all workers for {format_seconds(moves.switch)} (medians)"
    )


def dollars(comparison: Comparison, kind: Kind) -> dict[str, float]:
    """The price of a million tokens (or micro-batches, if the job has no tokens) on machines of this kind, by policy.

    All machines that are up are paid for. The price is infinite if no work was done.
    """
    hours = comparison.there.mean * comparison.there.seconds / HOUR
    done = {name: _rate(comparison, o) * comparison.there.seconds / HOUR for name, o in comparison.outcomes.items()}
    return {name: 1e6 * hours * kind.dollars_an_hour / n if n else math.inf for name, n in done.items()}


def price_table(found: Sequence[tuple[Kind, Comparison]]) -> Table:
    """A table with a row for each policy, and two columns for each kind of machine: share of the throughput of
    fault-free 1F1B, and dollars per million tokens."""
    thing = "tokens" if found[0][1].job.tokens else "micro-batches"
    out = Table(box=None, pad_edge=False)
    out.add_column("policy")
    for kind, _ in found:
        out.add_column(f"{kind.name}: share", justify="right")
        out.add_column(f"$ per million {thing}", justify="right")
    prices = [dollars(comparison, kind) for kind, comparison in found]
    for name in found[0][1].outcomes:
        cells = []
        for price, (_, comparison) in zip(prices, found, strict=True):
            cells += [f"{comparison.outcomes[name].relative:.3f}", f"{price[name]:.4g}"]
        out.add_row(name, *cells)
    return out


def shape_table(found: Sequence[Found]) -> Table:
    """The SHOWN fastest shapes, fastest first. The columns for work and causes are those of `table`."""
    out = Table(box=None, pad_edge=False)
    for column in ("pipelines x stages x micro-batches", "micro-batches/h", "work", *CAUSES):
        out.add_column(column, justify="right")
    for one in found[:SHOWN]:
        p = one.job.problem
        shares = (f"{100 * one.outcome.shares[key]:z.1f} %" for key in ("work", *CAUSES))
        out.add_row(f"{p.pipelines} x {p.stages} x {p.counts[0]}", f"{one.rate:,.0f}", *shares)
    return out


def _rate(comparison: Comparison, outcome: Outcome) -> float:
    each = comparison.job.tokens or comparison.job.total
    return 3600 * outcome.steps * each / outcome.seconds
