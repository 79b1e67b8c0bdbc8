"""Runs all GPUs of this machine at full load at once, or its processor if it has no GPU, and checks the results.

    results, findings = exercise({gpu.uuid: gpu.name for gpu in Gpu.all()}, seconds=60.0)
    findings += dcgm()                           # NVIDIA's own diagnosis, if `dcgmi` is installed
    findings = judge({"GPU-...": [Exercise(...), ...], ...}, {"GPU-...": "NVIDIA H100", ...})     # pure

The exercises are matrix products, copies, and transfers over links. One process per device runs them
(`machine_checks.exercise`), because this package never imports torch. A device computes wrong numbers if its results
change, or differ from those of the other devices of its kind. It must not train, so its finding has the action `drain`.
Rates are compared with the median of the machine's devices of this kind, and with the rate at the beginning.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import msgspec

from recycle_pp.wire.messages.health import Finding

from .host import HOST

SLOWER = 0.9  # least normal rate, as a share of the median of the devices
TIRED = 0.8  # least normal rate at the end, as a share of the rate at the beginning; heat may throttle a device
START_SECONDS = 120.0  # extra time for the imports, and for the last try of each exercise
KILL_SECONDS = 5.0  # time for a killed process to die
DCGM_SECONDS = 600.0  # time limit; `dcgmi diag -r 1` takes about a minute


class Exercise(msgspec.Struct, frozen=True):
    """The results of one exercise on one device.

    rate    median rate of all tries, in `unit`
    first   median rate of the first fifth of the tries
    last    median rate of the last fifth of the tries
    wrong   number of tries with a wrong result
    digest  digest of the result, which is the same on all devices of a kind; "" if there is none
    """

    name: str
    unit: str
    rate: float
    first: float
    last: float
    tries: int
    wrong: int
    digest: str = ""


def exercise(devices: Mapping[str, str], seconds: float) -> tuple[dict[str, list[Exercise]], list[Finding]]:
    """Runs all exercises. Returns (device -> its results, findings).

    devices  UUID of each GPU -> its kind; empty: the processor
    seconds  time for each of the three exercises
    """
    command = [sys.executable, "-m", "recycle_pp.machine_checks.exercise", f"--seconds={seconds}"]
    processes = {
        device: subprocess.Popen(
            command,
            env=os.environ
            | {"CUDA_VISIBLE_DEVICES": "" if device == HOST else device, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for device in devices or [HOST]
    }
    results, findings = {}, []
    with ThreadPoolExecutor(len(processes)) as pool:
        ends = list(pool.map(lambda process: _end(process, 3 * seconds + START_SECONDS), processes.values()))
    for device, (output, error) in zip(processes, ends, strict=True):
        results[device] = [msgspec.json.decode(line, type=Exercise) for line in output.splitlines()]
        if error:
            findings.append(Finding(device, "exercise", "drain", f"after {len(results[device])} exercises: {error}"))
    return results, findings + judge(results, devices)


def _end(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, str]:
    """(output of the process, why it failed or ""). Kills the process after `seconds`, but does not wait for its death
    for long, because a process that hangs in the driver does not die."""
    try:
        output, errors = process.communicate(timeout=seconds)
        return output, "" if process.returncode == 0 else _last(errors) or f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return process.communicate(timeout=KILL_SECONDS)[0], "it did not end in time"
    except subprocess.TimeoutExpired as expired:
        return expired.output or b"", "it does not end, and cannot be killed"


def judge(results: Mapping[str, Sequence[Exercise]], kinds: Mapping[str, str]) -> list[Finding]:
    """The findings from all results. Compares only devices of a kind.

    results  device -> its results
    kinds    device -> its kind; missing for the processor
    """
    findings = []
    for name, kind in dict.fromkeys((done.name, kinds.get(device)) for device, of in results.items() for done in of):
        alike = [device for device in results if kinds.get(device) == kind]
        by_device = {device: done for device in alike for done in results[device] if done.name == name}
        usual, count = Counter(done.digest for done in by_device.values()).most_common(1)[0]
        proven = 2 * count > len(by_device)  # whether a majority agrees; of two different devices, either may be wrong
        middle = median(done.rate for done in by_device.values())
        for device, done in by_device.items():
            if done.wrong:
                detail = f"{done.wrong} of {done.tries} results were wrong"
                findings.append(Finding(device, name, "drain", detail))
            elif done.digest != usual:
                detail = "its result differs from that of the other devices"
                findings.append(Finding(device, name, "drain" if proven else "note", detail))
            if done.rate < SLOWER * middle:
                detail = f"{done.rate:.3g} {done.unit}, {middle / done.rate:.1f} times less than the median"
                findings.append(Finding(device, name, "note", detail))
            if done.last < TIRED * done.first:
                detail = f"{done.last:.3g} {done.unit} at the end, {done.first:.3g} at the beginning"
                findings.append(Finding(device, name, "note", detail))
    return findings


def dcgm() -> list[Finding]:
    """The findings of `dcgmi diag -r 1`. Empty if dcgmi is not installed or finds no problem."""
    if shutil.which("dcgmi") is None:
        return []
    try:
        done = subprocess.run(["dcgmi", "diag", "-r", "1"], capture_output=True, timeout=DCGM_SECONDS)
    except subprocess.TimeoutExpired:
        return [Finding(HOST, "dcgmi", "note", f"dcgmi diag -r 1 did not end within {DCGM_SECONDS:.0f} s")]
    if done.returncode == 0:
        return []
    failed = [line for line in done.stdout.decode(errors="replace").splitlines() if "fail" in line.lower()]
    return [Finding(HOST, "dcgmi", "drain", "; ".join(" ".join(line.split()) for line in failed) or _last(done.stderr))]


def _last(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
