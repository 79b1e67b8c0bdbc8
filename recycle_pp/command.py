"""How a command ends: `sys.exit(exit_code(lambda: run(sys.argv[1:])))`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def exit_code(run: Callable[[], int], name: str = "error") -> int:
    """What `run` returns. 2 after one sentence about what is wrong (ValueError, OSError), which `name` begins; 130
    after Ctrl-C; 0 where nobody reads on."""
    try:
        return run()
    except BrokenPipeError:  # `| head` has seen enough
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
