"""The deaths that a job must survive, as tables of cases.

First come all moments of a step and of a recovery, at the first, the middle and the last stage of nine workers (3x3).
Starting a job takes seconds, a recovery a fraction of a second. So one job, called a tour, has many deaths: every few
steps a worker dies, and it returns before the next death. Then come deaths at the start and the end of a run, several
deaths, and deaths during a recovery or a return.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .harness import Case, SignalAt, fails, rejoins

POSITIONS = {"first": 0, "middle": 1, "last": 2}  # stage

# moment: what the worker is doing when it is killed
MOMENTS = {
    "forward": "in the middle of a forward",
    "backward": "in the middle of a backward",
    "weight": "in the middle of a backward for the weights",
    "send": "while it sends a boundary tensor",
    "receive": "while it waits for a boundary tensor",
    "allreduce": "while its stage sums the gradients",
    "vote": "after the sum of the gradients, before its vote",
    "optimizer": "in the optimizer step",
    "commit": "right after the step is committed and applied",
    "checkpoint": "while it writes its part of a checkpoint",
    "validation": "in the middle of a validation",
    "regroup": "while it builds the links of a new generation after another death",
    "adopt": "while it receives the plan for the rest of the step after another death",
    "donate": "while it sends its state to a returning worker",
    "join": "while it receives a peer's state during its own return",
}

STOP = 12  # steps between two deaths of a tour, enough for a process to return


@dataclass(frozen=True)
class Death:
    moment: str
    stage: int

    def faults(self, step: int) -> tuple[list[str], list[str]]:
        """Values of +fail_at and +rejoin_at for this death, if its part of the tour starts at `step`."""
        moment, stage, turn = self.moment, self.stage, step // STOP % 3
        victim, peer = f"{turn}.{stage}", f"{(turn + 1) % 3}.{stage}"
        if moment in ("regroup", "adopt"):
            return [f"{step}:{peer}@backward", f"{step}:{victim}@{moment}"], [
                f"{step + 3}:{peer}",
                f"{step + 3}:{victim}",
            ]
        if moment == "donate":  # the donor is the first live worker of the stage
            donor, joiner = f"0.{stage}", f"1.{stage}"
            return [f"{step}:{joiner}", f"{step}:{donor}@donate"], [f"{step + 3}:{joiner}", f"{step + 4}:{donor}"]
        if moment == "join":
            return [f"{step}:{victim}", f"{step + 1}:{victim}@join"], [f"{step + 2}:{victim}", f"{step + 4}:{victim}"]
        if moment == "checkpoint":  # the first worker of a stage saves
            victim = f"0.{stage}"
        if moment in ("checkpoint", "validation"):  # both follow every fourth step, so one step later than `step`
            step += 1
        return [f"{step}:{victim}@{moment}"], [f"{step + 3}:{victim}"]


def tours() -> Iterator[Case]:
    """Tours in which each moment occurs once, at each position in turn: starting at each position, staggered or not."""
    stages = list(POSITIONS.values())
    for first in stages:
        deaths = [Death(moment, stages[(first + number) % 3]) for number, moment in enumerate(MOMENTS)]
        for stagger in (True, False):
            yield tour(f"every moment in turn, from stage {first}", deaths, stagger)


def tour(claim: str, deaths: Sequence[Death], stagger: bool) -> Case:
    fallen: list[str] = []
    back: list[str] = []
    for number, death in enumerate(deaths):
        now, later = death.faults(2 + STOP * number)
        fallen += now
        back += later
    faults = (*fails(*fallen), *rejoins(*back), "checkpoint.every=4", "run.validate_every=4")
    steps = 2 + STOP * (len(deaths) + 2)
    return Case(claim, "3x3", faults, steps=steps, stagger=stagger, deaths=None, bound=250)


# ------------------------------------------------------------------------------------------------- more than one

# The first case of BEFORE_AND_AFTER and of SEVERAL runs in `make test`, the others only with --full. The cases differ
# only in the order of events, and the simulations in tests/recycle_pp/protocol try all orders.
BEFORE_AND_AFTER = [
    Case("before the first step", "2x2", fails("0:1.0@forward")),
    Case("after the last step", "2x2", fails("7:0.1@commit"), stagger=True),
    Case("in the last step", "2x2", fails("7:1.1@vote")),
    Case("in the last checkpoint", "2x2", (*fails("7:0.0@checkpoint"), "checkpoint.every=8")),
]

SEVERAL = [
    Case("two stages in one step", "3x4", fails("3:0.0@send", "3:2.3@receive"), stagger=True, deaths=2),
    Case("all but one pipeline", "3x2", fails("2:0.0", "2:0.1@weight", "4:2.1@vote", "5:2.0@send"), deaths=4),
    Case("three back to back", "3x2", fails("3:0.0@forward", "3:1.1@forward", "3:2.0@forward"), deaths=3),
    Case("two stages in one step", "3x4", fails("3:0.1@forward", "3:1.2@backward"), deaths=2),
    Case("two workers of a stage in one step", "3x2", fails("3:0.1@backward", "3:2.1@allreduce"), deaths=2),
    Case("all but one worker of a stage", "3x2", fails("2:0.1@forward", "4:1.1@weight"), deaths=2),
    Case("three at the vote of the same step", "3x2", fails("3:0.0@vote", "3:1.1@vote", "3:2.0@vote"), deaths=3),
    Case("a worker with re-routed ops", "3x2", fails("3:0.1@forward", "4:1.1@backward"), stagger=True, deaths=2),
]

AT_ONCE, ADOPTED = "death_detected", "plan_adopted"
IN_A_RECOVERY = [
    Case(
        "another worker dies when the death is detected",
        "3x2",
        fails("3:0.1@backward"),
        (SignalAt(AT_ONCE, "1.0"),),
        deaths=2,
    ),
    Case(
        "a peer dies when the death is detected", "3x2", fails("3:0.1@forward"), (SignalAt(AT_ONCE, "2.1"),), deaths=2
    ),
    Case(
        "another worker dies after a vote",
        "3x2",
        fails("3:0.1@vote"),
        (SignalAt(AT_ONCE, "1.0"),),
        stagger=True,
        deaths=2,
    ),
    Case(
        "a worker dies as it adopts its new plan",
        "3x2",
        fails("3:0.1@weight"),
        (SignalAt(ADOPTED, "1.1", nth=2),),
        deaths=2,
    ),
]


def _returning(claim: str, *signals: SignalAt, stagger: bool = False) -> Case:
    """A case in which W(0, 1) dies in step 3 and returns in step 6, and the signals kill a second worker."""
    overrides = fails("3:0.1@forward") + rejoins("6:0.1")
    # 40 steps leave enough time for the return.
    return Case(claim, "3x2", overrides, signals, steps=40, stagger=stagger, deaths=2)


IN_A_RETURN = [
    _returning("the donor dies when it is chosen", SignalAt("joining", "1.1")),
    _returning("the donor dies while it sends", SignalAt("joining", "1.1", after=0.05), stagger=True),
    _returning("the joiner dies while it receives", SignalAt("joining", "0.1", after=0.02)),
    _returning("the joiner dies once it is a member", SignalAt("rejoined", "0.1")),
    _returning("the joiner dies before it is ready", SignalAt("spawned", "0.1", nth=7), stagger=True),
    _returning("a worker of another stage dies meanwhile", SignalAt("joining", "2.0", after=0.02)),
]
