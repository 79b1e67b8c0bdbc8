"""Checks all requirements on a GPU within minutes, the most fragile ones first.

    python bench/gpu.py --list                            # the items, their limits and their requirements
    python bench/gpu.py --minutes 8 --nccl NCCL_SOURCE    # runs items until the time is up; the next call continues
    python bench/gpu.py --minutes 5 --cpu                 # without a GPU: every item at a tiny size, as a smoke test

Each item is a command with its own time limit (`gpu_items.py`). After each item the results are written to --out as
JSON, and the table is printed. A call starts no item that cannot finish within --minutes. A later call with the same
--out continues after the last finished item. --again NAME repeats an item. With --lanes N, up to N items run at a time,
except those that measure speed.

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
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpu_items import Item, items

ROOT = Path(__file__).parent.parent
PASSED, FAILED = "passed", "failed"
SHORTEST = 5.0  # seconds that must be left to start an item
LOG = 20000  # characters of a command's output that are kept
POLL = 0.05  # seconds between checks of the running commands
Row = dict[str, Any]  # status, seconds, result, log


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="minutes after which the call ends (default 8)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out" / "gpu.json")
    parser.add_argument("--nccl", type=Path, help="source tree of NCCL 2.30 or newer, or a libnccl.so.2")
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="repeat these items")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these items and those they need")
    parser.add_argument("--lanes", type=int, default=1, help="items at a time (those that measure speed run alone)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the job with 20 kills (default 300)")
    parser.add_argument("--cpu", action="store_true", help="run every item at a tiny size, without a GPU")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    todo = items(options.cpu, options.nccl, options.out.parent.resolve(), options.steps)
    names = {item.name for item in todo}
    for option, given in (("--again", options.again), ("--only", options.only)):
        if unknown := set(given) - names:
            parser.error(f"{option}: no item is called {', '.join(sorted(unknown))}; see --list")
    if options.only:
        todo = [item for item in todo if item.name in needed(options.only, todo)]
    if options.list:
        for item in todo:
            print(f"{item.name:18} {item.seconds:4.0f} s  {item.claim}")
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    state: dict[str, Row] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.again:
        state.pop(name, None)
    run_all(todo, state, options.out, time.monotonic() + 60 * options.minutes, options.lanes)
    return 0 if all(row["status"] == PASSED for row in state.values()) else 1


def needed(names: Sequence[str], todo: Sequence[Item]) -> set[str]:
    """These items and all items that they need."""
    needs = {item.name: (*item.needs, *filter(None, [item.compares])) for item in todo}
    return {*names, *(other for name in names for other in needed(needs[name], todo))}


def run_all(todo: Sequence[Item], state: dict[str, Row], out: Path, deadline: float, lanes: int = 1) -> None:
    """Runs the items without a row in `state` until `deadline` (time.monotonic()), and adds their rows.

    lanes: number of items that may run at a time. An item that measures speed runs alone.
    """
    waiting = [item for item in todo if item.name not in state]
    running: list[Running] = []

    def finish(item: Item, row: Row) -> None:
        state[item.name] = row
        out.write_text(json.dumps(state, indent=1) + "\n")
        print(table(todo, state), flush=True)

    try:
        while waiting or running:
            for item in list(waiting):
                missing = [name for name in item.needs if state.get(name, {}).get("status") != PASSED]
                if failed := [name for name in missing if name in state]:
                    waiting.remove(item)
                    finish(item, {"status": FAILED, "seconds": 0.0, "result": {}, "log": f"needs {failed[0]}"})
                elif missing:
                    if not all(_comes(name, waiting, running) for name in missing):
                        waiting.remove(item)
                elif (left := deadline - time.monotonic()) < max(SHORTEST, item.least):
                    waiting.remove(item)
                elif _is_free(item, [each.item for each in running if not each.elapsed], lanes):
                    waiting.remove(item)
                    running.append(start(item, min(item.seconds, left), state))
            time.sleep(POLL)
            for each in [each for each in running if each.over()]:
                if (other := each.item.compares) not in (None, *state) and _comes(other, waiting, running):
                    continue
                running.remove(each)
                row = each.row(state)
                if row["status"] != PASSED and each.seconds < each.item.seconds and row["seconds"] >= each.seconds - 1:
                    continue  # cut off by the end of this call, not by its own limit, so the next call repeats it
                finish(each.item, row)
    finally:
        for each in running:
            each.kill()


def _comes(name: str | None, waiting: Sequence[Item], running: Sequence[Running]) -> bool:
    return any(item.name == name for item in [*waiting, *(each.item for each in running)])


def _is_free(item: Item, others: Sequence[Item], lanes: int) -> bool:
    return len(others) < lanes and not any(item.alone or other.alone for other in others)


def start(item: Item, seconds: float, state: Mapping[str, Row]) -> Running:
    """Starts the item's command in its own process group."""
    print(f"{item.name}: {item.claim} ({seconds:.0f} s at most)", flush=True)
    command, environment = item.command({name: state[name]["result"] for name in item.needs})
    paths = [str(ROOT), str(ROOT / "schedules"), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, paths)), **environment}
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd=ROOT,
    )
    return Running(item, seconds, process, output, time.monotonic())


@dataclass
class Running:
    """An item's command and its time limit. The last line of its output is the result as JSON."""

    item: Item
    seconds: float
    process: subprocess.Popen[Any]
    output: IO[str]
    began: float  # time.monotonic()
    elapsed: float = 0.0  # seconds, once the command has ended
    code: int | None = None  # None if it was killed

    def over(self) -> bool:
        """Whether the command has ended or its time is up. If so, kills all processes that the command has started."""
        if not self.elapsed and (self.process.poll() is not None or time.monotonic() - self.began > self.seconds):
            self.elapsed = time.monotonic() - self.began
            self.code = self.process.poll()
            self.kill()
        return self.elapsed > 0

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def row(self, state: Mapping[str, Row]) -> Row:
        self.output.seek(0)
        output = self.output.read()
        self.output.close()
        status = f"over {self.seconds:.0f} s" if self.code is None else PASSED if self.code == 0 else FAILED
        last = output.strip().rpartition("\n")[2]
        result = json.loads(last) if last.startswith("{") else {}
        others = [*self.item.needs, *filter(None, [self.item.compares])]
        if status == PASSED:
            wrong = [f"needs {name}" for name in others if state.get(name, {}).get("status") != PASSED]
            wrong = wrong or [self.item.judge(result, {name: state[name]["result"] for name in others})]
            if wrong[0]:
                status, output = FAILED, f"{output}\n{wrong[0]}"
        return {"status": status, "seconds": round(self.elapsed, 1), "result": result, "log": output[-LOG:]}


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
