"""The vote on a step: when is it agreed, and with what clip factor.

    ballot = Ballot(step=7, stages=4, microbatches=18, clip=1.0)
    ballot.cast(worker, vote)
    if ballot.complete(live): decision = ballot.decide()

A worker votes when it holds its stage's reduced gradients. The vote carries what the gradients' reduction carried:
how often each micro-batch was counted and what its loss was. So the job checks at every step that no sample was
skipped and none seen twice, and that the peers of a stage hold the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from recycle_schedules import Worker


class ProtocolViolation(RuntimeError):
    """Training would go on with wrong numbers: the job must stop."""


@dataclass(frozen=True)
class Vote:
    """What one worker says of its stage's reduced gradients.

    squares  squared norm of every parameter's gradient, canonical order (float64)
    finite   no NaN or infinity, and no overflow of the fixed-point sums
    counts   per micro-batch (pipeline-major), how often its gradient is in the sum: all 1
    losses   per micro-batch, from the last stage; empty elsewhere
    """

    squares: tuple[float, ...]
    finite: bool
    counts: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Decision:
    """scale: clip factor, None to skip the update; norm: of the gradient, before clipping; loss: mean of the step."""

    step: int
    scale: float | None
    norm: float
    loss: float


@dataclass
class Ballot:
    step: int
    stages: int
    microbatches: int  # in the whole step
    clip: float | None
    votes: dict[Worker, Vote] = field(default_factory=dict)

    def cast(self, worker: Worker, vote: Vote) -> None:
        wrong = [g for g, n in enumerate(vote.counts) if n != 1]
        if wrong:
            raise ProtocolViolation(
                f"step {self.step}, stage {worker.stage}: micro-batch {wrong[0]} is {vote.counts[wrong[0]]:g} times "
                f"in the gradient, must be once"
            )
        for peer, other in self.votes.items():
            if peer.stage == worker.stage and other != vote and repr(other) != repr(vote):  # NaN is not equal to itself
                raise ProtocolViolation(
                    f"step {self.step}: workers {peer} and {worker} hold different reduced gradients of one stage"
                )
        self.votes[worker] = vote

    def complete(self, live: Collection[Worker]) -> bool:
        return all(w in self.votes for w in live)

    def decide(self) -> Decision:
        """One vote a stage counts. The norm does not depend on the split into stages: fsum is exact."""
        by_stage = {w.stage: v for w, v in sorted(self.votes.items(), reverse=True)}
        norm, scale = clip_scale([x for s in range(self.stages) for x in by_stage[s].squares], self.clip)
        losses = by_stage[self.stages - 1].losses
        finite = all(v.finite for v in by_stage.values()) and math.isfinite(norm)
        return Decision(self.step, scale if finite else None, norm, math.fsum(losses) / self.microbatches)


def clip_scale(squares: Sequence[float], clip: float | None) -> tuple[float, float]:
    """Global norm from squared norms, and torch.nn.utils.clip_grad_norm_'s factor min(1, clip / (norm + 1e-6))."""
    norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
    return norm, 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
