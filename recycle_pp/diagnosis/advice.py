"""The command to type next, for each class of `finding.CLASSES`."""

from __future__ import annotations

from recycle_pp.telemetry.evidence import Evidence

from .finding import WELL, Finding


def next_command(found: Finding, e: Evidence) -> str:
    worker, run = found.worker, e.run
    log = f"tail -n 40 {run}/logs/worker-{worker}.log"
    match found.verdict:
        case "never_started" | "rank_death" if worker:
            return log
        case "compile_skew":
            return f"ls -l {run}/receipts"
        case "stuck_op" if found.where.endswith(".txt"):
            return f"less {run}/hangs/{found.where}"
        case "stuck_op":
            return log
        case "stuck_collective":
            return f"less {found.where or f'{run}/hangs/now.json'}"
        case "network":
            return f"ping -c 3 {found.where}"
        case "data" if found.where:
            return f"timeout 10 head -c 1 {found.where} | wc -c"
        case "storage":
            return f"df -h {found.where or run}"
        case "busy":
            return f"ssh {found.where} top -b -n 1 | head -n 20" if found.where else "top -b -n 1 | head -n 20"
        case "control_plane" if found.where:
            return f"ps -o pid,stat,cmd {found.where.split()[1]}"
        case "well" if found.code == WELL:
            return f"python -m recycle_pp.status {run}"
    return f"python -m recycle_pp.report {run}"
