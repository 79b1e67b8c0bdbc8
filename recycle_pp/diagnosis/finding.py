"""The verdict of `recycle_pp.doctor`, with its classes, and phrases for its sentences."""

from __future__ import annotations

from typing import NamedTuple

CLASSES = (
    "well",
    "never_started",  # a worker never became ready
    "compile_skew",  # one worker compiles and the others wait
    "rank_death",  # one worker died first, and the others only waited
    "stuck_op",  # an op or a kernel that does not end
    "stuck_collective",  # all wait for a sum, and no worker runs an op
    "network",  # two hosts cannot reach each other
    "data",  # the training data's disk does not answer
    "storage",  # the run folder's disk does not answer, a file in it is damaged, or a checkpoint failed
    "busy",  # other processes keep the workers from running
    "islands",  # the island waits for the other islands
    "control_plane",  # the coordinator is stuck or lost, or has no majority
)
WELL, WARNING, BROKEN = 0, 1, 2


class Finding(NamedTuple):
    """The cause of a stall or death, without the command to type next.

    verdict   one of CLASSES
    worker    the worker that caused it; None if there is no single one
    evidence  sentences, the most important first
    code      WELL, WARNING (the job has recovered, or makes progress), BROKEN
    where     the host or file that the next command needs; "" if it needs none
    """

    verdict: str
    worker: str | None
    evidence: list[str]
    code: int = BROKEN
    where: str = ""


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
