"""Holds the boundary tensors of one worker: expected and received inputs, and its outputs until the commit.

mailbox.connect(actions)              # before the first of these actions
mailbox.post(step, tensor, peer)      # posts a receive ahead of its consumer
x = mailbox.take(step, tensor)        # the input of an op; blocks until it has arrived
mailbox.keep(step, tensor, y)         # logs the output of an op
mailbox.ship(step, tensor, peer)      # sends a logged or received tensor

A `Tensor` of a plan names all data that one micro-batch sends over one stage boundary in one direction. In this module
its value is a list of torch tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from recycle_schedules import Action, Tensor, TensorKind, Worker

from recycle_pp.comm.links import Links, Pending
from recycle_pp.comm.messages import Spec, pack, room, unpack
from recycle_pp.comm.replay_log import ReplayLog

Key = tuple[int, Tensor]  # (step, tensor)


TAGS = 16  # combinations of step and lane in a tag


class Mailbox:
    """The boundary tensors of one worker.

    comes     shapes and dtypes of received tensors, by kind
    shape     (D, P, M) of the problem; determines the tags of messages
    held_out  number of micro-batches of a validation; determines the tags of messages
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
        """Connects to every peer in these actions. Blocks until the connections are established.

        Raises LinkBroken if the generation ends first."""
        self._links.connect({self._links.member(action.peer) for action in actions if action.peer is not None})

    def post(self, step: int, tensor: Tensor, peer: Worker) -> None:
        self._posted[step, tensor] = peer, *self.request(step, tensor, peer)

    def request(
        self, step: int, tensor: Tensor, peer: Worker, validation: int | None = None
    ) -> tuple[Pending, torch.Tensor]:
        """Posts a receive. Returns (pending receive, buffer for `open`). validation: number of a held-out
        micro-batch."""
        buffer = room(self._comes[tensor[0]], self._device)
        return self._links.receive(buffer, self._links.member(peer), self._tag(step, tensor, validation)), buffer

    def open(self, tensor: Tensor, buffer: torch.Tensor) -> list[torch.Tensor]:
        return unpack(buffer, self._comes[tensor[0]])

    def awaited(self, step: int, tensor: Tensor) -> tuple[Worker, Pending] | None:
        """(sender, pending receive) of a tensor that has not arrived; None if it has arrived."""
        posted = self._posted.get((step, tensor))
        return None if posted is None or posted[1].arrived() else (posted[0], posted[1])

    def take(self, step: int, tensor: Tensor) -> Sequence[torch.Tensor]:
        """The received tensors. Blocks until they have arrived. Keeps them until `consume`.

        Raises LinkBroken if the generation ends first."""
        if (step, tensor) not in self._received:
            _, pending, buffer = self._posted.pop((step, tensor))
            pending.wait()
            self._received[step, tensor] = self.open(tensor, buffer)
        return self._received[step, tensor]

    def consume(self, step: int, tensor: Tensor) -> None:
        """Drops a received tensor after its op. The stage keeps the input of a forward pass until the backward pass."""
        del self._received[step, tensor]

    def keep(self, step: int, tensor: Tensor, data: Sequence[torch.Tensor]) -> None:
        self.log.keep(step, tensor, data)

    def ship(self, step: int, tensor: Tensor, peer: Worker) -> None:
        data = self._received[step, tensor] if (step, tensor) in self._received else self.log.get(step, tensor)
        self.push(step, tensor, data, peer)

    def push(
        self, step: int, tensor: Tensor, data: Sequence[torch.Tensor], peer: Worker, validation: int | None = None
    ) -> None:
        self._links.send(pack(data), self._links.member(peer), self._tag(step, tensor, validation))

    def void(self) -> None:
        """Drops incomplete receives when a new generation starts. Keeps received tensors."""
        self._posted.clear()

    def close(self, step: int) -> None:
        """Drops the tensors of a committed step."""
        self.log.drop(step)
        self._received = {k: v for k, v in self._received.items() if k[0] > step}

    def forget_after(self, step: int) -> None:
        """Drops the tensors of all steps after `step`, because their work was discarded."""
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
        """A tag that is unique among the messages in flight in a generation. These messages belong to at most two steps
        or to a validation."""
        return (((step % 4) * 4 + lane) * self._numbers + number) * self._stages + stage
