"""Whoever dies, whenever: the weights are those of a run in which nobody died, bit for bit.

Read the tables as the documentation of what the trainer survives. Each case runs real processes, ends within its
bound, and is compared with a fault-free run: every step's loss, the SHA-256 of the final weights, and who ran which op.
"""

import pytest

from .harness import Case, Strike, fails, rejoins

MOMENTS = ("forward", "backward", "weight", "send", "receive", "allreduce", "vote", "optimizer", "checkpoint")
SAVING = ("checkpoint.every=2",)


def at_every_moment():
    """One death at every moment of a step, at the first and the last stage, staggered or not."""
    for number, moment in enumerate(MOMENTS):
        worker = f"{number % 2}.{number // 2 % 2}" if moment != "checkpoint" else "0.1"
        for stagger in (False, True):
            yield Case(f"killed at {moment}", "2x2", fails(f"3:{worker}@{moment}") + SAVING, stagger=stagger)


def tours():
    """Twelve workers: one dies at every moment in turn, and is back two steps later."""
    workers = ("0.0", "1.1", "2.2", "0.3", "1.0", "2.1", "0.2", "1.3", "0.0")
    deaths = [f"{2 + 3 * n}:{w}@{m}" for n, (w, m) in enumerate(zip(workers, MOMENTS, strict=True))]
    returns = [f"{4 + 3 * n}:{w}" for n, w in enumerate(workers)]
    overrides = fails(*deaths) + rejoins(*returns) + ("checkpoint.every=3",)
    for stagger in (False, True):
        case = Case("every moment in turn", "3x4", overrides, steps=31, stagger=stagger, deaths=9, bound=120)
        yield pytest.param(case, marks=pytest.mark.slow) if stagger else case


SEVERAL = [
    Case("before the first step", "2x2", fails("0:1.0@forward")),
    Case("in the last step", "2x2", fails("7:1.1@vote")),
    Case("one returns", "2x2", fails("2:0.1@backward") + rejoins("5:0.1")),
    Case("one returns", "2x2", fails("2:0.1@backward") + rejoins("5:0.1"), stagger=True),
    Case("two stages in one step", "3x4", fails("3:0.1@forward", "3:1.2@backward"), deaths=2),
    Case("two of a stage in one step", "3x4", fails("3:0.1@backward", "3:2.1@allreduce"), deaths=2),
    Case("two stages in one step", "3x4", fails("3:0.0@send", "3:2.3@receive"), stagger=True, deaths=2),
    Case("all but one of a stage", "3x2", fails("2:0.1@forward", "4:1.1@weight"), deaths=2),
    Case("all but one pipeline", "3x2", fails("2:0.0", "2:0.1@weight", "4:2.1@vote", "5:2.0@send"), deaths=4),
    Case("three back to back", "3x2", fails("3:0.0@forward", "3:1.1@forward", "3:2.0@forward"), deaths=3),
    Case("three at the vote of one step", "3x2", fails("3:0.0@vote", "3:1.1@vote", "3:2.0@vote"), deaths=3),
    Case("a host of re-routed work", "3x2", fails("3:0.1@forward", "4:1.1@backward"), stagger=True, deaths=2),
]

AT_ONCE, ADOPTED = "death_detected", "plan_adopted"
RECOVERY = [
    Case("another dies as the death is known", "3x2", fails("3:0.1@backward"), (Strike(AT_ONCE, "1.0"),), deaths=2),
    Case("a peer dies as the death is known", "3x2", fails("3:0.1@forward"), (Strike(AT_ONCE, "2.1"),), deaths=2),
    Case("another dies after a vote", "3x2", fails("3:0.1@vote"), (Strike(AT_ONCE, "1.0"),), stagger=True, deaths=2),
    Case("one dies with its new plan", "3x2", fails("3:0.1@weight"), (Strike(ADOPTED, "1.1", nth=2),), deaths=2),
]


def returning(claim, *strikes, stagger=False):
    """W(0, 1) dies in step 3 and returns in step 6; what strikes meanwhile."""
    overrides = fails("3:0.1@forward") + rejoins("6:0.1")
    return Case(claim, "3x2", overrides, strikes, steps=40, stagger=stagger, deaths=2)  # long enough to come back


REJOIN = [
    returning("the donor dies as it is named", Strike("joining", "1.1")),
    returning("the donor dies as it gives", Strike("joining", "1.1", after=0.05), stagger=True),
    returning("the joiner dies as it takes", Strike("joining", "0.1", after=0.02)),
    returning("the joiner dies once it is a member", Strike("rejoined", "0.1")),
    returning("the joiner dies before it is ready", Strike("spawned", "0.1", nth=7), stagger=True),
    returning("another stage loses one meanwhile", Strike("joining", "2.0", after=0.02)),
]


@pytest.mark.parametrize("case", [*at_every_moment(), *tours()], ids=str)
def test_a_death_at_any_moment_changes_no_bit(case, runs):
    runs.check_exact(runs.of(case, "one at a time"))


@pytest.mark.parametrize("case", SEVERAL, ids=str)
def test_several_deaths_change_no_bit(case, runs):
    runs.check_exact(runs.of(case, "several"))


@pytest.mark.parametrize("case", RECOVERY, ids=str)
def test_a_death_in_a_recovery_changes_no_bit(case, runs):
    runs.check_exact(runs.of(case, "in a recovery"))


@pytest.mark.parametrize("case", REJOIN, ids=str)
def test_a_death_in_a_rejoin_changes_no_bit(case, runs):
    runs.check_exact(runs.of(case, "in a rejoin"))


def test_without_reproducible_sums_the_losses_agree_to_one_in_a_hundred_thousand(runs):
    quiet = runs.of(Case("nobody dies", "2x2", ("numerics=fp32",), steps=20, deaths=0), "float sums")
    faults = fails("4:0.1@backward", "9:1.0@allreduce") + rejoins("7:0.1")
    struck = runs.of(Case("two die", "2x2", ("numerics=fp32", *faults), steps=20, deaths=2), "float sums")
    assert struck.losses == pytest.approx(quiet.losses, rel=1e-5)
