"""The costs of losing a machine, of its return, and of a checkpoint. Some are measured; the others are assumed.

costs = Costs(recovery=Recovery.load("bench/out/recovery-fork-sleep.json"), bandwidth=2.5e9)
costs.recovery.stall(rng), costs.transfer(16e9)
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from . import moves
from .moves import Moves


@dataclass(frozen=True)
class Recovery:
    """Measured durations, in seconds.

    stalls    times from a death until all workers continue
    returns   times from the death of a process until the new process on the same machine requests the state
    source    description of the measurement
    """

    stalls: tuple[float, ...]
    returns: tuple[float, ...]
    source: str

    def stall(self, rng: random.Random) -> float:
        return rng.choice(self.stalls)

    @classmethod
    def load(cls, path: str | Path) -> Recovery:
        """Reads the stalls from an output file of bench/recovery.py. Takes `returns` from `measured()`.

        Raises ValueError if the file has different content, OSError if it cannot be read.
        """
        try:
            data = json.loads(Path(path).read_text())
            launcher = f"{data['arguments']['launcher']}, compute={data['arguments']['compute']}"
            stalls = tuple(float(event["stall_seconds"]) for event in data["resumed"])
            if not stalls:
                raise ValueError
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"--recovery {path}: must be an output file of bench/recovery.py with deaths") from None
        return cls(stalls, measured().returns, f"{len(stalls)} recoveries of {path} ({launcher})")


def measured() -> Recovery:
    """The measurements of this version, from `recovery.json` beside this file. bench/recovery.py made them."""
    data = json.loads((files(__package__) / "recovery.json").read_text())
    return Recovery(tuple(data["stall_seconds"]), tuple(data["return_seconds"]), data["source"])


@dataclass(frozen=True)
class Costs:
    """Durations in seconds, and a bandwidth in bytes per second. `recovery` and `moves` are measured. All others are
    assumptions, set by flags.

    bandwidth     rate at which a worker receives a state
    start         time from a machine's arrival until its process is ready: image, imports, CUDA
    restart       restart of the whole job from a checkpoint: stop, start, load
    checkpoint    pause of training for each checkpoint, in policies that depend on checkpoints
    swap          replacement of a lost worker by a spare: about 20 s (TrainMover, arXiv 2412.12636, 1024 GPUs)
    quorum        stall of torchft's survivors: 1.05 s, measured on CPUs with timeouts of 1 s
    reconfigure   reconfiguration of Oobleck's and Bamboo's pipelines: 79 s. This is not published. It is inferred from
                  ReCycle's trace, which lasts 6.4 h and has 38 changes of membership. Oobleck loses about 13 % of the
                  time there, so a change costs 0.13 * 6.4 h / 38 = 79 s
    outage        expected remaining length of an outage that is already longer than all outages that have ended
                  (setting schedule.outage)"""

    recovery: Recovery = field(default_factory=measured)
    bandwidth: float = 2.5e9
    start: float = 30.0
    restart: float = 180.0
    checkpoint: float = 15.0
    swap: float = 20.0
    quorum: float = 1.05
    reconfigure: float = 79.0
    outage: float = 900.0
    moves: Moves = field(default_factory=moves.measured)

    def transfer(self, size: float) -> float:
        return size / self.bandwidth
