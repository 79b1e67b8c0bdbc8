"""Turns errors of a command into exit codes: `sys.exit(exit_code(lambda: run(sys.argv[1:])))`.

open_streams()                                   # at the start of a process, if the user may have closed its output
say("continues with step 20, from runs/mine")    # raises no error if the reader of the output has exited
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

MISTAKES = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
            errno.EROFS)  # fmt: skip


def exit_code(run: Callable[[], int], name: str = "error") -> int:
    """The result of `run`, or one of these exit codes:

    2    `run` raised ValueError or OSError, which is printed as one sentence
    130  Ctrl-C
    0    the reader of standard output has closed the pipe

    name: prefix of the sentence
    """
    open_streams()
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # for instance after `| head`
        _discard_output()
        return 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except OSError as error:
        sentence = _in_words(error)
    except ValueError as error:
        sentence = str(error)
    print(f"{name}: {sentence}", file=sys.stderr)
    return 2


def parser_of(name: str, about: str | None, more: str = "") -> argparse.ArgumentParser:
    """A parser for `python -m recycle_pp.NAME`. Its help shows `about` before the options and `more` after them."""
    return argparse.ArgumentParser(
        f"python -m recycle_pp.{name}",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def open_streams() -> None:
    """Opens /dev/null in place of each standard stream that is closed. Characters that standard output cannot encode
    are replaced by question marks.

    Otherwise sys.stdout or sys.stderr would be None, and a file opened later would get the stream's file descriptor.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # open() returns the lowest free descriptor
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def say(text: str) -> None:
    """Prints the text, or does nothing if standard output cannot be written."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard_output()
    except OSError:
        pass


@contextmanager
def os_errors_as_mistakes() -> Iterator[None]:
    """Converts an OSError about a wrong path (MISTAKES) to a ValueError with one sentence.

    Other OSErrors, for instance from a file server that is down, propagate, because a later start may succeed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in MISTAKES:
            raise
        raise ValueError(_in_words(error)) from error


def _in_words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def _discard_output() -> None:
    """Sends standard output to /dev/null, so that the interpreter can flush it when it exits."""
    with suppress(OSError):  # a stream without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
