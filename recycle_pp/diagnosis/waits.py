"""Finds the reason why a step does not end, from a report of what each worker does and for which worker it waits.

    finding = of_report(report, suspicion=10.0)      # None: the workers make progress

The cause is at the end of the chain of waits: a worker that does not wait for another one. If all workers wait, a
message is lost. Pure.
"""

from __future__ import annotations

from collections import Counter

from recycle_pp.telemetry.words import names
from recycle_pp.wire.records import HangReport, Sign

from .finding import BROKEN, WARNING, Finding, seconds

COORDINATOR = "coordinator"  # a node of the wait-for graph, as `protocol.hangs` writes it
OPS = ("F", "I", "W", "B", "O", "R", "V")


def of_report(report: HangReport, suspicion: float) -> Finding | None:
    waiting = {worker for worker, _ in report.waits}
    roots = {worker: sign for worker, sign in report.workers.items() if worker not in waiting and sign.kind != "starts"}
    silent = {w: sign for w, sign in roots.items() if sign.silent > suspicion / 2}
    if silent:
        worker = max(silent, key=lambda w: silent[w].silent)
        said = f"{worker} has sent no heartbeat for {seconds(silent[worker].silent)}: its process is stopped"
        return _stuck(report, worker, said)
    # A worker in a long op answers after the op, so the op is the reason.
    busy = {w for w, sign in roots.items() if sign.kind in ("works", "device") and sign.seconds > suspicion / 4}
    mute = {w: sign.unanswered or 0.0 for w, sign in roots.items() if w not in busy}
    if mute and max(mute.values()) > suspicion / 2:
        worker = max(mute, key=lambda w: mute[w])
        said = f"{worker} has not answered the new generation for {seconds(mute[worker])}: {roots[worker].does}"
        return _stuck(report, worker, said)
    if report.no_disk:
        worker = max(report.no_disk, key=lambda w: _reading(report.workers.get(w)))
        return _data(report, worker, "no worker that reads training data gets an answer from its disk")
    working = {worker: sign for worker, sign in roots.items() if sign.kind in ("works", "device")}
    if working:
        return _of_work(report, max(working, key=lambda w: (working[w].seconds, w)), suspicion)
    arrived = {w: sign for w, sign in roots.items() if (sign.delivered or 0.0) > suspicion / 2}
    if arrived:
        worker = max(arrived, key=lambda w: arrived[w].delivered or 0.0)
        return _stuck(report, worker, f"{worker} is still in {arrived[worker].does}, although the message has arrived")
    if any(giver == COORDINATOR for _, giver in report.waits):
        return Finding("control_plane", None, ["the workers wait for the coordinator", *_others(report, None)])
    members = {worker: sign for worker, sign in report.workers.items() if sign.kind == "waits"}
    return _of_lost_message(report, members) if members else None


def of_start(report: HangReport, suspicion: float) -> Finding | None:
    """Like `of_report`, before the first step. None if the start makes progress."""
    if report.missing:
        worker = report.missing[0]
        said = [
            f"{names(report.missing)} never connected to the coordinator: see the output of the launcher on that node"
        ]
        return Finding("never_started", worker, said)
    starts = {w: sign for w, sign in report.workers.items() if sign.kind == "starts" and sign.what != "ready"}
    late = {w: sign for w, sign in starts.items() if sign.quiet > suspicion / 2 or sign.seconds > 6 * suspicion}
    if not late:
        return None
    worker = max(late, key=lambda w: (late[w].quiet, late[w].seconds))
    sign = late[worker]
    verdict = {"data": "data", "kernels": "compile_skew", "state": "storage", "inputs": "storage"}.get(
        sign.what, "never_started"
    )
    said = [f'{worker} is not ready; its activity for {seconds(sign.seconds)} has been "{sign.does}"']
    ready = [w for w, sign in report.workers.items() if sign.kind == "waits"]
    if ready:
        said.append(f"{names(ready)} {'is' if len(ready) == 1 else 'are'} ready and {_wait(ready)}")
    runs = sign.quiet < suspicion / 2
    return Finding(verdict, worker, said, WARNING if runs else BROKEN, sign.path)


def culprit(report: HangReport) -> str | None:
    """The worker whose messages are missing from the sums of other workers, while its own sum lacks none; None if there
    is no such worker."""
    lacked = Counter(giver for sign in report.workers.values() for giver in sign.lacks)
    silent = [w for w, _ in lacked.most_common() if w in report.workers and not report.workers[w].lacks]
    return silent[0] if silent else None


def _of_work(report: HangReport, worker: str, suspicion: float) -> Finding | None:
    sign = report.workers[worker]
    runs = sign.kind == "works" and sign.quiet < max(sign.seconds / 2, 1.0)
    if sign.what == "data":
        return _data(report, worker, f"{worker} has been reading training data for {seconds(sign.seconds)}")
    if sign.what == "checkpoint":
        said = [
            f"{worker} has been copying its state for a checkpoint for {seconds(sign.seconds)}",
            *_others(report, worker),
        ]
        return Finding("storage", worker, said)
    if runs and sign.delayed > sign.seconds / 2:
        had = (
            f"{worker} has been in {sign.does} for {seconds(sign.seconds)}, without a core for {seconds(sign.delayed)}"
        )
        on = f"other processes use the cores of {sign.host or 'its host'}"
        return Finding("busy", worker, [had, on, *_others(report, worker)], WARNING, sign.host or "")
    if sign.seconds < suspicion / 4:
        return None
    if sign.first and sign.what in OPS:
        said = [f"{worker} has been in its first {sign.does} for {seconds(sign.seconds)}, which compiles its kernels"]
        return Finding("compile_skew", worker, [*said, *_others(report, worker)], WARNING)
    if sign.kind == "device":
        doing = "the host waits for its device, which has not finished"
    else:
        doing = "its thread computes" if runs else "its thread does not run"
    return _stuck(report, worker, f"{worker} has been in {sign.does} for {seconds(sign.seconds)}: {doing}")


def _of_lost_message(report: HangReport, members: dict[str, Sign]) -> Finding:
    """The finding if all workers wait. If two workers on different hosts lack each other's messages, the network
    between the hosts is cut."""
    oldest = max(members.values(), key=lambda sign: sign.seconds)
    said = [f"all {len(members)} workers wait, and none runs an op: {oldest.does} for {seconds(oldest.seconds)}"]
    for worker, sign in members.items():
        for giver in sign.lacks:
            other = report.workers.get(giver)
            if other is not None and worker in other.lacks and other.host != sign.host:
                said.append(f"{worker} on {sign.host} and {giver} on {other.host} lack each other's messages")
                return Finding("network", giver, said, BROKEN, other.host or "")
    silent = culprit(report)
    if silent is not None:
        lacking = [w for w, sign in report.workers.items() if silent in sign.lacks]
        said.append(f"{names(lacking)} {_lack(lacking)} the part of {silent} in the sum; {silent} itself lacks no part")
    return Finding("stuck_collective", silent, said)


def _data(report: HangReport, worker: str, said: str) -> Finding:
    sign = report.workers.get(worker)
    path = sign.path if sign else ""
    read = [f"{worker} waits for {path}, on {sign.host or 'its host'}"] if sign and path else []
    return Finding("data", worker, [said, *read, *_others(report, worker)], BROKEN, path)


def _stuck(report: HangReport, worker: str, said: str) -> Finding:
    return Finding("stuck_op", worker, [said, *_others(report, worker)], BROKEN, report.workers[worker].host or "")


def _others(report: HangReport, but: str | None) -> list[str]:
    others = [w for w, sign in report.workers.items() if w != but and sign.kind == "waits"]
    return [f"{names(others)} {_wait(others)}"] if others else []


def _wait(workers: list[str]) -> str:
    return "waits" if len(workers) == 1 else "wait"


def _lack(workers: list[str]) -> str:
    return "lacks" if len(workers) == 1 else "lack"


def _reading(sign: Sign | None) -> float:
    return (sign.reading or 0.0) if sign is not None else 0.0
