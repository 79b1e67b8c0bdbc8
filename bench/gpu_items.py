"""The items of `gpu.py`, with the most fragile first and each item after its requirements.

    for item in items(cpu=False, nccl=Path("nccl-2.30.7"), out=Path("out")):
        command, environment = item.command(results)       # results: by name, of the items in `item.needs`
        wrong = item.judge(result, results)                # a sentence, or ""

Commands only measure. The functions here judge the results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
Result = Mapping[str, Any]
Results = Mapping[str, Result]
Command = tuple[list[str], dict[str, str]]  # arguments, additional environment

SHARED = {  # lets two workers use one GPU; needs NCCL 2.30 or newer
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "1",
    "NCCL_NET_GDR_LEVEL": "LOC",
}
KERNELS = (
    ("kernels", "each kernel that moves bytes", ("norm", "rope", "swiglu", "optimizer")),
    ("products", "each kernel with a matrix product", ("head_loss", "weight_grad")),
)
MOMENTS = ("forward", "backward", "weight", "send", "receive", "allreduce", "vote", "optimizer", "checkpoint")


@dataclass(frozen=True)
class Item:
    """claim: the statement that a passed item proves. seconds: time limit. least: seconds that must be left to start
    the item. needs: items that must have passed before."""

    name: str
    claim: str
    seconds: float
    command: Callable[[Results], Command]
    judge: Callable[[Result, Results], str] = lambda result, results: ""
    needs: tuple[str, ...] = ("needs",)
    least: float = 20.0
    compares: str | None = None
    alone: bool = False


def items(cpu: bool, nccl: Path | None, out: Path, steps: int) -> list[Item]:
    """All items. cpu: use tiny sizes, Gloo instead of NCCL, and interpreted kernels. out: folder for build outputs.
    steps: number of steps of the jobs over TCP."""
    interpreted = {"TRITON_INTERPRET": "1"} if cpu else {}
    steps, kills = (60, 1) if cpu else (steps, 20)
    job = ["gpu_job.py", *(["--cpu"] if cpu else [])]
    pair = ["gpu_links.py", *(["--cpu"] if cpu else [])]
    values = ["tests/kernels/values/test_rms_norm.py"] if cpu else ["tests/kernels/values", "-n", "8"]
    library = _library(out)
    with_nccl = {} if cpu else {"LD_PRELOAD": str(library), **SHARED}
    over = "gloo" if cpu else "nccl"

    def job_item(name: str, claim: str, seconds: float, *arguments: str, **more: Any) -> Item:
        return Item(name, claim, seconds, lambda results: _script(*job, *arguments), **more)

    def nccl_job(name: str, claim: str, seconds: float, *arguments: str, **more: Any) -> Item:
        given = ("--backend", over, *arguments)
        command = partial(_script, *job, *given, **with_nccl)
        return Item(name, claim, seconds, lambda results: command(), needs=("nccl build",), **more)

    return [
        Item(
            "needs",
            "packages, GPU, driver and NCCL are present",
            60,
            lambda results: _script("gpu_needs.py", *(["--cpu"] if cpu else [])),
            needs=(),
            least=5,
        ),
        Item(
            "kernel values",
            "a: every compiled kernel has the values of its float64 reference",
            240,
            lambda results: (
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *values],
                interpreted,
            ),
        ),
        Item(
            "nccl alone",
            "c: a communicator of one rank connects, sums int64 and uint8, and can be aborted",
            60,
            lambda results: _script(*pair, "alone"),
        ),
        job_item(
            "plain loop", "b: a plain torch loop, to compare the loss with", 150, "--plain", "--steps", str(steps)
        ),
        job_item(
            "undisturbed",
            "b: 2x2 workers share the card over TCP and reach the loss of the plain loop",
            240,
            "--steps",
            str(steps),
            judge=_near_plain,
            compares="plain loop",
        ),
        job_item(
            "same bits",
            f"b: {kills} kills change no bit of the weights",
            300,
            "--steps",
            str(steps),
            "--kills",
            str(kills),
            judge=_same_bits("undisturbed", kills),
            compares="undisturbed",
        ),
        Item(
            "nccl build",
            "c: NCCL 2.30 or newer is built, so that two ranks may share a GPU",
            420,
            lambda results: _script("gpu_needs.py", "--build", str(nccl or ""), str(library), *(["--cpu"] * cpu)),
            least=60,
        ),
        Item(
            "nccl pair",
            "c: two ranks exchange messages and sums of every dtype, abort during a sum, and rebuild",
            90,
            lambda results: _script(*pair, "pair", **with_nccl),
            needs=("nccl build",),
        ),
        Item(
            "nccl kept",
            "c: after a death two neighbours reuse their communicator without rebuilding it",
            90,
            lambda results: _script(*pair, "kept", **with_nccl),
            needs=("nccl build",),
        ),
        nccl_job("nccl 1x2", "c: a pipeline of two stages over NCCL", 120, "--shape", "1x2", "--steps", "20"),
        nccl_job(
            "nccl 2x1",
            "c: two peers over NCCL get the bits of 1x2",
            120,
            "--shape",
            "2x1",
            "--steps",
            "20",
            compares="nccl 1x2",
            judge=_same_bits("nccl 1x2", 0),
        ),
        *(
            nccl_job(
                f"kill at {moment}",
                f"c: SIGKILL at {moment} over NCCL changes no bit",
                120,
                *("--shape", "2x1", "--steps", "20", "--fail-at", f"5:1.0@{moment}"),
                compares="nccl 1x2",
                judge=_same_bits("nccl 1x2", 1),
            )
            for moment in MOMENTS[: 1 if cpu else None]
        ),
        nccl_job(
            "kill in 2x2",
            "c: SIGKILL in 2x2 workers over NCCL changes no bit; pairs of living workers are kept or rebuilt",
            150,
            *("--shape", "2x2", "--steps", "20", "--fail-at", "5:1.1@backward"),
            compares="nccl 1x2",
            judge=_same_bits("nccl 1x2", 1),
        ),
        Item(
            "rebuilds",
            "c: 200 rebuilds leave file descriptors, threads and GPU memory as they were",
            240,
            lambda results: _script(*pair, "rebuilds", "--times", "5" if cpu else "200", **with_nccl),
            judge=_level,
            needs=("nccl build",),
        ),
        Item(
            "stage",
            "d: an 8B-wide stage reaches 45 % MFU; the I/W split costs at most 2 %",
            200,
            lambda results: _script("stage.py", *(["--layers", "1"] if cpu else []), **interpreted),
            judge=(lambda result, results: "") if cpu else _fast,
            alone=True,
        ),
        *(
            Item(
                name,
                f"e: {what} reaches 95 % (backward 90 %) of what the card allows, and is never slower than others",
                300,
                partial(_kernels, ("norm",) if cpu else cases, interpreted),
                judge=(lambda result, results: "") if cpu else _never_behind,
                alone=True,
            )
            for name, what, cases in KERNELS
        ),
    ]


def _library(out: Path) -> Path:
    return out / "nccl" / "libnccl.so.2"


def _kernels(cases: Sequence[str], environment: Mapping[str, str], results: Results) -> Command:
    return _script("kernels.py", "--only", *cases, **environment)


def _script(name: str, *arguments: str, **environment: str) -> Command:
    return [sys.executable, str(BENCH / name), *arguments], environment


def _same_bits(other: str, deaths: int) -> Callable[[Result, Results], str]:
    def judge(result: Result, results: Results) -> str:
        expected = results[other]["sha256"]
        if result["sha256"] != expected:
            return f"weights {result['sha256']} are not those of {other}, {expected}"
        return "" if result["deaths"] >= deaths else f"{result['deaths']} deaths instead of {deaths}"

    return judge


def _near_plain(result: Result, results: Results) -> str:
    """Compares the loss with the plain loop's. Two such runs differ by about 0.03 by chance (bench/chance.py)."""
    plain = results["plain loop"]["loss"]
    if abs(result["loss"] - plain) < 0.1:
        return ""
    return f"loss {result['loss']:.4f}, but {plain:.4f} in the plain loop"


def _level(result: Result, results: Results) -> str:
    """Checks for resources that rebuilds have not released. A few may be released late."""
    grown = {name: result[f"{name}_after"] - result[f"{name}_before"] for name in ("descriptors", "threads", "gpu_mib")}
    allowed = {"descriptors": 8, "threads": 4, "gpu_mib": 64}
    return "; ".join(f"{name} grew by {grown[name]}" for name in grown if grown[name] > allowed[name])


def _fast(result: Result, results: Results) -> str:
    slow = [name for name, row in result.items() if "triton" in name and row["MFU free"] < 0.45]
    split = [name for name, row in result.items() if "triton" in name and row["split"] > 0.02]
    return "; ".join(
        [f"less than 45 % MFU: {', '.join(slow)}"] * bool(slow)
        + [f"the split costs more than 2 %: {', '.join(split)}"] * bool(split)
    )


def _never_behind(result: Result, results: Results) -> str:
    behind = [name for name, row in result.items() if row["speed"] < 1.0 or row["share"] < 0.9]
    return f"slower than another implementation, or below 90 % of the card: {', '.join(behind)}" if behind else ""
