"""Judges a survey of several machines. Pure functions that turn a survey into Checks, a table and JSON.

checks = judge(survey)              # each machine, each pair, and each machine compared with the median of all
print(table(survey, checks))        # one line per machine, then the problems
as_json(survey, checks)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median, median_high, median_low
from typing import Any

import msgspec

from recycle_pp.health.active import SLOWER
from recycle_pp.telemetry.words import names, plural
from recycle_pp.wire.messages.machines import GpusFound

from .check import VERDICTS, Check, code, lines, size
from .gpu_rules import rate
from .surveyor import Survey

LESS = 2.0  # a value this many times worse than the median is a problem; shared networks and disks always vary
FAR = 0.001  # seconds by which a slow link's latency must also exceed the usual one
CLOCK = 0.5  # seconds that a clock may differ from the median; events of a job are sorted by its nodes' clocks
ALIKE = ("python", "torch", "triton", "numpy", "torch build", "GPU driver")  # equal on all machines


def judge(survey: Survey) -> list[Check]:
    """All checks of the survey. A check of a single machine is left out if it found no problem."""
    names = labels(survey)
    checks = [Check(f"machine {n}", "did not connect", "connects", "broken", _START) for n in survey.missing]
    for number, machine in survey.machines.items():
        if machine.found is None:
            advice = f"it hangs, or has died: ssh {machine.host} python -m recycle_pp.machine_checks"
            checks.append(Check(names[number], "no answer", "its checks", "broken", advice))
            continue
        for check in machine.found.checks:
            if check.verdict != "well":
                checks.append(
                    Check(f"{names[number]}: {check.name}", check.value, check.limit, check.verdict, check.advice)
                )
    return [
        *checks,
        *_alike(survey, names),
        *_clocks(survey, names),
        *_rates(survey, names),
        *_gpus(survey, names),
        *_links(survey, names),
    ]


_START = "start the same command there, with the same master address and RECYCLE_TOKEN"


def labels(survey: Survey) -> dict[int, str]:
    """Number of a machine -> its host name, with the number appended if several machines have this name."""
    count = Counter(machine.host for machine in survey.machines.values())
    return {n: m.host if count[m.host] == 1 else f"{m.host}/{n}" for n, m in survey.machines.items()}


def _alike(survey: Survey, names: Mapping[int, str]) -> list[Check]:
    checks = []
    for what in ALIKE:
        found = {
            number: check.value
            for number, machine in survey.machines.items()
            for check in (machine.found.checks if machine.found else ())
            if check.name == what
        }
        if not found:
            continue
        usual, _ = Counter(found.values()).most_common(1)[0]
        for number, value in found.items():
            if value != usual:
                checks.append(Check(f"{names[number]}: {what}", value, usual, "broken", _VERSIONS))
    return checks


_VERSIONS = "install the same version on all machines: the job refuses workers whose results would differ"


def _clocks(survey: Survey, names: Mapping[int, str]) -> list[Check]:
    offsets = {n: machine.offset for n, machine in survey.machines.items() if machine.found}
    middle = median(offsets.values()) if offsets else 0.0
    checks = []
    for number, offset in offsets.items():
        if abs(offset - middle) > CLOCK:
            value, limit = f"{offset - middle:+.1f} s", f"{CLOCK} s from the median"
            checks.append(Check(f"{names[number]}: clock", value, limit, "warning", "chronyc makestep"))
    return checks


def _rates(survey: Survey, names: Mapping[int, str]) -> list[Check]:
    found = {n: machine.found for n, machine in survey.machines.items() if machine.found}
    advice = "every checkpoint waits for the slowest machine: put run.dir on a different disk"
    checks = _slower("run folder writes", {names[n]: of.writes for n, of in found.items()}, advice)
    advice = "copy the data to a local disk"
    return checks + _slower("data reads", {names[n]: of.reads for n, of in found.items()}, advice)


def _gpus(survey: Survey, names: Mapping[int, str]) -> list[Check]:
    """Checks that compare the number of GPUs between the machines, and the GPUs of each kind."""
    found = {n: machine.found.gpus for n, machine in survey.machines.items() if machine.found}
    counts = {number: sum(gpus.count for gpus in of) for number, of in found.items()}
    usual = max(Counter(counts.values()).items(), key=lambda item: item[::-1], default=(0, 0))[0]
    advice = "compare nvidia-smi and CUDA_VISIBLE_DEVICES with those of another machine"
    other = [
        Check(f"{names[number]}: GPUs", str(count), f"others have {usual}", "warning", advice)
        for number, count in counts.items()
        if count != usual
    ]
    by_kind: dict[str, dict[str, GpusFound]] = {}
    for number, of in found.items():
        for gpus in of:
            by_kind.setdefault(gpus.kind, {})[names[number]] = gpus
    return [*other, *(check for alike in by_kind.values() for check in _of_kind(alike))]


def _of_kind(found: Mapping[str, GpusFound]) -> list[Check]:
    """Checks that compare the GPUs of one kind. found: name of the machine -> its GPUs."""
    checks = []
    most = max(gpus.links for gpus in found.values())
    for name, gpus in found.items():
        if gpus.links < most:
            advice = "nvidia-smi nvlink --status; reset its GPUs"
            checks.append(Check(f"{name}: GPU NVLinks", f"{gpus.links} active", f"{most} active", "warning", advice))
    done = {(name, each.name): each for name, gpus in found.items() for each in gpus.done}
    for exercise in dict.fromkeys(exercise for _, exercise in done):
        own = {name: each for (name, of), each in done.items() if of == exercise}
        middle = median(each.rate for each in own.values())
        usual, _ = Counter(each.digest for each in own.values()).most_common(1)[0]
        for name, each in own.items():
            what = f"{name}: GPU {exercise}"
            if each.digest != usual:
                advice = f"its GPUs compute wrong numbers; on {name}: python -m recycle_pp.health --active"
                checks.append(Check(what, "a different result", "the result of most machines", "broken", advice))
            if each.rate < SLOWER * middle:
                value = f"{rate(each.rate, each.unit)}, {middle / each.rate:.1f} times less than the median"
                advice = "look at its heat, power and clocks: python -m recycle_pp.health"
                checks.append(Check(what, value, rate(middle, each.unit), "warning", advice))
    return checks


def _links(survey: Survey, names: Mapping[int, str]) -> list[Check]:
    pairs = {f"{names[a]} -> {names[b]}": link for (a, b), link in survey.links.items()}
    checks = []
    for pair, link in pairs.items():
        if link.error:
            there = pair.rpartition(" ")[2]
            advice = f"open all ports between the machines, or set control.interface to a network that reaches {there}"
            checks.append(Check(pair, link.error, "connects", "broken", advice))
    return checks + _slow_links(survey, names)


def _slow_links(survey: Survey, names: Mapping[int, str]) -> list[Check]:
    """Checks of slow links. A machine whose links are slow in general gets one check. A single link gets a check if it
    is slower than usual for both of its machines."""
    well = {pair: link for pair, link in survey.links.items() if not link.error}
    usual = {}
    for number in {number for pair in well for number in pair}:
        own = [link for pair, link in well.items() if number in pair]
        usual[number] = median_low(link.seconds for link in own), median_high(link.bandwidth for link in own)
    if not usual:
        return []
    seconds, bandwidth = median_low(of for of, _ in usual.values()), median_high(of for _, of in usual.values())
    checks = [
        check
        for number, own in sorted(usual.items())
        for check in _slow_link(names[number], own, (seconds, bandwidth), "the median of the machines")
    ]
    for (a, b), link in well.items():
        expected = max(usual[a][0], usual[b][0]), min(usual[a][1], usual[b][1])
        pair = f"{names[a]} -> {names[b]}"
        checks += _slow_link(pair, (link.seconds, link.bandwidth), expected, "the usual value there")
    return checks


def _slow_link(name: str, found: tuple[float, float], usual: tuple[float, float], than: str) -> list[Check]:
    """Checks of latency and bandwidth. found, usual: (seconds one way, bytes per second). than: `usual` in words."""
    checks = []
    if found[1] * LESS < usual[1]:
        value = f"{size(found[1])}/s, {usual[1] / max(found[1], 1.0):.1f} times less than {than}"
        advice = "look for a slower card or cable, or another interface: ethtool; iperf3"
        checks.append(Check(f"{name}: bandwidth", value, f"{size(usual[1])}/s", "warning", advice))
    if found[0] > LESS * usual[0] and found[0] - usual[0] > FAR:
        value = f"{found[0] * 1e3:.1f} ms one way, {found[0] / usual[0]:.1f} times {than}"
        advice = "it is far away, or its packets take a detour: traceroute"
        checks.append(Check(f"{name}: latency", value, f"{usual[0] * 1e3:.1f} ms", "warning", advice))
    return checks


def _slower(what: str, rates: Mapping[str, float | None], advice: str) -> list[Check]:
    """Checks of the rates that are far below the median. rates: name -> bytes per second; None: not measured."""
    known = {name: rate for name, rate in rates.items() if rate is not None}
    middle = median(known.values()) if known else 0.0
    return [
        Check(
            f"{name}: {what}",
            f"{size(rate)}/s, {middle / max(rate, 1.0):.1f} times less than the median",
            f"{size(middle)}/s",
            "warning",
            advice,
        )
        for name, rate in known.items()
        if rate * LESS < middle
    ]


# -- what is printed ----------------------------------------------------------------------------------------------


def table(survey: Survey, checks: list[Check]) -> str:
    """The text for the screen: the verdict, a row for each machine, and the problems. If a machine has GPUs, there are
    columns with the number of GPUs and with the median rate of each exercise."""
    count = plural(len(survey.machines) + len(survey.missing), "machine")
    found = plural(len(checks), "problem") if checks else "no problem"
    every = [gpus for machine in survey.machines.values() if machine.found for gpus in machine.found.gpus]
    exercises = list(dict.fromkeys(each.name for gpus in every for each in gpus.done))
    head = (*_HEAD, *["GPUs"] * bool(every), *exercises)
    rows = [head, *(_row(survey, number, name, exercises, bool(every)) for number, name in labels(survey).items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(
        [f"{VERDICTS[code(checks)]}: {count}, {found}", *(f"  {row}" for row in text), *lines(_together(checks))]
    )


def _together(checks: list[Check]) -> list[Check]:
    """The checks, with one line for the same problem of several machines: "host0, host1: open files"."""
    found: dict[Check, list[str]] = {}
    for check in checks:
        machine, colon, name = check.name.rpartition(": ")
        found.setdefault(check._replace(name=name), []).extend([machine] * bool(colon))
    return [check._replace(name=": ".join([names(of, 4)] * bool(of) + [check.name])) for check, of in found.items()]


_HEAD = ("machine", "by", "clock", "writes", "reads", "sends", "receives", "one way")


def _row(survey: Survey, number: int, name: str, exercises: Sequence[str], gpus: bool) -> tuple[str, ...]:
    """The row of a machine, with the medians of its links. gpus: whether a column shows the number of its GPUs."""
    machine = survey.machines[number]
    if machine.found is None:
        return (name, "no answer", *[""] * (len(_HEAD) - 2 + gpus + len(exercises)))
    sends = [link for (a, _), link in survey.links.items() if a == number and not link.error]
    receives = [link for (_, b), link in survey.links.items() if b == number and not link.error]
    done = {each.name: rate(each.rate, each.unit) for of in reversed(machine.found.gpus) for each in of.done}
    return (
        name,
        f"{machine.found.interface or '?'} {machine.found.address}",
        f"{machine.offset * 1e3:+.1f} ms",
        *("" if each is None else f"{size(each)}/s" for each in (machine.found.writes, machine.found.reads)),
        *(f"{size(median(link.bandwidth for link in of))}/s" if of else "" for of in (sends, receives)),
        f"{median(link.seconds for link in sends) * 1e3:.2f} ms" if sends else "",
        *[str(sum(of.count for of in machine.found.gpus))] * gpus,
        *(done.get(name, "") for name in exercises),
    )


def as_json(survey: Survey, checks: list[Check]) -> dict[str, Any]:
    names = labels(survey)
    machines = [
        {"machine": name, "offset": survey.machines[n].offset}
        | ({key: getattr(of, key) for key in ("address", "interface", "writes", "reads")} if of else {})
        | ({"gpus": msgspec.to_builtins(of.gpus)} if of and of.gpus else {})
        for n, name in names.items()
        for of in (survey.machines[n].found,)
    ]
    links = [
        {"from": names[a], "to": names[b], "seconds": link.seconds, "bandwidth": link.bandwidth, "error": link.error}
        for (a, b), link in survey.links.items()
    ]
    checked = [check._asdict() for check in checks]
    return {"verdict": VERDICTS[code(checks)], "machines": machines, "links": links, "checks": checked}
