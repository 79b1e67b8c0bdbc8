"""The checks that take a second, for the start of a job that spans hosts. Each machine's first supervisor runs this
module as a separate process, so that a disk that hangs delays nothing.

    python -m recycle_pp.machine_checks.quick --run runs/mine [--nccl]

Prints a `wire.messages.supervisors.MachineChecked` as one line of JSON: the versions, and the checks that found a
problem. A disk is judged by its fastest block, because the processor is busy with the workers' imports.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from recycle_pp.comm.nccl import limits
from recycle_pp.wire.messages.machines import Judgement
from recycle_pp.wire.messages.supervisors import MachineChecked

from . import facts, rules
from .check import Check

ALIKE = ("python", "torch", "triton", "numpy")  # packages that need the same version on all machines
DISK_SECONDS = 10.0  # limit on the measurement of the disk
END_SECONDS = 20  # seconds after which the kernel ends this process


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m recycle_pp.machine_checks.quick", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="the run folder")
    parser.add_argument("--nccl", action="store_true", help="the job uses NCCL")
    arguments = parser.parse_args(argv)
    signal.alarm(END_SECONDS)
    found = quick(arguments.run, arguments.nccl)
    print(msgspec.json.encode(found).decode(), flush=True)
    return 0


def quick(run_dir: Path, nccl: bool) -> MachineChecked:
    """The versions of packages, and the checks that found a problem.

    nccl: whether the job uses NCCL. If so, shared memory and locked memory are checked too
    """
    installed = facts.installed()
    checks = [rules.version(name, needed, installed.versions.get(name)) for name, needed in installed.requires.items()]
    checks.append(rules.open_files(*limits.open_files()))
    if nccl:
        checks.append(rules.shared_memory(limits.free_shared_memory(), gpus=True))
        checks.append(rules.locked_memory(limits.locked_memory()))
    checks.append(_disk(run_dir))
    wrong = [Judgement(*check) for check in checks if check.verdict != "well"]
    return MachineChecked({name: installed.versions[name] for name in ALIKE if name in installed.versions}, wrong)


def _disk(run_dir: Path) -> Check:
    disk = facts.within(DISK_SECONDS, lambda: facts.write_rate(run_dir))
    return rules.run_disk(str(run_dir), disk and disk._replace(rate=disk.best))


if __name__ == "__main__":
    sys.exit(main())
