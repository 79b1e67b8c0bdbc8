"""What ends a job, or takes it back to its newest checkpoint: a part of its state is nowhere any more."""


class StageLost(RuntimeError):
    """A stage has no live worker, or no copy of a part of its state, and there is nothing to restore it from."""

    def __init__(self, stage: int, what: str = "no live worker left") -> None:
        super().__init__(f"stage {stage} has {what}")
        self.stage, self.what = stage, what
