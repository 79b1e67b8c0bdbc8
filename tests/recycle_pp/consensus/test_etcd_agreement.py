"""Elections with a real etcd; all supervisors of the job are in one process."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from recycle_pp.consensus import etcd_agreement
from recycle_pp.consensus.agreement import Deposed, LostMajority
from recycle_pp.consensus.etcd import Etcd
from recycle_pp.consensus.etcd_agreement import EtcdAgreement
from recycle_pp.wire.connection import serve
from recycle_pp.wire.messages.agreement import Place
from tests.etcd import EtcdServer, needs_etcd

pytestmark = [pytest.mark.timeout(90), needs_etcd]
PATIENCE = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


class Supervisors:
    def __init__(self, server, token):
        self._server, self._token = server, token
        self.those = {}
        self.places = {}

    def add(self, rank, leader=None, port=None, process=""):
        self.places[rank] = Place("127.0.0.1", port or 5000 + rank, process)
        etcd = Etcd([self._server.endpoint])
        self.those[rank] = EtcdAgreement(etcd, rank, self.places[rank], self._token, leader, PATIENCE)
        return self.those[rank]

    def die(self, *ranks):
        for rank in ranks:
            self.those.pop(rank).close()

    async def all_notice(self, term, *ranks):
        waiting = [self.those[rank].leader(after=term) for rank in ranks or self.those]
        return await asyncio.gather(*waiting, return_exceptions=True)


@asynccontextmanager
async def agreed(server, token, size):
    """Yields supervisors that follow rank 0 and have agreed on the first membership."""
    supervisors = Supervisors(server, token)
    try:
        leader = await supervisors.add(0).leader(after=-1)
        assert (leader.term, leader.rank) == (0, 0)
        for rank in range(1, size):
            supervisors.add(rank, leader)
        await supervisors.those[0].agree(0, supervisors.places)
        yield supervisors
    finally:
        supervisors.die(*supervisors.those)


def test_a_leader_that_a_majority_has_lost_is_replaced_at_once(server):
    async def main():
        async with agreed(server, "lost by most", 4) as supervisors:
            supervisors.die(0)
            begun = time.monotonic()
            leaders = await supervisors.all_notice(0)
            assert time.monotonic() - begun < PATIENCE - 0.5, "the election does not wait for its lease to expire"
            assert len(set(leaders)) == 1 and leaders[0].term == 1
            first = leaders[0].rank
            assert await supervisors.those[first].generation() == 0
            await supervisors.those[first].agree(1, {r: supervisors.places[r] for r in supervisors.those})
            supervisors.die(first)
            leaders = await supervisors.all_notice(1)
            assert len(set(leaders)) == 1 and leaders[0].term == 2

    asyncio.run(main())


def test_either_half_continues_once_the_lease_of_a_lost_leader_has_expired(server):
    """So with etcd, unlike with the embedded election, a job on two nodes survives the loss of either."""

    async def main():
        async with agreed(server, "half", 4) as supervisors:
            supervisors.die(0, 1)
            leaders = await supervisors.all_notice(0)
            assert len(set(leaders)) == 1 and leaders[0].rank in (2, 3)

    asyncio.run(main())


def test_a_leader_that_reaches_a_majority_is_not_deposed(server):
    async def main():
        async with agreed(server, "heard by most", 4) as supervisors:
            (refusal,) = await supervisors.all_notice(0, 1)
            assert isinstance(refusal, LostMajority) and "cannot be reached from here" in str(refusal)
            await supervisors.those[0].agree(1, supervisors.places)

    asyncio.run(main())


def test_a_leader_that_answers_is_followed_again(server):
    """Only the connection to the leader was lost, and the first attempt to reconnect took too long."""

    async def main():
        supervisors = Supervisors(server, "answers")
        listener = await serve(lambda peer: supervisors.those[0].handle(peer), "127.0.0.1", 0, "answers")
        leader = await supervisors.add(0, port=listener.sockets[0].getsockname()[1]).leader(after=-1)
        for rank in (1, 2):
            supervisors.add(rank, leader)
        await supervisors.those[0].agree(0, supervisors.places)
        begun = time.monotonic()
        assert await supervisors.all_notice(0, 1) == [leader]
        assert time.monotonic() - begun < 2 * PATIENCE
        assert not (await supervisors.those[1]._read_view()).lost, (
            "rank 1's mark is deleted, so it does not add to a later one of rank 2"
        )
        listener.close()
        supervisors.die(0, 1, 2)

    asyncio.run(main())


def test_no_membership_of_a_deposed_leader_is_agreed(server):
    async def main():
        async with agreed(server, "deposed", 4) as supervisors:
            leaders = await supervisors.all_notice(0, 1, 2, 3)
            assert len(set(leaders)) == 1 and leaders[0].rank != 0
            with pytest.raises(Deposed, match="another supervisor coordinates now"):
                await supervisors.those[0].agree(1, {0: supervisors.places[0]})

    asyncio.run(main())


def test_only_one_side_of_a_partition_gets_the_next_membership(server):
    """The leader is cut off from the others, but all reach etcd. The first write wins."""

    async def main():
        async with agreed(server, "two sides", 3) as supervisors:

            async def leader_side():
                await supervisors.those[0].agree(1, {0: supervisors.places[0]})

            async def other_side(rank):
                leader = await supervisors.those[rank].leader(after=0)
                if leader.rank == rank:
                    await supervisors.those[rank].agree(1, {r: supervisors.places[r] for r in (1, 2)})

            ends = await asyncio.gather(leader_side(), other_side(1), other_side(2), return_exceptions=True)
            assert all(end is None or isinstance(end, LostMajority | Deposed) for end in ends), ends
            assert (ends[0] is None) != (ends[1] is None), ends

    asyncio.run(main())


def test_a_side_that_does_not_know_the_newest_generation_cannot_reuse_its_number(server):
    """The leader is cut off from the others, but not from etcd. It may still finish the job alone in generation 1."""

    async def main():
        async with agreed(server, "unheard of", 3) as supervisors:
            await supervisors.those[0].agree(1, supervisors.places)
            supervisors.die(0)
            leader, _ = await supervisors.all_notice(0)
            new = supervisors.those[leader.rank]
            with pytest.raises(LostMajority, match="a generation unknown to this side"):
                await new.agree(1, supervisors.places)
            await new.agree(2, supervisors.places)

    asyncio.run(main())


def test_a_former_member_cannot_lead(server):
    async def main():
        async with agreed(server, "no member", 3) as supervisors:
            await supervisors.those[0].agree(1, {rank: supervisors.places[rank] for rank in (0, 1)})
            supervisors.die(0)
            stale, leader = await supervisors.all_notice(0, 2, 1)
            assert leader.rank == 1
            assert stale == leader or isinstance(stale, LostMajority)

    asyncio.run(main())


@pytest.mark.slow
def test_an_agreement_waits_for_a_silent_etcd_and_then_fails(tmp_path, monkeypatch):
    async def main():
        with EtcdServer(tmp_path) as server:
            async with agreed(server, "silent", 3) as supervisors:
                server.stop()
                agreeing = asyncio.create_task(supervisors.those[0].agree(1, supervisors.places))
                await asyncio.sleep(3 * PATIENCE)
                assert not agreeing.done()
                await asyncio.to_thread(server.start)
                await asyncio.wait_for(agreeing, 10)
                server.stop()
                monkeypatch.setattr(etcd_agreement, "ETCD_SECONDS", 1.0)
                with pytest.raises(
                    LostMajority, match=r"etcd does not answer .* no membership can be agreed without it"
                ):
                    await asyncio.wait_for(supervisors.those[0].agree(2, supervisors.places), 10)

    asyncio.run(main())


@pytest.mark.slow
def test_a_leader_takes_a_new_lease_after_an_expiry(server):
    async def main():
        async with agreed(server, "lease ended", 3) as supervisors:
            leader = supervisors.those[0]
            await leader._etcd.revoke(leader._lease)
            await leader.agree(1, supervisors.places)
            await leader._etcd.revoke(leader._lease)
            await asyncio.sleep(PATIENCE)
            (refusal,) = await supervisors.all_notice(0, 1)
            assert isinstance(refusal, LostMajority), "the leader has renewed its key"

    asyncio.run(main())


@pytest.mark.slow
def test_a_job_with_the_same_token_waits_for_the_end_of_the_previous_one(server):
    async def main():
        async with agreed(server, "again", 3) as old:
            new = Supervisors(server, "again")
            (refusal,) = await asyncio.gather(new.add(0, port=6000).leader(after=-1), return_exceptions=True)
            assert isinstance(refusal, LostMajority) and "coordinates another job with the same token" in str(refusal)
            old.die(0)
            leader = await new.add(0, port=6000).leader(after=-1)
            assert (leader.term, leader.port) == (0, 6000)
            await asyncio.sleep(1.5)
            for refusal in await old.all_notice(0):
                assert isinstance(refusal, LostMajority), "the old job's supervisors do not follow the new job"
            new.die(0)

    asyncio.run(main())


def test_a_job_restarted_at_the_same_address_does_not_lead_with_the_lease_of_the_previous_one(server):
    async def main():
        async with agreed(server, "restarted", 3) as old:
            await old.those[0].agree(3, old.places)
            old.die(0)
            new = Supervisors(server, "restarted")
            leader = await new.add(0, process="another").leader(after=-1)
            assert leader.term == 0
            await new.those[0].agree(-1, new.places)
            new.die(0)

    asyncio.run(main())
