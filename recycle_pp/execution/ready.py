"""The worker's `Ready` message. The worker sends it again when it has other layers or another role.

report = ReadyReport(loaded, address, backend, settings, session.send)
report.send()
report.add(stage.layout.described)     # the worker holds units of these layers
report.recast(stage)                   # the worker has another role
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict

from msgspec import structs

from recycle_pp.config.settings import Settings
from recycle_pp.model.stage import Stage
from recycle_pp.wire.messages.lifecycle import Address, Ready
from recycle_pp.wire.messages.table import Message

from .device import notes, platform
from .loading import Loaded

Described = Mapping[int, list[tuple[str, int]]]  # see `Ready.units`


class ReadyReport:
    def __init__(
        self, loaded: Loaded, address: Address, backend: str, settings: Settings, send: Callable[[Message], None]
    ) -> None:
        stage = loaded.stage
        boundary, deferred = _sizes(stage)
        self._send = send
        self._message = Ready(
            address=address,
            platform=platform(stage.device, backend, settings.numerics.precision),
            boundary_bytes=boundary,
            deferred_share=deferred,
            machine=socket.gethostname(),
            cores=os.cpu_count() or 1,
            units=stage.layout.described,
            memory=[{key: float(value) for key, value in asdict(way).items()} for way in loaded.memory],
            notes=notes(settings.parallel.backend, backend, stage.device),
            data=loaded.batches.fingerprint,
            depth=stage.module.depth,
            stays=stage.module.stays,
            origin=stage.module.origin,
            outer=loaded.position,
        )

    def send(self) -> None:
        self._send(self._message)

    def add(self, units: Described) -> None:
        """Adds the units of layers, and sends the message again if it lacked some of these layers."""
        if not self._message.units.keys() >= units.keys():
            self._message = structs.replace(self._message, units={**self._message.units, **units})
            self.send()

    def recast(self, stage: Stage) -> None:
        """Sends the message again for another role. stage: the process's stage, which has taken the new role."""
        boundary, deferred = _sizes(stage)
        units = {**self._message.units, **stage.layout.described}
        self._message = structs.replace(
            self._message, boundary_bytes=boundary, deferred_share=deferred, memory=[], units=units
        )
        self.send()


def _sizes(stage: Stage) -> tuple[int, float]:
    """(bytes of the stage's output for a micro-batch, share of the stage's parameters whose gradients wait for W)."""
    sizes = {name: parameter.numel() for name, parameter in stage.parameters.items()}
    deferred = sum(sizes[name] for name in stage.module.deferred)
    return sum(tensor.nbytes for tensor in stage.module.gives), round(deferred / sum(sizes.values()), 4)
