"""A leader's lease that is always held."""


class HeldLease:
    held = True

    def lapsed(self, seconds: float) -> bool:
        return False

    async def wait(self) -> None:
        pass

    async def fresh(self) -> None:
        pass
