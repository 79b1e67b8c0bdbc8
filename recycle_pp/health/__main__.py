"""Prints the state of this machine's hardware, or lifts the quarantine of a GPU.

    python -m recycle_pp.health                      # checks every GPU and the host
    python -m recycle_pp.health --active             # also runs them at full load for three minutes
    python -m recycle_pp.health --clear GPU-... RUN  # workers of the run may start on this GPU again

The first two forms need no run. Exit code 0: no problem found; 1: at least one problem, printed as a finding; 2: an
error, printed as one sentence. The third form takes effect at the next start of the run, or when a node joins it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from recycle_pp.command import parser_of
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.messages.health import Finding

from . import quarantine
from .active import dcgm, exercise
from .host import HOST, Host
from .look import figures, look
from .nvml import Gpu, MissingPackage


def main(argv: Sequence[str] | None = None) -> int:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = parser_of("health", about, more)
    parser.add_argument(
        "--clear", nargs=2, metavar=("UUID", "RUN"), help="lift the quarantine of a GPU in a run folder"
    )
    parser.add_argument(
        "--active",
        action="store_true",
        help="also run products, copies and links at full load and check the results; run dcgmi if it is installed",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of each exercise (default: 60)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.clear:
            uuid, folder = arguments.clear
            run = RunFolder(folder)
            run.require()
            quarantine.lift(run.quarantine, uuid)
            print(f"{uuid} is no longer in {run.quarantine}; workers may use it from the next start on")
            return 0
        return _look(arguments.seconds if arguments.active else None)
    except ValueError as error:
        print(f"recycle_pp: {error}", file=sys.stderr)
        return 2


def _look(active: float | None) -> int:
    """Checks this machine, and prints the results. Returns the exit code.

    active: seconds for each exercise; None: no exercises
    """
    try:
        gpus = Gpu.all()
    except MissingPackage as problem:
        raise ValueError(f"{problem}: pip install 'recycle-pp[gpu]'") from None
    samples, findings = look(Host(), gpus)
    findings += [Finding(HOST, "lost", "kill", f"GPU {name} does not answer") for name in Gpu.silent()]
    for sample in samples:
        print(f"{sample.device:42}{figures(sample.reading)}")
    if not gpus:
        print("no GPU")
    if active is not None:
        results, found = exercise({gpu.uuid: gpu.name for gpu in gpus}, active)
        for device, done in results.items():
            for of in done:
                print(f"{device:42}{of.name}: {of.rate:.3g} {of.unit}, {of.tries} tries")
        findings += found + (dcgm() if gpus else [])
    for finding in findings:
        print(line(finding))
    return 1 if findings else 0


def line(finding: Finding) -> str:
    """A finding as one line: "[health] DRAIN GPU-...: recovery: the driver asks for GPU_RESET"."""
    device = "" if finding.device == HOST else f"{finding.device}: "
    return f"[health] {finding.action.upper()} {device}{finding.signal}: {finding.detail}"


if __name__ == "__main__":
    sys.exit(main())
