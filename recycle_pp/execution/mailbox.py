"""What goes over one worker's boundaries: what it has sent (kept until the commit), received, and waits for.

mailbox.connect(actions)              # before the first of them
mailbox.post(step, tensor, peer)      # a receive, ahead of its consumer
x = mailbox.take(step, tensor)        # the input of an op; blocks until it is here
mailbox.keep(step, tensor, y)         # the output of an op, into the log
mailbox.ship(step, tensor, peer)      # from the log, or from what was received

A plan's `Tensor` is everything that one micro-batch sends over one boundary in one direction: a list of tensors here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from recycle_schedules import Action, Tensor, TensorKind, Worker

from recycle_pp.comm.links import Links, Pending
from recycle_pp.comm.messages import Spec, pack, room, unpack
from recycle_pp.comm.replay_log import ReplayLog

Key = tuple[int, Tensor]  # (step, tensor)


class Mailbox:
    """Arguments:
    comes     shapes and dtypes of what arrives, by kind of tensor
    shape     (D, P, M) of the problem, for unique tags
    held_out  micro-batches of a validation, for the same
    """

    def __init__(
        self,
        links: Links,
        comes: Mapping[TensorKind, Sequence[Spec]],
        device: torch.device,
        shape: tuple[int, int, int],
        log_on_host: bool = False,
        held_out: int = 0,
    ) -> None:
        self.log = ReplayLog(log_on_host)
        self._links, self._comes, self._device = links, comes, device
        pipelines, self._stages, self._microbatches = shape
        self._numbers = max(pipelines * self._microbatches, held_out)
        self._posted: dict[Key, tuple[Worker, Pending, torch.Tensor]] = {}
        self._received: dict[Key, Sequence[torch.Tensor]] = {}

    def connect(self, actions: Iterable[Action]) -> None:
        """Connects to every worker that these actions exchange messages with; blocks until it stands. Raises
        LinkBroken."""
        self._links.connect({action.peer for action in actions if action.peer is not None})

    def post(self, step: int, tensor: Tensor, peer: Worker) -> None:
        self._posted[step, tensor] = peer, *self.request(step, tensor, peer)

    def request(
        self, step: int, tensor: Tensor, peer: Worker, validation: int | None = None
    ) -> tuple[Pending, torch.Tensor]:
        """Posts a receive: (what to wait for, the buffer that it fills, to be opened with `open`). validation: number
        of the held-out micro-batch."""
        buffer = room(self._comes[tensor[0]], self._device)
        return self._links.receive(buffer, peer, self._tag(step, tensor, validation)), buffer

    def open(self, tensor: Tensor, buffer: torch.Tensor) -> list[torch.Tensor]:
        return unpack(buffer, self._comes[tensor[0]])

    def awaited(self, step: int, tensor: Tensor) -> tuple[Worker, Pending] | None:
        """(sender, what to wait for) of a tensor that has not come yet; None if it is here."""
        posted = self._posted.get((step, tensor))
        return None if posted is None or posted[1].arrived() else (posted[0], posted[1])

    def take(self, step: int, tensor: Tensor) -> Sequence[torch.Tensor]:
        """Blocks until the tensors are here; they stay here until `consume`. Raises LinkBroken."""
        if (step, tensor) not in self._received:
            _, pending, buffer = self._posted.pop((step, tensor))
            pending.wait()
            self._received[step, tensor] = self.open(tensor, buffer)
        return self._received[step, tensor]

    def consume(self, step: int, tensor: Tensor) -> None:
        """Drops a received tensor: its op is done. (An F's input is kept by the stage as long as it needs it.)"""
        del self._received[step, tensor]

    def keep(self, step: int, tensor: Tensor, data: Sequence[torch.Tensor]) -> None:
        self.log.keep(step, tensor, data)

    def ship(self, step: int, tensor: Tensor, peer: Worker) -> None:
        data = self._received[step, tensor] if (step, tensor) in self._received else self.log.get(step, tensor)
        self.push(step, tensor, data, peer)

    def push(
        self, step: int, tensor: Tensor, data: Sequence[torch.Tensor], peer: Worker, validation: int | None = None
    ) -> None:
        self._links.send(pack(data), peer, self._tag(step, tensor, validation))

    def void(self) -> None:
        """A new generation: receives that are not complete are dropped, tensors that are here stay."""
        self._posted.clear()

    def close(self, step: int) -> None:
        """The step is committed: none of its tensors will be asked for again."""
        self.log.drop(step)
        self._received = {k: v for k, v in self._received.items() if k[0] > step}

    def forget_after(self, step: int) -> None:
        """Later steps were computed with parameters that have been taken back."""
        for later in {k[0] for k in self._received} | self.log.steps():
            if later > step:
                self.log.drop(later)
        self._received = {k: v for k, v in self._received.items() if k[0] <= step}

    def _tag(self, step: int, tensor: Tensor, validation: int | None) -> int:
        kind, (d, i), stage = tensor
        if validation is not None:
            return self._tag_of(step, 2, validation, stage)
        return self._tag_of(step, kind.code, d * self._microbatches + i, stage)

    def _tag_of(self, step: int, lane: int, number: int = 0, stage: int = 0) -> int:
        """Unique among the messages that can be under way in one generation: those of two steps, and a validation."""
        return (((step % 4) * 4 + lane) * self._numbers + number) * self._stages + stage
