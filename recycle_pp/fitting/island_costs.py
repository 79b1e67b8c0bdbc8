"""The table of `plan --islands 3`: estimated bytes, seconds and dollars of a round.

python -m recycle_pp.plan model=llama1b parallel=4x8 islands.egress_per_gb=0.09 --islands 3 --link 1 --step-seconds 12
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from recycle_pp.config.settings import Settings
from recycle_pp.model.memory import parameters

from .memory_table import settings_of

ROW = 258 / 256  # bytes of an element with islands.bits=8: 256 codes and a float16 scale
LINK, SHARE = 1.0, 0.05  # defaults: gigabits per second, share of the time


@dataclass(frozen=True)
class Costs:
    """
    parameters  number of parameters of the model
    sent        bytes that one island sends in a round, on average over the fragments
    received    bytes that one island receives in a round, also on average
    seconds     time to send and then receive these bytes at the speed of the island's link
    dollars     price of the bytes that one island sends
    steps       smallest islands.steps at which the transfers take at most the given share of the time; None: unknown
    """

    parameters: int
    sent: int
    received: int
    seconds: float
    dollars: float
    steps: int | None


def costs(settings: Settings, islands: int, link: float, share: float, step_seconds: float | None) -> Costs:
    """
    islands       number of islands
    link          speed of an island's link to the store, in 10^9 bits per second
    share         allowed share of the time for transfers
    step_seconds  duration of a step; None: unknown

    Every worker reads the deltas of its stage from all islands, so an island reads them D times.
    Raises ValueError for a model whose parameters are not known before it is built.
    """
    model = settings.model
    if not isinstance(model.layers, int) or not model.own:
        raise ValueError("--islands needs one of this project's models, for instance model=llama1b")
    count = parameters(model, range(model.layers))
    fragments = settings.islands.fragments
    sent = math.ceil(count * (ROW if settings.islands.bits == 8 else 4) / fragments)
    received = sent * islands * settings.parallel.pipelines
    seconds = (sent + received) * 8 / (link * 1e9)
    steps = None if step_seconds is None else fragments * max(1, math.ceil(seconds / (share * step_seconds)))
    return Costs(count, sent, received, seconds, sent * settings.islands.egress_per_gb / 1e9, steps)


def show_costs(arguments: argparse.Namespace, console: Console) -> int:
    """Prints the table, or JSON. Returns the exit code."""
    for name in ("islands", "link", "share", "step_seconds"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value:g}")
    settings = settings_of(arguments)
    found = costs(settings, arguments.islands, arguments.link, arguments.share, arguments.step_seconds)
    if arguments.json:
        print(json.dumps(asdict(found)))
        return 0
    table = Table("of one island, per round", "", title=f"{found.parameters:,} parameters, {arguments.islands} islands")
    table.add_row("sent", f"{found.sent / 1e6:,.1f} MB")
    table.add_row("received", f"{found.received / 1e6:,.1f} MB")
    table.add_row(f"time at {arguments.link:g} Gb/s", f"{found.seconds:,.1f} s")
    table.add_row(f"price at {settings.islands.egress_per_gb:g} dollars/GB", f"{found.dollars:,.4f} dollars")
    if found.steps is not None:
        table.add_row(f"islands.steps for {100 * arguments.share:g} % of the time", f"at least {found.steps:,}")
    console.print(table)
    return 0
