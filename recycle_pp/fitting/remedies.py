"""Changes of settings that make a job fit into memory.

refusal(settings, outcome, 80e9, "cuda", format_size)    # one sentence with up to three remedies
remedies(settings, 80e9, "cuda", dead=1)                 # ["model.recompute=true", ...]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from recycle_pp.config.checks import validate
from recycle_pp.config.settings import Settings

from .outlook import Outcome, fits


def refusal(settings: Settings, outcome: Outcome, capacity: float, device: str, size: Callable[[float], str]) -> str:
    """One sentence with the stage that does not fit, the bytes of each part, and settings that would make the job fit.

    size: function that formats a number of bytes
    """
    row = max((row for row in outcome.rows if not row.fits), key=lambda row: row.bytes)
    parts = ", ".join(f"{name} {size(of)}" for name, of in row.parts.items() if of)
    after = ("", " once one of its workers is dead", " once two of its workers are dead")[outcome.dead]
    sentence = (
        f"a worker of stage {row.stage} needs {size(row.bytes)}{after}, with one micro-batch in flight, and has "
        f"{size(capacity)} ({parts})"
    )
    found = remedies(settings, capacity, device, outcome.dead)
    if not found:
        return f"{sentence}; no combination of three changed settings helps"
    return f"{sentence}; it would fit with {', or with '.join(found)}"


def remedies(settings: Settings, capacity: float, device: str, dead: int) -> list[str]:
    """Up to three combinations of changed settings that make the job fit after `dead` deaths.

    All have the smallest sufficient number of changes, which is at most three.
    """
    changes = list(_changes(settings))
    found: list[set[str]] = []
    for count in (1, 2, 3):
        for chosen in itertools.combinations(changes, count):
            words = [word for change in chosen for word in change]
            keys = {word.partition("=")[0] for word in words}
            if len(keys) < len(words) or any(keys == {word.partition("=")[0] for word in known} for known in found):
                continue  # a key is set twice, or a smaller change of the same keys is enough
            values = {key: _value(text) for key, _, text in (word.partition("=") for word in words)}
            changed = settings.with_values(values | {"model.split": None})
            try:
                # without adapters (LoRA), because validate rejects them for the project's own Transformer
                validate(changed.with_values({"model.lora.rank": 0}))
                if fits(changed, capacity, device, dead):
                    found.append(set(words))
            except ValueError:
                continue
            if len(found) == 3:
                break
        if found:
            break
    return [" ".join(sorted(words)) for words in found]


def _changes(settings: Settings) -> Iterator[tuple[str, ...]]:
    """The candidate changes. A change is one or more settings (KEY=VALUE) that must be made together."""
    p, numerics = settings.parallel, settings.numerics
    if not p.copies:
        yield ("parallel.sharded=true", "parallel.optimizer_copies=2")
    if settings.model.recompute is False:
        if p.memory is not None:
            yield ("model.recompute=auto",)
        yield ("model.recompute=true",)
    if numerics.reproducible and numerics.sums == "int64":
        yield ("numerics.sums=int32",)
    if settings.optimizer.moments == "fp32":
        yield ("optimizer.moments=bf16",)
    if numerics.precision == "fp32":
        yield ("numerics.precision=bf16",)
    assert isinstance(settings.model.layers, int)
    for factor in (2, 4, 8):
        if p.stages * factor <= settings.model.layers:
            yield (f"parallel.stages={p.stages * factor}",)
    for size in (2, 4):
        if p.microbatch_size % size == 0:
            yield (
                f"parallel.microbatch_size={p.microbatch_size // size}",
                f"parallel.microbatches={p.microbatches * size}",
            )


def _value(text: str) -> Any:
    return {"true": True, "false": False}.get(text, int(text) if text.isdigit() else text)
