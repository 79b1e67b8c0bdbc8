"""Turns errors of a command into exit codes: `sys.exit(exit_code(lambda: run(sys.argv[1:])))`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


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
        sentence = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except ValueError as error:
        sentence = str(error)
    print(f"{name}: {sentence}", file=sys.stderr)
    return 2
