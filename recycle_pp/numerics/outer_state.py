"""The additional state vectors of an island's units, besides those of the update rule (`recycle_pp.islands`).

    outer_vectors(settings)      # names, as in a checkpoint; () without islands.store

theta           the common weights after the latest round that this island has applied
outer_momentum  momentum of the outer step
residual        error of this island's encoded deltas, which it adds to the next delta

All are float32. They are held, copied and saved with the moments of the unit. Only the rounds change them.
"""

from __future__ import annotations

from recycle_pp.config.settings import Settings

THETA, MOMENTUM, RESIDUAL = "theta", "outer_momentum", "residual"
WIDTH = 4  # bytes of an element


def outer_vectors(settings: Settings) -> tuple[str, ...]:
    return () if settings.islands.store is None else (THETA, MOMENTUM, RESIDUAL)
