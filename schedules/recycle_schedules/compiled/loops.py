"""Loads or compiles the loops in a thread. Until it finishes, LOOPS holds the same functions in plain Python.

Compiled code loads from the disk cache in a fraction of a second. The cache is in NUMBA_CACHE_DIR, by default next
to the source files. The first use on a machine compiles the loops, which takes up to half a minute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba

from . import local_search, one_machine, portfolio, timing

Function = Callable[..., Any]

PROBLEM = "todo u1[::1], sent u1[::1], duration i8[:,::1]"
TRAVEL = "travel i8[:,::1]"
SEQUENCES = "first i8[::1], length i8[::1], codes i8[::1], starts i8[::1], order i8[::1]"
MEMORY = f"cap f8[::1], held f8[::1], release i8[::1], {TRAVEL}, i_release f8"
SIGNATURES: dict[Function, str] = {
    portfolio.try_policies: "stages i8, hosts i8[:,::1], keys i8[:,::1], windows i8[:,::1], fuses b1[:,::1], "
    f"table i8[:,::1], {PROBLEM}, {MEMORY}, lag i8[::1], steady b1, target i8",
    local_search.improve: f"stages i8, host i8[::1], free b1[::1], {PROBLEM}, {MEMORY}, mixed b1[::1], lag i8[::1], "
    f"target i8, {SEQUENCES}, iterations i8, heat f8, weight f8, state i8[::1]",
    timing.earliest: f"stages i8, host i8[::1], {PROBLEM}, release i8[::1], {TRAVEL}, {SEQUENCES}",
    timing.stage_times: "stages i8, host i8[::1], duration i8[:,::1], codes i8[::1], starts i8[::1]",
    timing.latest: f"stages i8, host i8[::1], {PROBLEM}, {TRAVEL}, codes i8[::1], order i8[::1], placed i8, "
    "deadline i8[::1], starts i8[::1]",
    one_machine.one_machine: "begin i8[::1], head f8[::1], length f8[::1], tail f8[::1], order i8[::1], rank i8[::1]",
}
"""Names and types of all arguments. With explicit types numba compiles or loads each function eagerly, exactly
once."""


class Loops:
    """The inner loops as attributes. compiled: whether the loops are machine code."""

    def __init__(self) -> None:
        self.compiled = False
        self.try_policies: Function = portfolio.try_policies
        self.improve: Function = local_search.improve
        self.earliest: Function = timing.earliest
        self.latest: Function = timing.latest
        self.stage_times: Function = timing.stage_times
        self.one_machine: Function = one_machine.one_machine


LOOPS = Loops()
_thread: list[threading.Thread] = []


def load(timeout: float | None = None) -> bool:
    """Start loading the loops and wait for them. Returns whether they are compiled.

    timeout: maximum wait in seconds, None for no limit. After a timeout the loading thread continues. When it finishes,
    LOOPS switches to the compiled functions. Safe to call from any thread."""
    if not _thread:
        _thread.append(threading.Thread(target=_load, name="recycle-schedules-compile"))
        _thread[0].start()
    _thread[0].join(timeout)
    return LOOPS.compiled


def _load() -> None:
    made: dict[str, Function] = {}
    for function in SIGNATURES:
        if not threading.main_thread().is_alive():  # the process is exiting, so the next one compiles the rest
            return
        made[function.__name__] = _compile(function)
    LOOPS.__dict__.update(made, compiled=True)


def _compile(function: Function) -> Function:
    types = [argument.split()[-1] for argument in SIGNATURES[function].split(", ")]
    return interruptible(numba.njit(f"({','.join(types)})", cache=True, nogil=True)(function))


def interruptible(function: Function) -> Function:
    """Wrap a compiled function so that Ctrl-C raises KeyboardInterrupt. numba would raise SystemError."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except SystemError as error:
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise

    return call
