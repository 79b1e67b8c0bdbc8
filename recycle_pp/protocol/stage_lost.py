"""The error for a lost stage. The job then restarts from its newest checkpoint, or ends."""


class StageLost(RuntimeError):
    """A stage has no live worker, or no copy of a part of its state."""

    def __init__(self, stage: int, what: str = "no live worker left") -> None:
        super().__init__(f"stage {stage} has {what}")
        self.stage, self.what = stage, what
