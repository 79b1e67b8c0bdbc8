"""A leader notices that it was cut off, because its lease has lapsed."""

import asyncio

from recycle_pp.consensus.leader_lease import LeaderLease


class Voters:
    """A majority that answers unless it is cut off."""

    def __init__(self):
        self.reached = asyncio.Event()
        self.reached.set()

    async def confirm(self, held):
        await self.reached.wait()
        return 3


def test_a_lease_has_lapsed_after_a_cut_and_not_before():
    async def run():
        voters = Voters()
        lease = LeaderLease(voters, suspicion=0.05)
        await lease.wait()
        assert lease.held and lease.term == 3 and not lease.lapsed(60.0)
        voters.reached.clear()
        while lease.held:
            await asyncio.sleep(0.005)
        voters.reached.set()
        await lease.wait()
        assert lease.lapsed(60.0) and not lease.lapsed(0.0)
        lease.close()

    asyncio.run(asyncio.wait_for(run(), 20))
