"""Collects the votes on a step, and decides when the step is committed and which clip factor its update uses.

    vote = make_vote(generation, 7, squares, finite, fits, counts, losses, speaks=True)     # on a worker
    ballot = Ballot(step=7, stages=4, microbatches=18, clip=1.0)
    ballot.cast(member, worker, vote)                       # the vote of a member that plays this worker
    if ballot.complete(live): decision = ballot.decide()                            # only if ballot.misfits is empty

A worker votes when it has its stage's reduced gradients. The reduction also sums the count and the loss of each
micro-batch. So every vote checks that no sample was skipped or counted twice, and that the peers of a stage have the
same sums. All votes of a step arrive at about the same time, and the step waits for the last one. To keep votes small,
only one peer of each stage sends its values; the others send only a digest of them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from recycle_schedules import Worker

from recycle_pp.wire.messages.members import Assignment, Member
from recycle_pp.wire.messages.steps import Vote
from recycle_pp.wire.messages.units import UnitId


class ProtocolViolation(RuntimeError):
    """Training would continue with wrong numbers, so the job must stop."""


def make_vote(
    generation: int,
    step: int,
    squares: Sequence[float],
    finite: bool,
    fits: bool,
    counts: Sequence[float],
    losses: Sequence[float],
    speaks: bool,
    checksums: bytes = b"",
    changed: Sequence[UnitId] = (),
) -> Vote:
    """A worker's vote on its stage's reduced gradients.

    squares  squared norm of each unit's gradient, in the stage's order
    counts   number of times that each micro-batch is in the gradient; 1 if correct
    losses   loss of each micro-batch; empty on all stages but the last
    speaks   whether the vote contains `squares` and `losses`, and not only their digest

    For the other arguments, see `Vote`.
    """
    every = (finite, fits, *squares, *counts, *losses)
    # NaNs differ in sign and payload. The digest must not, so all NaNs become the same one.
    numbers = array("d", [x if x == x else math.nan for x in every])
    return Vote(
        generation=generation,
        step=step,
        finite=finite,
        fits=fits,
        wrong=[(g, n) for g, n in enumerate(counts) if n != 1],
        digest=blake2b(numbers.tobytes(), digest_size=16).digest(),
        squares=[*squares] if speaks else [],
        losses=[*losses] if speaks else [],
        checksums=checksums,
        changed=[*changed],
    )


@dataclass(frozen=True)
class Decision:
    """The result of a complete ballot.

    scale  clip factor; None: skip the update
    norm   norm of the gradient before clipping
    loss   mean loss of the step's micro-batches
    """

    step: int
    scale: float | None
    norm: float
    loss: float


@dataclass
class Ballot:
    """The votes on one step."""

    step: int
    stages: int
    microbatches: int  # in the whole step
    clip: float | None  # maximum norm of the gradient; None: no clipping
    votes: dict[Member, Vote] = field(default_factory=dict)
    workers: Assignment = field(default_factory=dict)  # voter -> the worker that it plays
    first: dict[int, Member] = field(default_factory=dict)  # first voter, by stage

    def cast(self, member: Member, worker: Worker, vote: Vote) -> None:
        """Adds a vote. Raises ProtocolViolation if a micro-batch is not in the gradient exactly once, or if the vote
        contradicts the first vote of the stage."""
        for g, n in vote.wrong[:1]:
            raise ProtocolViolation(
                f"step {self.step}, stage {worker.stage}: micro-batch {g} is in the gradient {n:g} times, not once"
            )
        first = self.first.setdefault(worker.stage, member)
        if first in self.votes and self.votes[first].digest != vote.digest:
            raise ProtocolViolation(
                f"step {self.step}: workers {self.workers[first]} and {worker} have different reduced gradients for "
                "the same stage"
            )
        self.votes[member], self.workers[member] = vote, worker

    def complete(self, live: Collection[Member]) -> bool:
        return len(self.votes) >= len(live) and all(member in self.votes for member in live)

    @property
    def misfits(self) -> list[int]:
        """Stages whose gradients overflowed the fixed-point sums. Empty if any gradient is not finite."""
        finite = all(vote.finite for vote in self.votes.values())
        return sorted({self.workers[m].stage for m, vote in self.votes.items() if not vote.fits}) if finite else []

    def decide(self) -> Decision:
        """The decision, from the values in the vote of each stage's lowest member. fsum is exact, so the norm does not
        depend on how the layers are divided into stages."""
        by_stage = {self.workers[m].stage: self.votes[m] for m in sorted(self.votes, reverse=True)}
        norm, scale = clip_scale([x for s in range(self.stages) for x in by_stage[s].squares], self.clip)
        loss = mean_loss(by_stage[self.stages - 1].losses, self.microbatches)
        finite = all(v.finite for v in by_stage.values()) and math.isfinite(norm)
        return Decision(self.step, scale if finite else None, norm, loss)


def mean_loss(losses: Sequence[float], microbatches: int) -> float:
    """The loss of a step, from the losses of its micro-batches."""
    return math.fsum(losses) / microbatches


def clip_scale(squares: Sequence[float], clip: float | None) -> tuple[float, float]:
    """(global norm, clip factor). The factor is that of torch.nn.utils.clip_grad_norm_: min(1, clip / (norm + 1e-6)).

    squares: squared norms of the parts of the gradient
    """
    norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
    return norm, 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
