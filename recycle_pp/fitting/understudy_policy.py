"""Whether stages of a job may have understudies (`state.understudy`, `protocol.understudies`).

why_none(settings)      # a sentence if no stage can have one
bytes_needed(settings, elements)        # memory of an understudy's copy
"""

from __future__ import annotations

from recycle_pp.config.settings import Settings

EARLY = 2  # gradients that wait for their commit, at most


def kept(settings: Settings) -> bool:
    """Whether a stage with one live worker gets an understudy."""
    return settings.state.understudy == "auto" and why_none(settings) is None


def why_none(settings: Settings) -> str | None:
    """The reason why no stage can have an understudy; None if stages can have one, or by the setting."""
    parallel = settings.parallel
    if settings.state.understudy == "never":
        return None
    if parallel.stages == 1:
        why = "there is no other stage"
    elif parallel.pipelines == 1:
        why = "with one pipeline no stage has a worker to spare"
    elif parallel.copies:
        why = "so far only whole state is supported, not parallel.sharded"
    elif parallel.memory is not None:
        why = "parallel.memory limits the memory of workers"
    elif not settings.model.own:
        why = "so far only model.kind=transformer and llama are supported"
    elif settings.model.tied:
        why = "so far models with tied weights are not supported"
    else:
        return None
    return f"state.understudy=auto: no stage gets an understudy, because {why}"


def bytes_needed(settings: Settings, elements: int) -> int:
    """Bytes of a copy of a stage with this number of elements: masters and moments, weights, sums and gradients."""
    numerics = settings.numerics
    sums = 8 if numerics.reproducible and numerics.sums != "int32" else 4
    return elements * (12 + (2 if numerics.precision == "bf16" else 0) + sums + 4 * EARLY)
