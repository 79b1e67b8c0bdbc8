"""The planner's inner loops, compiled by numba.

    from recycle_schedules.compiled import LOOPS, load
    LOOPS.improve(...)                       # compiled if ready, else the same function in plain Python
    load()                                   # wait for the compiled code

`python -m recycle_schedules.compiled` compiles the loops and caches them on disk. All modules of this folder except
`loops` contain functions for numba that also run as plain Python.
"""

from .loops import LOOPS, Loops, load

__all__ = ["LOOPS", "Loops", "load"]
