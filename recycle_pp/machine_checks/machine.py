"""All checks of this machine.

checks = check_machine(Path("runs/mine"), Path("tokens.bin"), ("HOST0", 29501))
"""

from __future__ import annotations

from pathlib import Path

from recycle_pp.comm.nccl import limits
from recycle_pp.execution.compile_caches import caches, folders
from recycle_pp.health.look import figures

from . import facts, rules
from .check import Check

PORTS = (29500, 29501)  # torchrun's default, and the coordinator's
SHOWN = ("python", "torch", "triton", "numpy")
SECONDS = 10.0  # limit on each fact that a disk, a name server or a driver can delay


def check_machine(
    run_dir: Path, data_dir: Path | None = None, coordinator: tuple[str, int] | None = None
) -> list[Check]:
    """The checks in the order of a start. Takes 2 s, and 10 s more for each thing that hangs.

    run_dir      where checkpoints will be written; need not exist
    data_dir     a file or a folder of training data; None: not checked
    coordinator  host and port, as in control.address; None: not checked
    """
    hardware = facts.within(SECONDS, facts.hardware)
    gpus = hardware is None or bool(hardware.trouble or hardware.gpus)
    checks = [
        *_packages(gpus),
        rules.shared_memory(limits.free_shared_memory(), gpus),
        rules.open_files(*limits.open_files()),
        rules.locked_memory(limits.locked_memory()),
        rules.ports(PORTS, facts.busy_ports(PORTS)),
        rules.host_name(facts.within(SECONDS, facts.host_name)),
    ]
    if coordinator is not None:
        route = facts.within(SECONDS, lambda: facts.route_to(*coordinator))
        checks.append(rules.coordinator(*coordinator, route))
    checks.append(rules.run_disk(str(run_dir), facts.within(SECONDS, lambda: facts.write_rate(run_dir))))
    if data_dir is not None:
        checks.append(rules.data_disk(str(data_dir), facts.within(SECONDS, lambda: facts.read_rate(data_dir))))
    counted = facts.within(SECONDS, caches)
    checks.append(rules.triton_cache(str(folders()["triton"]), counted["triton"].files if counted else None, gpus))
    checks.append(rules.numba_cache(facts.compiled_loops()))
    return checks + _devices(hardware)


def _packages(gpus: bool) -> list[Check]:
    """Checks of SHOWN, and of any other package that is wrong."""
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
