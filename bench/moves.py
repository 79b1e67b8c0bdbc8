"""Steps and costs of jobs whose layers move to other stages after a death. Only the compute is emulated.

    python bench/moves.py [--steps 12] [--slot 0.05] [--moves 8] [--pictures docs/pictures] [SETTING ...]
    chrt --rr 1 python bench/moves.py             # works on a busy machine too; needs CAP_SYS_NICE

The model has 32 layers in 4 stages. With 8 layers, F, I and W of a stage sleep for one slot and O for three; with other
numbers of layers in proportion. The first table shows one job for each shape:

- W(1,2) dies in the first steps, for good.
- `--steps` steps are re-routed. They measure the durations, so no layer moves earlier (`schedule.profile_steps`).
- Then layers move, and as many steps run in the new layout.

The planned steps are those of the event `rebalancing`. The measured ones are medians from commit to commit.

The second table is about `--moves` deaths of W(1,2) in another job of the first shape. Layers move after each death,
and back after each return. "Steps meanwhile" are those between the start of a move and its switch. They are compared
with the re-routed steps of the first table, each as a ratio to its plan. The stall is that of the worker that waited
longest (event `rebalanced`).

bench/out/moves.json is a file for `python -m recycle_pp.simulate --moves`.

`--pictures` draws the last re-routed step and the first step in the new layout of each shape, from their traces.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from statistics import median
from typing import Any

from results import save

from recycle_pp import visualize
from recycle_pp.simulation.moves import Moved, moves_of
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.testing.local_cluster import Zygote

Json = dict[str, Any]
SHAPES = ("3x4", 6), ("2x4", 8)  # pipelines x stages, micro-batches
DEAD = "1.2"
SETTLE = 2  # steps not counted after the start, a death and a switch
MOVE = 8  # maximum number of steps of a move, including the search for the layout
COMMON = (
    "model=tiny", "model.layers=32", "model.split=null", "emulate=sleep", "schedule.rebalance=always",
    "run.respawns=0", "run.validate_every=0",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured steps, re-routed and in the new layout")
    parser.add_argument("--slot", type=float, default=0.05, help="seconds")
    parser.add_argument("--moves", type=int, default=8, help="deaths in the second job")
    parser.add_argument("--pictures", type=Path, help="folder for the pictures")
    parser.add_argument("overrides", nargs="*", default=[])
    given = parser.parse_args()
    print(f"{'shape':<8}{'layers':<14}{'plan':>9}{'measured':>11}{'over':>8}{'of the re-routed step':>24}")
    with Zygote() as zygote:
        steps = [for_good(zygote, shape, given) for shape in SHAPES]
        deaths, moves = there_and_back(zygote, steps[0]["rerouted"] / steps[0]["moved"]["step_seconds"], given)
    load = os.getloadavg()[1]
    print(f"load {load:.1f} in the last 5 minutes")
    save("moves.json", {"steps": steps, "deaths": deaths, "moves": moves, "load": load})


def for_good(zygote: Zygote, shape: tuple[str, int], given: argparse.Namespace) -> Json:
    """A row of the first table: seconds of a re-routed step and of a step in the new layout."""
    profiled = SETTLE + given.steps
    more = [f"+fail_at=1:{DEAD}", f"schedule.profile_steps={profiled}", f"run.steps={2 * profiled + MOVE}"]
    with job(zygote, shape, [*more, *given.overrides], given.slot) as run:
        seconds = {line["step"]: line["step_seconds"] for line in run.lines(run.metrics)}
        moved = next(event for event in run.lines(run.events) if event["event"] == "rebalanced")
        first = moved["first_step"]
        name = f"{shape[0]}x{shape[1]}"
        if given.pictures:
            picture = given.pictures / f"moved-{name}.svg"
            with redirect_stdout(sys.stderr):
                visualize.main([str(run.path), "--step", str(first), "--out", str(picture)])
    rerouted = median(seconds[step] for step in range(1 + SETTLE, profiled))
    after = median(seconds[step] for step in seconds if step >= first + SETTLE)
    for layout, planned, measured in (
        (moved["before"], moved["step_seconds"], rerouted),
        (moved["layout"], moved["new_step_seconds"], after),
    ):
        layers, share = " ".join(map(str, layout)), "" if measured is rerouted else f"{after / rerouted:.3f}"
        print(f"{name:<8}{layers:<14}{planned:>7.3f} s{measured:>9.3f} s{measured / planned - 1:>+8.1%}{share:>24}")
    return {"shape": name, "rerouted": rerouted, "after": after, "moved": moved, "seconds": seconds}


def there_and_back(zygote: Zygote, usual: float, given: argparse.Namespace) -> tuple[list[Json], list[Moved]]:
    """Prints the second table, one row for each figure. Returns a record of each move after a death, and one of each
    move for `recycle_pp.simulate --moves`.

    usual: the ratio of a measured re-routed step to its plan."""
    start, cycle = SETTLE + 3, 2 * MOVE
    fails = ",".join(f"{start + cycle * k}:{DEAD}" for k in range(given.moves))
    back = ",".join(f"{start + MOVE + cycle * k}:{DEAD}" for k in range(given.moves))
    more = [f"+fail_at=[{fails}]", f"+rejoin_at=[{back}]", f"run.steps={start + cycle * given.moves}"]
    with job(zygote, SHAPES[0], [*more, *given.overrides], given.slot) as run:
        lines, events, all_moves = run.lines(run.metrics), run.lines(run.events), moves_of(RunReader(run))
    moves = [move for move in _moves(lines, events) if move["after"] == "death_detected"]
    print(f"{len(moves)} moves of {moves[0]['bytes'] / 1e6:.1f} MB after a death{'median':>13}{'longest':>11}")
    for name, unit, factor in (
        ("from the death to the start of the move", "s", 1),
        ("from there to the switch", "s", 1),
        ("from the death to the first step in the new layout", "s", 1),
        ("stall of the switch", "ms", 1e3),
    ):
        values = [factor * move[name] for move in moves]
        print(f"{name:<52}{median(values):>10.3g} {unit:<3}{max(values):>8.3g} {unit}")
    meanwhile = [share / usual - 1 for move in moves for share in move["steps meanwhile"]]
    print(f"{'steps meanwhile (' + str(len(meanwhile)) + ')':<52}{median(meanwhile):>+12.1%}{max(meanwhile):>+11.1%}")
    return moves, all_moves


def _moves(lines: list[Json], events: list[Json]) -> Iterator[Json]:
    """All moves of a run. `after`: the kind of event that caused the move."""
    times = {line["step"]: line["time"] for line in lines}
    seconds = {line["step"]: line["step_seconds"] for line in lines}
    cause = begun = None
    for event in events:
        if event["event"] in ("death_detected", "rejoined"):
            cause = event
        elif event["event"] == "rebalancing":
            begun = event
        elif event["event"] == "rebalanced" and cause and begun:
            first = event["first_step"]
            yield {
                "after": cause["event"],
                "bytes": event["bytes"],
                "layout": event["layout"],
                "from the death to the start of the move": begun["time"] - cause["time"],
                "from there to the switch": event["seconds"],
                "from the death to the first step in the new layout": times[first - 1]
                + event["stall_seconds"]
                - cause["time"],
                "stall of the switch": event["stall_seconds"],
                "steps meanwhile": [seconds[step] / begun["step_seconds"] for step in range(begun["step"], first)],
            }


@contextmanager
def job(zygote: Zygote, shape: tuple[str, int], more: list[str], slot: float) -> Iterator[RunFolder]:
    """The folder of a job that has ended."""
    times = (f"emulate.{kind}={slot * slots}" for kind, slots in {"F": 1, "I": 1, "W": 1, "O": 3}.items())
    overrides = [f"parallel={shape[0]}", f"parallel.microbatches={shape[1]}", *COMMON, *times, *more]
    with zygote.run(overrides) as running:
        if running.wait(1200):
            raise SystemExit(running.output)
        yield running.run


if __name__ == "__main__":
    main()
