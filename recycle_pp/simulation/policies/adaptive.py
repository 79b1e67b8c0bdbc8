"""recycle_pp: peers take over the micro-batches of dead workers within the step, and layers may move."""

from __future__ import annotations

from collections import Counter

from recycle_schedules import Worker

from recycle_pp.fitting.move_policy import Move, Outages
from recycle_pp.protocol.assignment import refilled

from ..broken_step import BrokenSteps
from ..job import Shape
from ..run import Run
from .base import Base, World


class Rerouted(Base):
    """The policy of the trainer.

    - A death costs the measured stall and the extra time to redo the lost ops (`broken_step`). After that, steps follow
      the plan for the remaining workers.
    - A joining machine takes a vacant place at the stage with the fewest workers. A peer sends the state while
      training continues, and the machine takes part from the next commit.
    - If a stage loses all its workers, workers of other stages move there, all workers load the newest checkpoint, and
      the steps after it are redone.
    - With fewer workers than stages, the job stops until there are enough."""

    def __init__(self, world: World, name: str, broken: BrokenSteps, save_every: float = 600.0) -> None:
        super().__init__(world, name)
        self.broken, self.save_every = broken, save_every

    def begin(self, run: Run) -> None:
        super().begin(run)
        D, P = self.job.pipelines, self.job.stages
        self.layout = self.job.layout
        self.roles = {rank: Worker(rank // P, rank % P) for rank in range(D * P)}
        self.ranks: dict[int, int] = {}  # machine -> rank, of machines that take part or are joining
        self.joining: set[int] = set()
        self.waiting: list[int] = []  # machines without a place
        self.attempts: Counter[int] = Counter()  # machine -> number that grows when its scheduled join becomes invalid
        self.version = 0  # grows with every change of the membership
        self.saved = 0.0  # number of steps in the newest checkpoint
        run.later(self.save_every, self._save)
        for machine in sorted(run.up):
            if machine < D * P:
                self.ranks[machine] = machine
        self.free = set(self.roles) - set(self.ranks.values())
        self.live = [0] * P
        for rank in self.ranks.values():
            self.live[self.roles[rank].stage] += 1
        for machine in sorted(run.up - set(self.ranks)):
            self._place(machine)
        if 0 in self.live:
            self._restore()
        else:
            self._adopt()

    # ---- changes

    def lost(self, machine: int) -> None:
        if machine in self.waiting:
            self.waiting.remove(machine)
            return
        rank = self.ranks.pop(machine)
        self.free.add(rank)
        self.attempts[machine] += 1
        if machine in self.joining:
            self.joining.discard(machine)
        elif not self.stopped:
            self._died(self.roles[rank].stage)
        if self.waiting:
            self._place(self.waiting.pop(0))

    def gained(self, machine: int) -> None:
        self._place(machine)
        if self.stopped and len(self.ranks) >= self.job.stages:
            self._restore()

    @property
    def stopped(self) -> bool:
        return 0 in self.live

    def _died(self, stage: int) -> None:
        before = tuple(self.live)
        self.live[stage] -= 1
        if not self.live[stage]:
            self._restore()
            return
        self.run.stall(self.costs.recovery.stall(self.rng))
        self.run.stall(self.broken.excess(before, self.layout, stage))
        self._adopt()

    def _place(self, machine: int) -> None:
        if not self.free:
            self.waiting.append(machine)
            return
        live = self.live.copy()
        for other in self.joining:
            live[self.roles[self.ranks[other]].stage] += 1
        worth = {stage: self._worth(live, stage) for stage in {self.roles[rank].stage for rank in self.free}}
        rank = self._place_of(machine, min(self.free, key=lambda rank: (worth[self.roles[rank].stage], rank)))
        self.free.discard(rank)
        self.ranks[machine] = rank
        self.joining.add(machine)
        if not self.stopped:
            self._expect(machine)

    def _worth(self, live: list[int], stage: int) -> float:
        """Sort key of a stage: its number of workers. A new machine joins the stage with the smallest key."""
        return live[stage]

    def _place_of(self, machine: int, best: int) -> int:
        """The vacant rank that the machine takes: `best`, since any machine may take any rank."""
        return best

    def _expect(self, machine: int) -> None:
        """Schedules the join: after the start, the transfer of the state, and the end of the current step."""
        attempt = self.attempts[machine]
        seconds = self.costs.start + self.costs.transfer(self.job.state_bytes(self.layout)) + self._step() / 2
        self.run.later(seconds, lambda: self._joined(machine, attempt))

    def _joined(self, machine: int, attempt: int) -> None:
        if self.attempts[machine] == attempt and machine in self.joining:
            self.joining.discard(machine)
            self.live[self.roles[self.ranks[machine]].stage] += 1
            self._adopt()

    def _restore(self) -> None:
        """Restarts all machines from the newest checkpoint, if there are at least as many machines as stages."""
        self.run.lose_steps(self.run.done - self.saved)
        self.version += 1
        self.live = [0] * self.job.stages
        if len(self.ranks) < self.job.stages:
            self.run.advance(None, 0)
            return
        self.roles = refilled(self.roles, set(self.ranks.values()), self.job.stages)
        for machine in self.joining:
            self.attempts[machine] += 1
        self.joining.clear()
        for rank in self.ranks.values():
            self.live[self.roles[rank].stage] += 1
        self.layout = self._layout_of(tuple(self.live))
        self.run.stall(self.costs.restart)
        self._adopt()

    def _save(self) -> None:
        """Takes a checkpoint, which does not delay training."""
        self.saved = self.run.done
        self.run.later(self.save_every, self._save)

    # ---- the pace

    def _adopt(self) -> None:
        self.version += 1
        shape = tuple(self.live)
        self.run.advance(self._step(), sum(shape), (shape, self.layout))

    def _step(self) -> float:
        return 0.0 if self.stopped else self.world.times.seconds(tuple(self.live), self.layout)

    def _layout_of(self, shape: Shape) -> tuple[int, ...]:
        """The layout of a job that starts with this membership."""
        return self.job.layout


class Respawned(Rerouted):
    """`Rerouted` for a replay, in which only processes die. A returning process takes its former rank (machine k
    is rank k).

    `recycle_pp.chaos` never kills the last member of a stage. If in the simulation the last member dies while a worker
    is joining, that worker must already have joined in reality."""

    def _place_of(self, machine: int, best: int) -> int:
        return machine if machine in self.free else best

    def _died(self, stage: int) -> None:
        early = [m for m in sorted(self.joining) if self.roles[self.ranks[m]].stage == stage]
        if self.live[stage] == 1 and early:
            self._joined(early[0], self.attempts[early[0]])
        super()._died(stage)


class Rebalanced(Rerouted):
    """`Rerouted` that also moves the boundaries between stages (`schedule.rebalance=auto`).

    - The target is the best layout for the membership (`plan_layout`). A move begins if it pays according to the
      trainer's rule (`fitting/move_policy.py`). The rule predicts outages from those of the simulation so far. It is
      applied at every change, and every `AGAIN` seconds.
    - While training continues with the old layout, workers receive the layers that they lack. This takes the time of
      the transfer and as many steps as measured moves took (`moves.py`). Steps are slower meanwhile. The switch stalls
      all workers.
    - If the membership changes before the switch, the move is cancelled."""

    AGAIN = 60.0
    RESPAWNS = False
    """Whether the rule expects every dead worker to return soon, because its new process starts at once. If False, the
    rule expects only joining workers soon."""

    def begin(self, run: Run) -> None:
        self.outages = Outages(self.costs.outage)
        super().begin(run)

    def _adopt(self) -> None:
        super()._adopt()
        self._compare(self.version)

    def _compare(self, version: int) -> None:
        """Begins a move if it pays. Does nothing if the membership has changed.

        version: version of the membership for which this call was scheduled"""
        if self.version != version or self.stopped:
            return
        joining = {self.roles[self.ranks[machine]] for machine in self.joining}
        away = {self.roles[rank] for rank in self.free} | joining
        soon = away if self.RESPAWNS else joining
        self.outages.observe(away, self.run.now)
        shape = tuple(self.live)
        target = self.world.times.layout(shape)
        if target == self.layout:
            return
        now, costs = self._step(), self.costs.moves
        transfer = self.costs.transfer(self.job.moved_bytes(self.layout, target))
        move = Move(
            now=now,
            then=self.world.times.seconds(shape, target),
            outage=min(self.run.there.seconds - self.run.now, self.outages.expected(self.run.now, soon)),
            seconds=transfer + now,
            back=bool(away),
            switch=costs.switch,
        )
        if move.pays("auto"):
            self.run.advance(now * (1 + costs.slowed), sum(shape), (shape, self.layout))
            self.run.later(transfer + costs.steps * now, lambda: self._moved(version, target))
        else:
            self.run.later(self.AGAIN, lambda: self._compare(version))

    def _worth(self, live: list[int], stage: int) -> float:
        """Sort key of a stage: seconds of a step if the new machine joins this stage."""
        shape = tuple(n + (s == stage) for s, n in enumerate(live))
        return self.world.times.seconds(shape, self.world.times.layout(shape)) if 0 not in shape else float(stage)

    def _moved(self, version: int, target: tuple[int, ...]) -> None:
        if self.version == version:
            self.layout = target
            self.run.stall(self.costs.moves.stall(self.rng))
            super()._adopt()

    def _layout_of(self, shape: Shape) -> tuple[int, ...]:
        return self.world.times.layout(shape)


class RespawnedRebalanced(Respawned, Rebalanced):
    """`Rebalanced` for a replay. The trainer expects every dead worker to return soon, because its new process starts
    at once. `recycle_pp.chaos` then holds that process back until the trace has the worker up again."""

    RESPAWNS = True
