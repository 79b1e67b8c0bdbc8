"""Figures of a step for users: operations per second, the use of the hardware (MFU), and the time by phase.

    efficiency = Efficiency(settings)
    efficiency.describe(ready.units, ready.platform)     # for each worker that has built its stage
    efficiency.of(tokens_per_second=9e4, workers=8)      # {"tflops": 312.0, "mfu": 0.316}; {} if the model is unknown
    phase_seconds(tables, workers=8, seconds=0.5)        # {"forward_seconds": 0.1, ..., "wait_seconds": 0.05}

A figure is left out if a part of it is unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from recycle_schedules.op_kinds import B, F, I, O, W

from recycle_pp.config.settings import Model, Settings
from recycle_pp.timing.packing import END, KINDS, START
from recycle_pp.wire.messages.activity import REDUCTION

PEAKS: tuple[tuple[str, float | None, float | None], ...] = (
    (r"B200", 2250, 75),
    (r"H200 NVL", 836, 60),
    (r"H200|GH200", 989, 67),
    (r"H100 NVL", 836, 60),
    (r"H100 PCIe", 756, 51),
    (r"H100", 989, 67),
    (r"A100", 312, 19.5),
    (r"A10", 125, 31.2),
    (r"A40", 150, 37.4),
    (r"L40S", 362, 91.6),
    (r"L4", 121, 30.3),
    (r"T4", None, 8.1),
)
"""(part of the GPU's name, dense TFLOP/s in bfloat16, in float32 without TF32), as in NVIDIA's data sheets. The first
entry that matches counts. None: no such figure."""
_PHASES = {"forward": (F,), "backward": (I, B), "weight": (W,), "optimizer": (O,), "reduce": (KINDS.index(REDUCTION),)}
PHASES = tuple(f"{name}_seconds" for name in (*_PHASES, "wait"))


class Efficiency:
    """The model's operations per token, and the peak of a worker's device."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._attention = attention_flops(settings.model)
        self._units: dict[int, int] = {}  # layer -> its number of parameters
        self._peak: float | None = None  # operations per second of a worker's device

    def describe(self, units: Mapping[int, Sequence[tuple[str, int]]], platform: str) -> None:
        """Records the parameters and the device of a worker that has built its stage.

        units     layer -> (name, number of elements) of each unit. Workers that hold the same layer report the same
                  units
        platform  the worker's device, as `execution.device` describes it
        """
        self._units |= {layer: sum(size for _, size in of) for layer, of in units.items()}
        self._peak = peak_flops(platform, self._settings)

    @property
    def flops_per_token(self) -> float | None:
        """Floating-point operations of a training step for each token: 6 N + 12 L H Q T.

        N is the number of parameters. Parameters used only before the first layer, such as embeddings, are not counted.
        (The size of a tensor is rounded up to 128 elements.) Each parameter is multiplied and added once in the forward
        and twice in the backward. L layers have H heads of size Q, and T is the length of a sample. Recomputed layers,
        masks and the optimizer do not count. Source: Chowdhery et al., PaLM (2022), appendix B; embeddings are excluded
        as in torchtitan.

        None if it is unknown: for emulated compute, model=custom, adapters (the frozen parameters are not counted),
        mixtures of experts (a token uses only some of their parameters), and while no worker has built a stage.
        """
        emulated, adapters = self._settings.emulate.mode, self._settings.model.lora.rank
        if self._attention is None or emulated or adapters or not self._units:
            return None
        return 6.0 * sum(size for layer, size in self._units.items() if layer >= 0) + self._attention

    def of(self, tokens_per_second: float, workers: int) -> dict[str, float]:
        """The figures of a step as {"tflops": ..., "mfu": ...}. Unknown figures are left out.

        tflops   10^12 operations per second and worker
        mfu      share of the device's peak
        workers  number of live workers
        """
        each = self.flops_per_token
        if each is None:
            return {}
        rate = each * tokens_per_second / workers
        return {"tflops": rate / 1e12} | ({} if self._peak is None else {"mfu": rate / self._peak})


def peak_flops(platform: str, settings: Settings) -> float | None:
    """The peak of a worker's device in operations per second; None if it is unknown, as for CPUs."""
    if settings.run.peak_tflops is not None:
        return 1e12 * settings.run.peak_tflops
    name, gpu, _ = platform.partition(" sm_")
    for pattern, bf16, fp32 in PEAKS if gpu else ():
        if re.search(rf"\b({pattern})\b", name):
            peak = fp32 if settings.numerics.precision == "fp32" else bf16
            return None if peak is None else 1e12 * peak
    return None


def attention_flops(model: Model) -> float | None:
    """The term 12 L H Q T of `Efficiency.flops_per_token`; 0 if the configuration has no heads.

    None for model=custom, for a mixture of experts, and without a readable config.json.
    """
    if model.own and isinstance(model.layers, int):
        return 12.0 * model.layers * model.heads * model.head_size * model.sequence
    if model.kind == "custom":
        return None
    try:
        config = json.loads(((model.folder or Path()) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or any("expert" in key for key in config):
        return None
    layers, heads = _first(config, "num_hidden_layers", "n_layer"), _first(config, "num_attention_heads", "n_head")
    size = config.get("head_dim") or (_first(config, "hidden_size", "n_embd") / heads if heads else 0)
    return 12.0 * layers * heads * size * model.sequence


def phase_seconds(tables: Collection[np.ndarray], workers: int, seconds: float) -> dict[str, float]:
    """The mean time of a worker in each phase of a step; `wait` is the rest of the step.

    tables   the spans of each worker in this step, as `timing.packing` unpacks them
    workers  number of live workers
    seconds  duration of the step
    """
    if not tables or not workers:
        return {}
    table = np.concatenate(list(tables))
    sums = np.bincount(table[:, 0].astype(int), table[:, END] - table[:, START], minlength=len(KINDS)) / workers
    found = {f"{name}_seconds": float(sum(sums[code] for code in codes)) for name, codes in _PHASES.items()}
    return found | {"wait_seconds": max(0.0, seconds - sum(found.values()))}


def _first(config: Mapping[str, Any], *names: str) -> float:
    """The value of the first of these keys whose value is a number; 0 if there is none."""
    return next((config[name] for name in names if isinstance(config.get(name), int | float)), 0)
