"""The exchange of gradients of parameters that several stages hold, between workers of these stages.

parcels = exchange(links, ties, reduced, me, members, tag)      # blocks; raises LinkBroken

Every worker of such a stage does it once a step in every generation, with its stage's sums in hand and no action of
the step left, and votes afterwards. So whatever died before, and whether its sums are new or of an earlier generation,
everybody who votes holds the sum over all stages. Peers hold the same sums, so one of each other stage is enough: the
members say which, the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from recycle_schedules import Worker

from recycle_pp.comm.links import Links
from recycle_pp.comm.waiting import Pending
from recycle_pp.numerics.gradients import Reduced
from recycle_pp.numerics.ties import Ties


def exchange(
    links: Links,
    ties: Ties,
    reduced: Reduced,
    me: Worker,
    members: Iterable[Worker],
    tag: int,
    wait: Callable[[Pending, Worker], None],
) -> dict[int, torch.Tensor]:
    """What the other stages hold of what they have in common with that of `me`, by stage.

    wait(pending, giver): waits, and says so; who hangs must be found among those who do not wait.
    """
    by_stage: dict[int, list[Worker]] = {}
    for worker in sorted(members):
        by_stage.setdefault(worker.stage, []).append(worker)
    peers = by_stage[me.stage]
    mine = peers.index(me)
    sources = {stage: by_stage[stage][mine % len(by_stage[stage])] for stage in ties.stages}
    takers = [
        worker for stage in ties.stages for k, worker in enumerate(by_stage[stage]) if peers[k % len(peers)] == me
    ]
    for other, meeting in links.meetings(me, [*sources.values(), *takers]):
        wait(meeting, other)
    rooms = {stage: ties.room(stage) for stage in sources}
    pending = []
    # Both sides of a pair ask for their two messages in one order: else each would wait, with NCCL, for the other.
    messages = [(source, me) for source in sources.values()] + [(me, taker) for taker in takers]
    for frm, to in sorted(messages, key=lambda message: (sorted(message), message)):
        if to == me:
            pending.append((links.receive(rooms[frm.stage], frm, tag), frm))
        else:
            links.send(ties.parcel(reduced, to.stage), to, tag)
    for each, frm in pending:
        wait(each, frm)
    return rooms
