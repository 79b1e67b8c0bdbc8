"""The held-out micro-batches through the live routes, forward only: val_loss.

Nothing of it is kept, so a death in it repeats it; no parameter changes while it runs.
"""

from __future__ import annotations

import torch
from recycle_schedules import Tensor, Worker
from torch.profiler import record_function

from recycle_pp.comm.links import Pending
from recycle_pp.data.batches import Batches
from recycle_pp.model.stage import Stage
from recycle_pp.model.stage_module import Batch
from recycle_pp.protocol.ledger import carried_by, consumed_by, made_by
from recycle_pp.protocol.participant import Orders
from recycle_pp.wire.messages.workers import Evaluated

from .injection import Injector
from .mailbox import Mailbox
from .session import Session


def validate(
    session: Session, orders: Orders, stage: Stage, mailbox: Mailbox, batches: Batches, faults: Injector, step: int
) -> None:
    """Runs the plan's forwards; the last stage sends its losses to the coordinator. Raises Superseded, LinkBroken."""
    posted: dict[Tensor, tuple[Worker, Pending, torch.Tensor]] = {}
    made: dict[Tensor, list[torch.Tensor]] = {}
    losses: dict[int, float] = {}
    last = stage.settings.parallel.stages
    actions = session.validation(orders)
    session.doing.waits("links", step)
    mailbox.connect(actions)
    session.doing.works("V", step)
    for action in actions:
        session.check(orders)
        mb, peer = action.microbatch, action.peer
        assert mb is not None
        if peer is None:
            g = mb[0] * stage.settings.parallel.microbatches + mb[1]
            batch = None
            if stage.module.reads:
                inputs, labels = batches.validation(g)
                batch = Batch(inputs, labels, more=batches.more(inputs))
            source: list[torch.Tensor] = []
            takes, makes = consumed_by("F", mb, stage.stage, last), made_by("F", mb, stage.stage, last)
            if takes:
                giver, pending, buffer = posted.pop(takes)
                session.doing.waits("tensor", step, mb, giver, pending.arrived)
                pending.wait()
                source = mailbox.open(takes, buffer)
            session.doing.works("V", step, mb)
            with record_function("recycle/validate"):
                output = stage.evaluate(batch, source)
            faults.strike("validation", step)
            if makes:
                made[makes] = output
            else:
                losses[g] = float(output[0])
        elif action.kind == "RECV_F":
            posted[carried_by(action)] = peer, *mailbox.request(step, carried_by(action), peer, validation=True)
        else:
            mailbox.push(step, carried_by(action), made[carried_by(action)], peer, validation=True)
    if losses:
        session.send(Evaluated(step, losses))
