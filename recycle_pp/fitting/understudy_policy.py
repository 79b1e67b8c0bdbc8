"""Determines whether stages may have understudies (`state.understudy`), and the memory that an understudy needs.

why_none(settings)      # a sentence if no stage can have one, else None
bytes_per_element(settings)     # memory of an understudy's copy; 0 if no stage gets an understudy

An understudy is a worker of another stage that keeps a copy of a stage's state (`protocol.understudies`).
"""

from __future__ import annotations

from recycle_pp.config.settings import Settings
from recycle_pp.numerics.update_rules.choice import planned

EARLY = 2  # largest number of gradients that wait for their commit


def why_none(settings: Settings) -> str | None:
    """The reason why no stage can have an understudy; None if stages can have one, or if the setting is `never`."""
    if settings.state.understudy == "never":
        return None
    if settings.parallel.stages == 1:
        why = "there is no other stage"
    elif settings.parallel.pipelines == 1:
        why = "with one pipeline no stage has a worker to spare"
    else:
        return None
    return f"state.understudy=auto: no stage gets an understudy, because {why}"


def bytes_per_element(settings: Settings) -> int:
    """Bytes of an understudy's copy of a stage, per element; 0 if no stage gets an understudy.

    The copy consists of masters, moments, weights, sums and gradients.
    """
    if settings.state.understudy == "never" or why_none(settings) is not None:
        return 0
    numerics = settings.numerics
    sums = 8 if numerics.reproducible and numerics.sums != "int32" else 4
    state = 4 + max(rule.bytes for rule in planned(settings.optimizer))
    rounded = 0
    if numerics.precision == "bf16":
        # with sharded state, the copy also needs fp32 masters of its own, see `StageOptimizer.put`
        rounded = 6 if settings.parallel.copies else 2
    return state + rounded + sums + 4 * EARLY
