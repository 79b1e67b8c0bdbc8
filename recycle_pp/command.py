"""Turns errors of a command into exit codes: `sys.exit(exit_code(lambda: run(sys.argv[1:])))`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def exit_code(run: Callable[[], int], name: str = "error") -> int:
    """The result of `run`, or one of these exit codes:

    2    `run` raised ValueError or OSError, which is printed as one sentence
    130  Ctrl-C
    0    the reader of standard output has closed the pipe

    name: prefix of the sentence
    """
    try:
        return run()
    except BrokenPipeError:  # for instance after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


@contextmanager
def os_errors_as_mistakes() -> Iterator[None]:
    """Raises ValueError with one sentence instead of an OSError, for instance about a folder that cannot be read."""
    try:
        yield
    except OSError as error:
        raise ValueError(_in_words(error)) from error


def _in_words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
