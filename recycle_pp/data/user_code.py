"""Finds a user's own functions by name, and reports exceptions in the user's code with file and line.

function("model.build", "my_package:build")      # the function; raises ValueError with one sentence for the user

with called("model.build=my_package:build"):     # replaces any exception of that code by UserMistake
    model = build()
shown(error)         # "TypeError: unsupported operand (/home/me/my_package.py, line 12, in forward)"
from_user(error)     # the same if a user's build, forward, loss or optimizer step raised the exception, else ""
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from recycle_pp.comm.device_errors import is_gpu_failure, is_out_of_memory
from recycle_pp.config.mistakes import UserMistake

LONGEST = 500  # maximum number of characters of a message
_OURS = str(Path(__file__).resolve().parents[1]) + "/"
_LIBRARIES = (_OURS, str(Path(torch.__file__).parent) + "/", "<frozen ")
_PYTHON = sysconfig.get_paths()["stdlib"] + "/"
_SOURCE, _RULE = _OURS + "model/general/source.py", _OURS + "numerics/update_rules/rule.py"
_ENTRANCES = {(_SOURCE, "build"), (_SOURCE, "loss"), (_RULE, "launch"), (__file__, "function")}


def function(key: str, value: str) -> Callable[..., Any]:
    """The function named by `value`, MODULE:NAME. Raises ValueError, which names `key`, if there is none."""
    module, colon, name = value.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{key} must be MODULE:FUNCTION, for instance my_package:build, not {value!r}")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            raise ValueError(f"{key}={value}: {first_line(error)}") from error
        raise ValueError(f"{key}={value}: the import of {module} raised {shown(error)}") from error
    if found is None:
        raise ValueError(f"{key}={value}: {module} has no {name}")
    if not callable(found):
        raise ValueError(f"{key}={value} is not a function")
    return found


@contextmanager
def called(name: str) -> Iterator[None]:
    """Turns exceptions, except out-of-memory errors and GPU failures, into UserMistake.

    The message is "NAME raised TypeError: ... (FILE, line N, in F)".

    name: the called object, as the user writes it
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or is_gpu_failure(error):
            raise
        raise UserMistake(f"{name} raised {shown(error)}") from error


def shown(error: BaseException) -> str:
    """The exception's class, the first line of its text, and the line of the user's code that raised it."""
    text = next(iter(str(error).strip().splitlines()), "")[:LONGEST]
    return f"{type(error).__name__}{': ' * bool(text)}{text}{_place(error)}"


def from_user(error: BaseException) -> str:
    """`shown(error)` if a user's build, forward, loss (see `source.Source`) or update rule raised it; else ""."""
    inside = any((code.co_filename, code.co_name) in _ENTRANCES for code, _ in _frames(error))
    return shown(error) if inside and not raised_here(error) and not is_gpu_failure(error) else ""


def raised_here(error: BaseException) -> bool:
    """Whether the exception is a ValueError that this package itself raised, with a sentence for the user."""
    frames = _frames(error)
    return isinstance(error, ValueError) and bool(frames) and frames[-1][0].co_filename.startswith(_OURS)


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _place(error: BaseException) -> str:
    """The innermost frame outside of torch, Python's library and this package, as " (FILE, line N, in F)".

    "" if there is no such frame.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    for code, line in reversed(_frames(error)):
        python = code.co_filename.startswith(_PYTHON) and "site-packages" not in code.co_filename
        if not code.co_filename.startswith(_LIBRARIES) and not python:
            return f" ({code.co_filename}, line {line}, in {code.co_name})"
    return ""


def _frames(error: BaseException) -> list[tuple[CodeType, int]]:
    found, traceback = [], error.__traceback__
    while traceback is not None:
        found.append((traceback.tb_frame.f_code, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found
