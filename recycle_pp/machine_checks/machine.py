"""All checks of this machine.

checks = check_machine(Path("runs/mine"), Path("tokens.bin"), ("HOST0", 29501))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from recycle_pp.comm.nccl import limits
from recycle_pp.execution.compile_caches import caches, folders
from recycle_pp.health.active import Exercise, exercise
from recycle_pp.health.look import figures
from recycle_pp.wire.messages.health import Finding
from recycle_pp.wire.messages.machines import GpusFound

from . import facts, gpu_rules, rules
from .check import Check

PORTS = (29500, 29501)  # torchrun's default, and the coordinator's
SHOWN = ("python", "torch", "triton", "numpy")
EXERCISE_SECONDS = 2.0  # for each exercise: products, copies and links
SECONDS = 10.0  # limit on each fact that a disk or a name server can delay
DRIVER_SECONDS = 60.0  # limit on the driver: without persistence mode, it starts each GPU anew


class Measured(NamedTuple):
    """The facts that take seconds to measure.

    run       the disk of the run folder; None: no answer
    data      the disk of the training data; None: no answer, or not measured
    hardware  the host and its GPUs; None: the driver does not answer
    results   UUID -> results of the GPU's exercises; empty for a GPU that other processes use
    findings  problems that the results show
    """

    run: facts.Disk | None
    data: facts.Disk | None
    hardware: facts.Hardware | None
    results: Mapping[str, Sequence[Exercise]] = {}
    findings: Sequence[Finding] = ()

    @property
    def gpus(self) -> list[GpusFound]:
        """A summary of the GPUs, for the comparison with other machines."""
        hardware = self.hardware
        if hardware is None:
            return []
        return gpu_rules.found([kind for kind, _ in hardware.gpus], hardware.setups, self.results)


def measure(run_dir: Path, data_dir: Path | None) -> Measured:
    """Measures the disks and exercises the GPUs. Takes 1 s without GPUs, and half a minute with GPUs."""
    run = facts.within(SECONDS, lambda: facts.write_rate(run_dir))
    data = facts.within(SECONDS, lambda: facts.read_rate(data_dir)) if data_dir is not None else None
    hardware = facts.within(DRIVER_SECONDS, facts.hardware)
    if hardware is None or not hardware.gpus:
        return Measured(run, data, hardware)
    states = zip(hardware.gpus, hardware.setups, strict=True)
    free = {sample.device: kind for (kind, sample), setup in states if not setup.is_in_use}
    results, findings = exercise(free, EXERCISE_SECONDS) if free else ({}, [])
    return Measured(run, data, hardware, {s.device: results.get(s.device, []) for _, s in hardware.gpus}, findings)


def check_machine(
    run_dir: Path,
    data_dir: Path | None = None,
    coordinator: tuple[str, int] | None = None,
    measured: Measured | None = None,
    ports: Sequence[int] | None = None,
) -> list[Check]:
    """The checks, in the order of a job's start. Takes 1 s besides `measure`, and SECONDS more for
    each disk or name server that hangs.

    run_dir      where checkpoints will be written; need not exist
    data_dir     a file or a folder of training data; None: not checked
    coordinator  host and port, as in control.address; None: not checked
    measured     result of `measure` for these folders; None: measures now
    ports        ports that must be free; None: PORTS
    """
    ports = PORTS if ports is None else ports
    measured = measured or measure(run_dir, data_dir)
    hardware = measured.hardware
    gpus = hardware is None or bool(hardware.trouble or hardware.gpus)
    checks = [
        *_packages(gpus),
        rules.shared_memory(limits.free_shared_memory(), gpus),
        rules.open_files(*limits.open_files()),
        rules.locked_memory(limits.locked_memory()),
        *([rules.ports(ports, facts.busy_ports(ports))] if ports else []),
        rules.host_name(facts.within(SECONDS, facts.host_name)),
    ]
    if coordinator is not None:
        route = facts.within(SECONDS, lambda: facts.route_to(*coordinator))
        checks.append(rules.coordinator(*coordinator, route))
    checks.append(rules.run_disk(str(run_dir), measured.run))
    if data_dir is not None:
        checks.append(rules.data_disk(str(data_dir), measured.data))
    counted = facts.within(SECONDS, caches)
    checks.append(rules.triton_cache(str(folders()["triton"]), counted["triton"].files if counted else None, gpus))
    checks.append(rules.numba_cache(facts.compiled_loops()))
    return checks + _devices(hardware) + _gpus(measured)


def _packages(gpus: bool) -> list[Check]:
    """The checks of the packages in SHOWN, and of any other package whose version is wrong."""
    installed = facts.installed()
    if not installed.requires:
        return [Check("recycle_pp", "not installed", "its package", "warning", "pip install -e . for known versions")]
    found = [rules.version(name, needed, installed.versions.get(name)) for name, needed in installed.requires.items()]
    shown = [check for check in found if check.verdict != "well" or check.name in SHOWN]
    if "torch" in installed.versions:
        shown.append(rules.torch_build(installed.versions["torch"], gpus))
    return shown


def _devices(hardware: facts.Hardware | None) -> list[Check]:
    if hardware is None:
        return [rules.driver("no answer")]
    checks = [rules.device("host", hardware.host.device, "nothing seen", hardware.findings)]
    if hardware.trouble:
        checks.append(rules.driver(hardware.trouble))
    for number, (kind, sample) in enumerate(hardware.gpus):
        about = f"{kind}, {figures(sample.reading)}"
        checks.append(rules.device(f"GPU {number}", sample.device, about, hardware.findings))
    return checks


def _gpus(measured: Measured) -> list[Check]:
    hardware = measured.hardware
    if hardware is None or not hardware.gpus:
        return []
    torch = facts.installed().versions.get("torch")
    checks = gpu_rules.gpus(hardware.setups, hardware.pairs, torch)
    return checks + gpu_rules.exercises(measured.results, measured.findings)
