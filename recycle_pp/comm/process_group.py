"""The process group of recycle_pp; see links.py for what the executor uses."""

from recycle_pp.comm.abort import LinkBroken
from recycle_pp.comm.links import Links, Pending

__all__ = ["LinkBroken", "Links", "Pending"]
