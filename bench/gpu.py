"""Checks all requirements on a GPU within minutes, the most fragile ones first.

    python bench/gpu.py --list                            # the items, their limits and their requirements
    python bench/gpu.py --minutes 8 --nccl NCCL_SOURCE    # runs items until the time is up; the next call continues
    python bench/gpu.py --minutes 5 --cpu                 # without a GPU: every item at a tiny size, as a smoke test

Each item is a command with its own time limit (`gpu_items.py`). After each item the results are written to --out as
JSON, and the table is printed. A call starts no item that cannot finish within --minutes. A later call with the same
--out continues after the last finished item. --again NAME repeats an item.

Nothing is downloaded. The first item checks the required packages. NCCL 2.30 or newer, which lets two workers share the
card, is built from the source tree given as --nccl.

Exit code 0: all items so far have passed; 1: one has failed; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_items import Item, items

ROOT = Path(__file__).parent.parent
PASSED, FAILED = "passed", "failed"
SHORTEST = 5.0  # seconds that must be left to start an item
Row = dict[str, Any]  # status, seconds, result, log


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="after which the call has ended (default 8)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "gpu.json")
    parser.add_argument("--nccl", type=Path, help="source tree of NCCL 2.30 or newer, or a libnccl.so.2")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="repeat these items")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, without a GPU")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    todo = items(options.cpu, options.nccl, options.out.parent.resolve())
    if unknown := set(options.again) - {item.name for item in todo}:
        parser.error(f"--again: no item is called {', '.join(sorted(unknown))}; see --list")
    if options.list:
        for item in todo:
            print(f"{item.name:18} {item.seconds:4.0f} s  {item.claim}")
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    state: dict[str, Row] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.again:
        state.pop(name, None)
    run_all(todo, state, options.out, time.monotonic() + 60 * options.minutes)
    return 0 if all(row["status"] == PASSED for row in state.values()) else 1


def run_all(todo: Sequence[Item], state: dict[str, Row], out: Path, deadline: float) -> None:
    """Runs the items without a row in `state` until `deadline` (time.monotonic()), and adds their rows."""
    for item in todo:
        if item.name in state:
            continue
        if missing := [name for name in item.needs if state.get(name, {}).get("status") != PASSED]:
            if all(name in state for name in item.needs):
                state[item.name] = {"status": FAILED, "seconds": 0.0, "result": {}, "log": f"needs {missing[0]}"}
                out.write_text(json.dumps(state, indent=1) + "\n")
            continue
        left = deadline - time.monotonic()
        if left < max(SHORTEST, item.least):
            continue
        print(f"{item.name}: {item.claim} ({min(item.seconds, left):.0f} s at most)", flush=True)
        row = run(item, min(item.seconds, left), {name: state[name]["result"] for name in item.needs})
        if row["status"] != PASSED and left < item.seconds and row["seconds"] >= left - 1:
            continue  # cut off by the end of this call, not by its own limit, so the next call repeats it
        state[item.name] = row
        out.write_text(json.dumps(state, indent=1) + "\n")
        print(table(todo, state), flush=True)


def run(item: Item, seconds: float, results: Mapping[str, Mapping[str, Any]]) -> Row:
    """Runs the item's command in its own process group, which has ended when this function returns. The command's last
    line on stdout is the result as JSON."""
    began = time.monotonic()
    command, environment = item.command(results)
    paths = [str(ROOT), str(ROOT / "schedules"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, paths)), **environment}
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        status = PASSED if process.returncode == 0 else FAILED
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = f"over {seconds:.0f} s"
    last = output.strip().rpartition("\n")[2]
    result = json.loads(last) if last.startswith("{") else {}
    if status == PASSED and (wrong := item.judge(result, results)):
        status, output = FAILED, f"{output}\n{wrong}"
    return {"status": status, "seconds": round(time.monotonic() - began, 1), "result": result, "log": output[-3000:]}


def table(todo: Sequence[Item], state: Mapping[str, Row]) -> str:
    """A line for each item: status, time, and the figures or the last line of the output."""
    lines = []
    for item in todo:
        row = state.get(item.name, {"status": "-", "seconds": 0.0, "result": {}, "log": ""})
        figures = " ".join(f"{key}={_short(value)}" for key, value in row["result"].items())
        said = figures if row["status"] in (PASSED, "-") else row["log"].strip().rpartition("\n")[2]
        lines.append(f"{item.name:18} {row['status']:10} {row['seconds']:6.1f} s  {said[:160]}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 40 else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
