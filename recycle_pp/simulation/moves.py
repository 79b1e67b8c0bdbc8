"""Measured costs of moves of layers between stages (`schedule.rebalance`).

moves = Moves.load("runs/mine")                 # a run folder, or a file of bench/moves.py
moves.steps, moves.slowed, moves.switch         # medians
moves_of(RunReader("runs/mine"))                # a record of each move
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TypedDict

from recycle_pp.fitting.move_policy import SLOWED
from recycle_pp.telemetry.events.deaths import DeathDetected
from recycle_pp.telemetry.events.layers import Rebalanced, Rebalancing
from recycle_pp.telemetry.events.workers import Rejoined
from recycle_pp.telemetry.run_reader import RunReader
from recycle_pp.telemetry.words import plural

CALM = 3
"""Minimum number of undisturbed steps after a switch. With fewer, the move is recorded without a comparison of steps.
"""


class Moved(TypedDict):
    """A measured move.

    bytes           state that all receivers got
    seconds         time from the start of the move to the switch
    step_seconds    planned duration of a step before the switch
    stall_seconds   time for which the switch stalled all workers
    slowed          share by which steps during the move took longer (median); None if too few steps can be compared
    """

    bytes: int
    seconds: float
    step_seconds: float
    stall_seconds: float
    slowed: float | None


@dataclass(frozen=True)
class Moves:
    """Measured moves.

    steps    time from the start of a move to its switch, in planned steps (median)
    slowed   share by which steps during a move take longer (median, at least 0)
    stalls   seconds for which each switch stalled all workers
    source   description of the measurement
    """

    steps: float
    slowed: float
    stalls: tuple[float, ...]
    source: str

    @property
    def switch(self) -> float:
        """Median seconds for which a switch stalls all workers."""
        return median(self.stalls)

    def stall(self, rng: random.Random) -> float:
        return rng.choice(self.stalls)

    @classmethod
    def of(cls, moved: Sequence[Moved], source: str) -> Moves:
        """The costs, from at least one measured move. If no move has a comparison of steps, `slowed` is the value that
        the trainer assumes."""
        slowed = [move["slowed"] for move in moved if move["slowed"] is not None]
        return cls(
            steps=median(move["seconds"] / move["step_seconds"] for move in moved),
            slowed=max(0.0, median(slowed)) if slowed else SLOWED,
            stalls=tuple(move["stall_seconds"] for move in moved),
            source=f"{plural(len(moved), 'move')} of {source}",
        )

    @classmethod
    def load(cls, path: str | Path) -> Moves:
        """The moves of a run folder, or of an output file of bench/moves.py.

        Raises ValueError if there is no move or the file has different content, OSError if it cannot be read.
        """
        if Path(path).is_dir():
            if moved := moves_of(RunReader(path)):
                return cls.of(moved, str(path))
            raise ValueError(f"--moves {path}: no layers have moved in this run")
        try:
            return cls.of(json.loads(Path(path).read_text())["moves"], str(path))
        except (ValueError, LookupError, TypeError, ZeroDivisionError):
            raise ValueError(f"--moves {path}: must be a run folder or an output file of bench/moves.py") from None


def measured() -> Moves:
    """The measurements of this version, from `moves.json` beside this file. bench/moves.py made them."""
    data = json.loads((files(__package__) / "moves.json").read_text())
    return Moves.of(data["moves"], data["source"])


def moves_of(run: RunReader) -> list[Moved]:
    """The completed moves of a run, in order. Steps during a move are compared with the undisturbed steps after its
    switch. The duration of each step is first divided by its planned duration."""
    seconds = {line.step: line.step_seconds for line in run.steps() if line.step_seconds is not None}
    events = [event for event in run.events() if isinstance(event, DeathDetected | Rejoined | Rebalancing | Rebalanced)]
    found: list[Moved] = []
    begun: Rebalancing | None = None
    for number, event in enumerate(events):
        if isinstance(event, Rebalancing):
            begun = event
        elif isinstance(event, Rebalanced) and begun is not None:
            following = [later.step for later in events[number + 1 :]]
            disturbed = min(following, default=max(seconds, default=0) + 1)
            meanwhile = [seconds[step] for step in range(begun.step, event.first_step) if step in seconds]
            after = [seconds[step] for step in range(event.first_step + 1, disturbed) if step in seconds]
            slowed = None
            if meanwhile and len(after) >= CALM:
                slowed = median(meanwhile) / event.step_seconds / (median(after) / event.new_step_seconds) - 1
            found.append(
                Moved(
                    bytes=event.bytes,
                    seconds=event.seconds,
                    step_seconds=event.step_seconds,
                    stall_seconds=event.stall_seconds,
                    slowed=slowed,
                )
            )
    return found
