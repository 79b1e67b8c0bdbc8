"""What is printed about the machines at the start of a job that spans hosts."""

import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from recycle_pp.coordinator.start_checks import StartChecks
from recycle_pp.wire.messages.handshake import SupervisorHello
from recycle_pp.wire.messages.machines import Judgement
from recycle_pp.wire.messages.supervisors import MachineChecked

from .states import job_state

VERSIONS = {"python": "3.12.1", "torch": "2.13.0"}
FILES = Judgement("open files", "512, at most 512", "1024", "warning", "ulimit -n 4096")


@pytest.fixture
def of():
    """Six machines with a rank each."""
    state, later = job_state(), []
    state.timers = SimpleNamespace(after=lambda seconds, function: later.append(function))
    for number in range(6):
        hello = SupervisorHello(number, f"host{number}", 7, number)
        state.roster.enter(number).supervisor = SimpleNamespace(hello=hello)
    checks = StartChecks(state)

    def print_all():
        (function,) = later
        later.clear()
        function()
        return state.recorder.said

    return SimpleNamespace(checks=checks, rank=state.roster.__getitem__, print=print_all, said=state.recorder.said)


def test_machines_without_a_problem_print_nothing(of):
    for number in range(6):
        of.checks.welcomed(number)
        of.checks.registered(of.rank(number), time.time() + 0.4)
        of.checks.checked(of.rank(number), MachineChecked(VERSIONS, []))
    assert of.print() == []


def test_versions_are_compared_with_those_of_rank_0_even_if_its_result_arrives_last(of):
    of.checks.checked(of.rank(1), MachineChecked(VERSIONS, []))
    of.checks.checked(of.rank(2), MachineChecked(VERSIONS | {"torch": "2.12.1"}, []))
    of.checks.checked(of.rank(0), MachineChecked(VERSIONS, []))
    (line,) = of.print()
    assert line.startswith("torch: 2.12.1 on host2 (needed: 2.13.0); install the version of rank 0's machine")


def test_versions_that_were_printed_before_the_result_of_rank_0_are_compared_later(of):
    of.checks.checked(of.rank(2), MachineChecked(VERSIONS | {"torch": "2.12.1"}, [FILES]))
    assert len(of.print()) == 1
    of.checks.checked(of.rank(0), MachineChecked(VERSIONS, []))
    assert [line.partition(";")[0] for line in of.print()][1:] == ["torch: 2.12.1 on host2 (needed: 2.13.0)"]


def test_the_same_problem_of_several_machines_is_one_line(of):
    for number in range(6):
        value = FILES.value if number else "600, at most 600"
        of.checks.checked(of.rank(number), MachineChecked(VERSIONS, [replace(FILES, value=value)]))
    (line,) = of.print()
    assert line == (
        "open files: 600, at most 600 on host0, 512, at most 512 on host1 and host2 and host3, and on 2 more machines "
        "(needed: 1024); ulimit -n 4096"
    )


@pytest.mark.parametrize(("offset", "words"), [(7.0, "7.0 s ahead of"), (-7.0, "7.0 s behind")])
def test_a_wrong_clock_is_named_once_for_each_machine(of, offset, words):
    of.checks.welcomed(1)
    for _ in range(2):
        of.checks.registered(of.rank(1), time.time() + offset)
    (line,) = of.said
    assert f"the clock of host1 is {words} that of the coordinator's machine" in line


def test_a_slow_answer_is_not_a_wrong_clock(of, monkeypatch):
    """The clock was read at an unknown time between the welcome and the arrival of the answer."""
    of.checks.welcomed(1)
    clock = time.time() + 0.1
    later = time.time() + 3.0
    monkeypatch.setattr(time, "time", lambda: later)
    of.checks.registered(of.rank(1), clock)
    assert of.said == []
