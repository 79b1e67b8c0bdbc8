"""Exceptions from the model's own code (build, forward, loss), shown with file and line.

with called("model.build=my_package:build"):     # replaces any exception of that code by UserMistake
    model = build()
shown(error)         # "TypeError: unsupported operand (/home/me/my_package.py, line 12, in forward)"
from_model(error)    # the same if the exception came out of the model's build, forward or loss, else ""
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import torch

from recycle_pp.comm.device_errors import is_gpu_failure, is_out_of_memory
from recycle_pp.config.mistakes import UserMistake

LONGEST = 500  # maximum number of characters of a message
_OURS = str(Path(__file__).resolve().parents[2]) + "/"
_LIBRARIES = (_OURS, str(Path(torch.__file__).parent) + "/", "<frozen ")
_PYTHON = sysconfig.get_paths()["stdlib"] + "/"
_ENTRANCES = {(str(Path(__file__).with_name("source.py")), name) for name in ("build", "loss", "function")}


@contextmanager
def called(name: str) -> Iterator[None]:
    """Turns any exception into UserMistake("NAME raised TypeError: ... (FILE, line N, in F)"), except out-of-memory
    errors and GPU failures. name: the called object, as the user writes it."""
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


def from_model(error: BaseException) -> str:
    """`shown`, if the exception came out of the model's build, forward or loss (see `source.Source`); else ""."""
    inside = any((code.co_filename, code.co_name) in _ENTRANCES for code, _ in _frames(error))
    return shown(error) if inside and not raised_here(error) and not is_gpu_failure(error) else ""


def raised_here(error: BaseException) -> bool:
    """Whether the exception is a ValueError that a file of this package has raised."""
    frames = _frames(error)
    return isinstance(error, ValueError) and bool(frames) and frames[-1][0].co_filename.startswith(_OURS)


def _place(error: BaseException) -> str:
    """The innermost frame outside of torch, Python's library and this package; "" if there is none."""
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
