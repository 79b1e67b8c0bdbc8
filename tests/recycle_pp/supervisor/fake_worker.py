"""A worker for tests of the supervisor. `data.path` of its settings selects what it does.

The supervisor executes it (`python -m fake_worker`) or forks it (`start`).
"""

import os
import signal
import subprocess
import sys
import threading
import time
import traceback

from recycle_pp.wire.worker_spec import WorkerSpec, last_words


def import_ahead(settings: dict) -> None:
    """A real worker imports torch here. A process with threads must not be forked."""
    if settings["data"]["path"] == "broken":
        raise ImportError("no such library")
    if settings["data"]["path"] == "thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()


def start() -> int:
    spec = WorkerSpec.read()
    play = spec.settings["data"]["path"]
    print(f"incarnation {spec.incarnation} plays {play}", flush=True)
    match play:
        case "wait":
            time.sleep(60)
        case "child":  # starts a process that must not outlive it
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            time.sleep(60)
        case "deaf":  # ignores SIGTERM
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("deaf", flush=True)
            time.sleep(60)
        case "raise":
            try:
                raise ValueError("no such token")
            except ValueError:
                last_words(spec, cause="exception", detail=traceback.format_exc(), where="F 1,2")
                raise
        case "long":
            last_words(spec, cause="exception", detail="ä" * 100_000 + "the end")
            return 1
        case "kill":
            last_words(spec, cause="injected", detail="kill@vote")
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            return 7
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
    return 0


if __name__ == "__main__":
    sys.exit(start())
