"""Checks of several machines: the launcher's variables, measurements between machines, and their verdict."""

import re
import socket
import threading
import time
from itertools import combinations
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.machine_checks import __main__ as command
from recycle_pp.machine_checks import link, member, several, surveyor
from recycle_pp.machine_checks.check import Check, code
from recycle_pp.machine_checks.facts import route_to
from recycle_pp.machine_checks.launched import Launched, launched
from recycle_pp.machine_checks.member import Look, take_part
from recycle_pp.machine_checks.surveyor import Machine, Survey, Surveyor, rounds
from recycle_pp.testing.ports import free_ports
from recycle_pp.wire.connection import Channel
from recycle_pp.wire.messages.machines import GpuExercise, GpusFound, Judgement, LinkProbed, MachineFound, MachineHello

TOKEN = "the secret of the machines' tests"
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "hostA", "MASTER_PORT": "29500",
}  # fmt: skip
SRUN = {"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n[007-009,12]"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, None),
        ({"SLURM_NNODES": "4", "SLURM_NODEID": "0"}, None),  # a batch script
        (TORCHRUN, Launched(1, 2, False, "hostA", 29501)),
        (TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"}, Launched(1, 2, True, "hostA", 29501)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "hostA", "MASTER_PORT": "29500"}, None),  # not torchrun's
        (SRUN, Launched(2, 4, True, "n007", 29501)),
        (SRUN | {"RANK": "2", "WORLD_SIZE": "4"}, Launched(2, 4, True, "n007", 29501)),
        (SRUN | {"SLURM_LOCALID": "3", "SLURM_STEP_NODELIST": "a1,b[2-3]"}, Launched(2, 4, False, "a1", 29501)),
        (SRUN | {"SLURM_STEP_NODELIST": "rack[3-4]-a,login"}, Launched(2, 4, True, "rack3-a", 29501)),
    ],
)
def test_the_number_of_this_machine_is_read_from_variables_of_torchrun_and_srun(environment, found):
    assert launched(environment) == found


def test_incomplete_variables_are_an_error():
    with pytest.raises(ValueError, match="SLURM_LOCALID"):
        launched({key: value for key, value in SRUN.items() if key != "SLURM_LOCALID"})


@given(st.sets(st.integers(0, 99), max_size=12))
def test_each_pair_is_measured_once_and_no_machine_twice_in_a_round(numbers):
    found = list(rounds(sorted(numbers)))
    assert sorted(tuple(sorted(pair)) for of in found for pair in of) == list(combinations(sorted(numbers), 2))
    for of in found:
        assert len({number for pair in of for number in pair}) == 2 * len(of)


# -- measurements -------------------------------------------------------------------------------------------------


@pytest.fixture
def survey(monkeypatch):
    """survey(looks, count): surveys `count` expected machines. Returns the survey and the exit codes by machine number.

    looks: number -> Look, for the machines that take part; each runs in a thread.
    """

    def survey(looks, count, token=TOKEN, end=1, wait=10.0):
        port, codes = free_ports(1), {}

        def play(number):
            try:
                place = Launched(number, count, True, "127.0.0.1", port)
                codes[number] = take_part(place, token if number else TOKEN, lambda: looks[number])
            except ValueError as error:
                codes[number] = str(error)

        threads = [threading.Thread(target=play, args=(number,), daemon=True) for number in looks]
        with Surveyor(count, port, TOKEN, wait) as hub:
            for thread in threads:
                thread.start()
            found = hub.run()
            hub.end(end)
            for thread in threads:
                thread.join(20)
        return found, codes

    monkeypatch.setattr(member, "AGAIN", 0.02)
    return survey


WELL = Look([Check("python", "3.12", ">=3.11")], 1e9, None)


def test_every_machine_answers_and_every_pair_is_measured_in_both_directions(survey):
    found, codes = survey({0: WELL, 1: WELL._replace(writes=5e8), 2: WELL}, count=3)
    assert not found.missing and codes == {0: 1, 1: 1, 2: 1}
    assert [found.machines[n].found.writes for n in range(3)] == [1e9, 5e8, 1e9]
    assert {(a, b) for a in range(3) for b in range(3) if a != b} == found.links.keys()
    for of in found.links.values():
        assert 0 < of.seconds < 0.5 and of.bandwidth > 1e6 and not of.error
    for machine in found.machines.values():
        assert abs(machine.offset) < 0.5 and machine.found.interface == "lo" and machine.host == socket.gethostname()


def test_a_machine_that_does_not_connect_is_reported_as_missing(survey):
    found, codes = survey({0: WELL, 2: WELL}, count=3, wait=1.0)
    assert found.missing == [1] and found.links.keys() == {(0, 2), (2, 0)} and codes == {0: 1, 2: 1}


def test_a_machine_with_another_token_gets_the_reason(survey):
    found, codes = survey({0: WELL, 1: WELL}, count=2, token="quite another secret text", wait=1.0)
    assert found.missing == [1] and "RECYCLE_TOKEN" in codes[1]


def test_clocks_that_are_ahead_of_machine_0_are_measured(survey, monkeypatch):
    behind = SimpleNamespace(time=lambda: time.time() - 100.0, monotonic=time.monotonic)
    monkeypatch.setattr(surveyor, "time", behind)
    found, _ = survey({0: WELL, 1: WELL}, count=2)
    assert all(abs(machine.offset - 100.0) < 0.5 for machine in found.machines.values())


def test_a_port_without_an_answer_is_the_error_of_its_link():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert link.probe("127.0.0.1", port, TOKEN, MachineHello(0, "a")).error == "Connection refused"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_links_and_the_survey_work_over_ipv6_too():
    with link.answering(TOKEN) as port:
        for address in ("::1", "127.0.0.1"):
            assert not link.probe(address, port, TOKEN, MachineHello(0, "a")).error
    port = free_ports(1)
    with Surveyor(1, port, TOKEN):
        Channel.connect("::1", port, TOKEN, MachineHello(0, "a")).close()
    assert route_to("::1", free_ports(1))[::2] == ("::1", False)


def test_a_stranger_does_not_disturb_the_survey(survey):
    looks = {0: WELL, 1: WELL}
    with link.answering(TOKEN) as port:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        with pytest.raises(OSError, match="no authenticated connection"):
            Channel.connect("127.0.0.1", port, "another secret of sixteen", MachineHello(0, "a"))
        assert not link.probe("127.0.0.1", port, TOKEN, MachineHello(0, "a")).error
    assert not survey(looks, count=2)[0].missing


# -- verdicts -----------------------------------------------------------------------------------------------------


def made(rates=(1e9, 1e9, 1e9), links=None, offsets=(0.0, 0.0, 0.0), checks=None, hosts="abc", missing=(), gpus=None):
    """A survey of three machines.

    links   (from, to) -> LinkProbed of unusual links
    checks  machine number -> its checks
    gpus    machine number -> (copy rate, digest, number of NVLinks), and the number of GPUs if it is not 8
    """
    machines = {
        n: Machine(
            f"host{hosts[n]}",
            MachineFound(
                f"10.0.0.{n}",
                "eth0",
                5000,
                rates[n],
                None,
                [Judgement(*of) for of in (checks or {}).get(n, [])],
                [GpusFound("H100", (*of, 8)[3], of[2], [GpuExercise("copies", "B/s", *of[:2])])]
                if (of := (gpus or {}).get(n))
                else [],
            ),
            offsets[n],
        )
        for n in range(3)
        if n not in missing
    }
    usual = {(a, b): LinkProbed(1e-4, 1e9) for a in machines for b in machines if a != b}
    return Survey(machines, list(missing), usual | (links or {}))


NARROW = {(1, 2): LinkProbed(1e-4, 1.18e8), (2, 1): LinkProbed(1e-4, 1.18e8)}
AWAY = {pair: LinkProbed(0.02, 1e9) for pair in [(0, 2), (1, 2), (2, 0), (2, 1)]}
ALIKE = {n: [Check("torch", "2.13.0", "")] for n in range(3)}
TABLE = [
    (made(), 0, []),
    (made(rates=(1e9, 6e8, 1.6e9)), 0, []),
    (made(rates=(1e9, 1e8, 1e9)), 1, ["hostb: run folder writes  100 MB/s, 10.0 times less than the median"]),
    (made(rates=(1e9, None, 1e9)), 0, []),
    (made(links=NARROW), 1, ["hostb -> hostc, hostc -> hostb: bandwidth  118 MB/s, 8.5 times less"]),
    (
        made(links={(0, 2): LinkProbed(0.05, 1e9)}),
        1,
        ["hosta -> hostc: latency  50.0 ms one way, 500.0 times the usual"],
    ),
    (made(links={(0, 2): LinkProbed(0.0009, 1e9)}), 0, []),
    (made(links=AWAY), 1, ["hostc: latency  20.0 ms one way, 200.0 times", "1 problem"]),
    (made(links={(0, 2): LinkProbed(0, 0, "timed out")}), 2, ["hosta -> hostc  timed out", "open all ports"]),
    (made(offsets=(0.0, 0.2, -0.2)), 0, []),
    (made(offsets=(0.0, 0.0, 7.0)), 1, ["hostc: clock  +7.0 s"]),
    (made(offsets=(0.0, 7.0, 7.0)), 1, ["hosta: clock  -7.0 s"]),
    (made(checks=ALIKE), 0, []),
    (made(checks=ALIKE | {2: [Check("torch", "2.12.1", "")]}), 2, ["hostc: torch  2.12.1", "install the same version"]),
    (made(checks={1: [Check("open files", "512", "4096", "warning", "ulimit")]}), 1, ["hostb: open files  512"]),
    (made(gpus=dict.fromkeys(range(3), (2e12, "abc", 18))), 0, ["copies", "2 TB/s"]),
    (made(gpus={0: (2e12, "abc", 18), 1: (1.85e12, "abc", 18), 2: (2e12, "abc", 18)}), 0, []),
    (
        made(gpus={0: (2e12, "abc", 18), 1: (1.7e12, "abc", 18), 2: (2e12, "abc", 18)}),
        1,
        ["hostb: GPU copies  1.7 TB/s, 1.2 times less than the median  2 TB/s"],
    ),
    (
        made(gpus={0: (2e12, "abc", 18), 1: (2e12, "abd", 18), 2: (2e12, "abc", 18)}),
        2,
        ["hostb: GPU copies  a different"],
    ),
    (
        made(gpus=dict.fromkeys(range(2), (2e12, "abc", 18)) | {2: (2e12, "abc", 16)}),
        1,
        ["1 problem", "hostc: GPU NVLinks  16 active  18 active"],
    ),
    (
        made(gpus={0: (2e12, "abc", 18, 7)} | dict.fromkeys((1, 2), (2e12, "abc", 18))),
        1,
        ["1 problem", "hosta: GPUs  7  others have 8"],
    ),
    (made(gpus=dict.fromkeys(range(2), (2e12, "abc", 18))), 1, ["1 problem", "hostc: GPUs  0  others have 8"]),
    (
        made(checks={n: [Check("open files", "512", "4096", "warning", "ulimit")] for n in (0, 2)}),
        1,
        ["2 problems", "hosta, hostc: open files  512"],
    ),
    (made(missing=[1]), 2, ["machine 1  did not connect"]),
    (made(hosts="aab", rates=(1e9, 1e8, 1e9)), 1, ["hosta/1: run folder writes"]),
]


@pytest.mark.parametrize(("survey", "exit_code", "words"), TABLE)
def test_values_far_below_the_median_and_differences_are_reported(survey, exit_code, words):
    checks = several.judge(survey)
    assert code(checks) == exit_code and (len(checks) > 0) == (exit_code > 0)
    printed = re.sub(r" {2,}", "  ", several.table(survey, checks))
    assert all(word in printed for word in words), printed
    assert len(several.as_json(survey, checks)["checks"]) == len(checks)


def test_a_machine_that_hangs_is_broken_and_keeps_its_row():
    survey = made()
    survey.machines[1] = Machine("hostb", None)
    checks = several.judge(survey)
    assert code(checks) == 2 and "ssh hostb" in checks[0].advice
    assert "hostb    no answer" in several.table(survey, checks)


def test_the_table_has_a_line_for_each_machine():
    head, columns, *rows = several.table(made(rates=(1.23e9, 1e9, 1e9)), []).splitlines()
    assert head == "well: 3 machines, no problem"
    assert columns.split() == ["machine", "by", "clock", "writes", "reads", "sends", "receives", "one", "way"]
    assert rows[0].split() == [
        "hosta",
        "eth0",
        "10.0.0.0",
        "+0.0",
        "ms",
        *["1.2", "GB/s"],
        *["1.0", "GB/s"] * 2,
        "0.10",
        "ms",
    ]


# -- the command --------------------------------------------------------------------------------------------------


def test_further_processes_of_a_machine_end_at_once(monkeypatch, capsys):
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    assert command.main([]) == 0 and capsys.readouterr() == ("", "")


def test_several_machines_need_a_token(monkeypatch, capsys):
    for key, value in (TORCHRUN | {"RANK": "4", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("RECYCLE_TOKEN", raising=False)
    assert command.main([]) == 2 and "RECYCLE_TOKEN" in capsys.readouterr().err
