"""A leader's lease that is always held."""


class HeldLease:
    held = True

    async def wait(self) -> None:
        pass
