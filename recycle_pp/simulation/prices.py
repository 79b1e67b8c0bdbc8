"""Prices of machines, and the resulting price of tokens.

kinds = read_prices("prices.csv")
kinds[0].dollars_an_hour, kinds[0].mtbf, kinds[0].up(repair=1200)

The file is a CSV with a header. A row is a kind of machine:

    kind,price,interruptions_per_hour[,speed][,limit]

price   dollars per hour that a machine is up
speed   relative to the machine on which the job's durations were measured (default 1)
limit   maximum number of machines of the kind (default: unlimited)
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from .availability import HOUR

COLUMNS = ("kind", "price", "interruptions_per_hour", "speed", "limit")


@dataclass(frozen=True)
class Kind:
    name: str
    dollars_an_hour: float
    interruptions: float  # per machine and hour
    speed: float = 1.0
    limit: int | None = None

    @property
    def mtbf(self) -> float:
        """Mean seconds between interruptions; infinite if there are none."""
        return HOUR / self.interruptions if self.interruptions else math.inf

    def up(self, repair: float) -> float:
        """The share of time that a machine is up, if a replacement takes `repair` seconds."""
        return 1 / (1 + self.interruptions * repair / HOUR)


def read_prices(path: str | Path) -> list[Kind]:
    """The kinds of machines in a file. Raises ValueError if the file is malformed (the message is one sentence),
    OSError if it cannot be read."""
    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file, skipinitialspace=True))
    try:
        kinds = [_kind(row) for row in rows]
        if not kinds:
            raise ValueError("it has no rows")
        if len({kind.name for kind in kinds}) < len(kinds):
            raise ValueError("a kind has more than one row")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--prices {path}: must be a CSV with columns kind, price, interruptions_per_hour and optionally speed, "
            f"limit; {error}"
        ) from None
    return kinds


def _kind(row: dict[str, str]) -> Kind:
    if set(row) - set(COLUMNS):
        raise ValueError(f"unknown column {sorted(map(str, set(row) - set(COLUMNS)))[0]!r}")
    limit = (row.get("limit") or "").strip()
    kind = Kind(
        row["kind"].strip(), float(row["price"]), float(row["interruptions_per_hour"]),
        float(row.get("speed") or 1), int(limit) if limit else None,
    )  # fmt: skip
    fine = kind.dollars_an_hour >= 0 and kind.interruptions >= 0 and kind.speed > 0 and (kind.limit or 0) >= 0
    if not fine or not all(map(math.isfinite, (kind.dollars_an_hour, kind.interruptions, kind.speed))):
        raise ValueError(f"{kind.name}: price and interruptions must be at least 0, and speed above 0")
    return kind
