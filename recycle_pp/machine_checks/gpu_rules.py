"""Judges the setup of a machine's GPUs, their connections, and their results in exercises. Pure functions.

checks = gpus(setups, pairs, "2.13.0+cu130")     # setups: one for each GPU; pairs: (0, 1) -> Pair
checks = exercises(*exercise(kinds, 2.0))        # `exercise` is in `health.active`
summary = found(kinds, setups, results)          # for the comparison with other machines, in several.py

A check is about all GPUs of the machine. If some of them have a problem, its value names these GPUs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from recycle_pp.health.active import Exercise
from recycle_pp.health.setup import Pair, Setup
from recycle_pp.telemetry.words import names, plural
from recycle_pp.wire.messages.health import Finding
from recycle_pp.wire.messages.machines import GpuExercise, GpusFound

from .check import Check, Verdict, size


def gpus(setups: Sequence[Setup], pairs: Mapping[tuple[int, int], Pair], torch: str | None) -> list[Check]:
    """The checks of the setup and the connections. torch: the version of torch; None: not installed."""
    checks = [
        driver(setups[0], torch),
        pcie(setups),
        _each(
            "GPU persistence",
            setups,
            "on",
            lambda setup: "off" if setup.persistent is False else "",
            "the driver is unloaded between jobs, and each start takes seconds more: nvidia-smi -pm 1",
        ),
        _each(
            "GPU memory's ECC",
            setups,
            "on, or not supported",
            lambda setup: "off" if setup.ecc is False else "",
            "a flipped bit goes unnoticed: nvidia-smi -e 1, then reset the GPU",
        ),
        _each(
            "GPU users",
            setups,
            "no process",
            _users,
            "they take memory and time from a job, and the GPU was not exercised: nvidia-smi",
        ),
        nvlink(setups),
    ]
    return checks + ([peers(pairs)] if pairs else [])


def _users(setup: Setup) -> str:
    if setup.processes:
        return f"{setup.processes} process{'es' * (setup.processes > 1)}"
    return f"{size(setup.used or 0)} in use" if setup.is_in_use else ""


def driver(setup: Setup, torch: str | None) -> Check:
    """The check of the driver. It must support the major version of CUDA that torch was built for, or a newer one."""
    name, value = "GPU driver", setup.driver or "unknown"
    built = re.search(r"\+cu(\d+)(\d)$", torch or "")
    if built is None or setup.cuda is None:
        return Check(name, value, "the same on all machines")
    limit = f"CUDA {built[1]}"
    if setup.cuda[0] >= int(built[1]):
        return Check(name, value, limit)
    advice = f"it supports CUDA {setup.cuda[0]}.{setup.cuda[1]}: install a newer driver, or torch for this CUDA"
    return Check(name, value, limit, "broken", advice)


def pcie(setups: Sequence[Setup]) -> Check:
    """The check of the PCIe links. A GPU that saves power lowers its generation, but not its number of lanes. So the
    generation is judged only while the GPU is in its fastest power state."""

    def narrow(setup: Setup) -> str:
        lanes = setup.lanes is not None and setup.lanes < (setup.most_lanes or 0)
        old = setup.awake and setup.generation is not None and setup.generation < (setup.most_generation or 0)
        return f"generation {setup.generation} x{setup.lanes}" if lanes or old else ""

    best = max(setups, key=lambda setup: (setup.most_generation or 0, setup.most_lanes or 0))
    limit = f"generation {best.most_generation or '?'} x{best.most_lanes or '?'}"
    advice = "less than the GPU and the machine support: reseat it, look for a riser or a slot with fewer lanes"
    return _each("GPU PCIe", setups, limit, narrow, advice)


def nvlink(setups: Sequence[Setup]) -> Check:
    """The check of the NVLinks. Compares each GPU with the one that has the most active links, because a machine need
    not wire all links of a GPU."""
    most = max((setup.links or 0 for setup in setups), default=0)
    return _each(
        "GPU NVLinks",
        setups,
        f"{most} active" if most else "none here",
        lambda setup: f"{setup.links} active" if setup.links is not None and setup.links < most else "",
        "the others have more: nvidia-smi nvlink --status; reset the GPU, or reseat its bridge",
    )


def peers(pairs: Mapping[tuple[int, int], Pair]) -> Check:
    ways = Counter(pair.way for pair in pairs.values())
    found = ", ".join(f"{plural(count, 'pair')} by {way}" for way, count in ways.most_common())
    apart = [f"{a} and {b}" for (a, b), pair in pairs.items() if pair.direct is False]
    if not apart:
        return Check("GPU pairs", found, "peer access")
    value = f"{found}; no peer access between {names(apart, 4)}"
    advice = "messages between them go through host memory: nvidia-smi topo -p2p w; ACS off in the BIOS"
    return Check("GPU pairs", value, "peer access", "warning", advice)


def exercises(results: Mapping[str, Sequence[Exercise]], findings: Sequence[Finding]) -> list[Check]:
    """One check for each exercise, and one for processes that failed.

    results: UUID -> results of the GPU, in the order of the GPUs
    """
    numbers = {uuid: number for number, uuid in enumerate(results)}
    done = [each for of in results.values() for each in of]
    checks = []
    for name in dict.fromkeys([*(each.name for each in done), *(finding.signal for finding in findings)]):
        rates = [each.rate for each in done if each.name == name]
        units = {each.unit for each in done if each.name == name}
        own = [finding for finding in findings if finding.signal == name]
        value = f"{rate(min(rates), *units)} to {rate(max(rates), *units)}" if rates else "failed"
        verdict: Verdict = "broken" if any(finding.action != "note" for finding in own) else "warning"
        advice = "; ".join(f"GPU {numbers[finding.device]}: {finding.detail}" for finding in own)
        checks.append(Check(f"GPU {name}", value, "correct and alike", verdict if own else "well", advice))
    return checks


def found(kinds: Sequence[str], setups: Sequence[Setup], results: Mapping[str, Sequence[Exercise]]) -> list[GpusFound]:
    """A summary of the GPUs of each kind, for the comparison between machines. kinds: the model name of each GPU."""
    summary = []
    for kind in dict.fromkeys(kinds):
        its = [of for of, name in zip(results.values(), kinds, strict=True) if name == kind] if results else []
        links = [setup.links or 0 for setup, name in zip(setups, kinds, strict=True) if name == kind]
        done = []
        for name in dict.fromkeys(each.name for of in its for each in of):
            alike = [each for of in its for each in of if each.name == name]
            digest, _ = Counter(each.digest for each in alike).most_common(1)[0]
            done.append(GpuExercise(name, alike[0].unit, median(each.rate for each in alike), digest))
        summary.append(GpusFound(kind, len(links), max(links), done))
    return summary


def rate(value: float, unit: str) -> str:
    """A rate in words: "412 TFLOP/s", "1.8 GB/s"."""
    for scale, prefix in ((1e12, "T"), (1e9, "G")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value / 1e6:.3g} M{unit}"


def _each(name: str, setups: Sequence[Setup], limit: str, wrong: Callable[[Setup], str], advice: str) -> Check:
    """The check of one property of all GPUs. wrong: returns what is wrong with a GPU, or ""."""
    found: dict[str, list[int]] = {}
    for number, setup in enumerate(setups):
        if text := wrong(setup):
            found.setdefault(text, []).append(number)
    if not found:
        return Check(name, plural(len(setups), "GPU"), limit)
    value = "; ".join(f"{text}: GPU {names(numbers, 4)}" for text, numbers in found.items())
    return Check(name, value, limit, "warning", advice)
