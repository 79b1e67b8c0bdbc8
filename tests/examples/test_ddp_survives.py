"""examples/ddp_survives.py does what its docstring promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_survives.py"


def losses_and_workers(*arguments: str) -> tuple[list[float], list[int]]:
    """The loss and the number of workers of each step, in order. Checks that every step is printed."""
    done = subprocess.run([sys.executable, EXAMPLE, *arguments], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    steps = [re.fullmatch(r"step (\d+) loss (\S+) workers (\d+)", line) for line in done.stdout.splitlines()]
    printed = {int(step[1]): (float(step[2]), int(step[3])) for step in steps if step}
    assert list(printed) == list(range(1, 41))
    return [loss for loss, _ in printed.values()], [workers for _, workers in printed.values()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ddp_continues_after_a_sigkill_with_the_losses_of_a_fault_free_run():
    quiet, everybody = losses_and_workers()
    faulty, survivors = losses_and_workers("--kill", "2@10")
    assert everybody == [4] * 40
    assert survivors == [4] * 10 + [3] * 30
    assert faulty == pytest.approx(quiet, rel=1e-3)
