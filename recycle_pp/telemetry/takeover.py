"""One coordinator in the place of another. A file of its own: supervisors, which import no numpy, need it."""

from __future__ import annotations

from typing import NamedTuple


class Takeover(NamedTuple):
    """lost_at, elected_at: seconds of the new one's monotonic clock."""

    term: int
    rank: int
    lost_rank: int
    lost_at: float
    elected_at: float
