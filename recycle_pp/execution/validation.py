"""Runs the forward pass of held-out micro-batches on the live workers. The mean of their losses is val_loss.

A validation keeps no results and changes no parameters. After a death it restarts with the same micro-batches.
"""

from __future__ import annotations

import torch
from recycle_schedules import OpKind, Worker
from recycle_schedules.ops import input_of, output_of
from torch.profiler import record_function

from recycle_pp.comm.links import Pending
from recycle_pp.comm.tcp.transport import MAX_TAG
from recycle_pp.config.settings import Settings
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage
from recycle_pp.protocol.participant import Orders
from recycle_pp.protocol.validation import numbered, per_pass
from recycle_pp.wire.messages.activity import VALIDATION
from recycle_pp.wire.messages.steps import Evaluated

from .injection import Injector
from .mailbox import TAGS, Mailbox
from .session import Session


def validate(
    session: Session, orders: Orders, stage: Stage, mailbox: Mailbox, batches: Batches, faults: Injector, step: int
) -> None:
    """Runs this worker's part of a validation with the parameters after `step`. The last stage sends its losses to the
    coordinator. Raises Superseded if the orders have become invalid, LinkBroken if the generation ends."""
    posted: dict[int, tuple[Worker, Pending, torch.Tensor]] = {}  # by number of the micro-batch
    made: dict[int, list[torch.Tensor]] = {}
    losses: dict[int, float] = {}
    parallel, last, total = stage.settings.parallel, stage.settings.parallel.stages, held_out(stage.settings, batches)
    each = per_pass(stage.settings.validation_microbatches, parallel.pipelines, parallel.microbatches)
    actions = session.validation(orders)
    session.doing.waits("links", step)
    mailbox.connect(actions)
    session.doing.works("turn", step)
    for number, action in numbered(actions, parallel.pipelines, each, total):
        session.check(orders)
        mb, peer = action.microbatch, action.peer
        assert mb is not None
        if peer is None:
            batch = None
            if stage.module.reads:
                session.doing.works("data", step, mb)
                batch = batches.validation(number)
                if stage.last:
                    batch = batch.of_step(batches.validation_items(total))
            source: list[torch.Tensor] = []
            takes = input_of(OpKind.FORWARD, mb, stage.stage, last)
            makes = output_of(OpKind.FORWARD, mb, stage.stage, last)
            if takes:
                giver, pending, buffer = posted.pop(number)
                session.doing.waits("tensor", step, mb, giver, pending.arrived)
                pending.wait()
                source = mailbox.open(takes, buffer)
            session.doing.works(VALIDATION, step, mb)
            with record_function("recycle/validate"):
                output = stage.evaluate(batch, source)
            faults.inject("validation", step)
            if makes:
                made[number] = output
            else:
                losses[number] = float(output[0])
        elif action.kind.makes:
            posted[number] = peer, *mailbox.request(step, action.tensor, peer, validation=number)
        else:
            mailbox.push(step, action.tensor, made.pop(number), peer, validation=number)
    if losses:
        session.send(Evaluated(step, losses, total))


def held_out(settings: Settings, batches: Batches) -> int:
    """Number of micro-batches in a validation, the same on all workers. Without held-out data the result is 1, and
    `batches.validation` raises an error. Raises ValueError if there are more micro-batches than message tags."""
    count, stages = min(settings.validation_microbatches, max(1, batches.validations)), settings.parallel.stages
    most = MAX_TAG // TAGS // stages - 1
    if count > most:
        raise ValueError(
            f"run.validate_samples: with {stages} stages a validation has at most {most} micro-batches, not {count}"
        )
    return count
