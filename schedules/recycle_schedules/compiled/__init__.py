"""The planner's inner loops, as machine code where it is there.

    from recycle_schedules.compiled import LOOPS, load
    LOOPS.improve(...)                       # machine code if it is there, else the same function in plain Python
    load()                                   # wait until it is there

`python -m recycle_schedules.compiled` makes the machine code and keeps it on disk. Every module of this folder but
`loops` holds functions written for numba that are ordinary Python too.
"""

from .loops import LOOPS, Loops, load

__all__ = ["LOOPS", "Loops", "load"]
