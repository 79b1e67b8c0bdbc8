"""A coordinator that replaces a lost one. A module of its own, because supervisors need it and do not import numpy."""

from __future__ import annotations

from typing import NamedTuple


class Takeover(NamedTuple):
    """
    term:       term of the new coordinator
    rank:       rank of its supervisor
    lost_rank:  rank of the supervisor whose coordinator was lost
    lost_at:    seconds of the new coordinator's monotonic clock
    elected_at: likewise
    """

    term: int
    rank: int
    lost_rank: int
    lost_at: float
    elected_at: float
