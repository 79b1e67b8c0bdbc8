"""Elections on real sockets in one process: which supervisor leads, and which cannot."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from recycle_pp.consensus import election
from recycle_pp.consensus.agreement import Deposed, LostMajority, majority
from recycle_pp.consensus.election import Election
from recycle_pp.consensus.voter_client import VoterClient
from recycle_pp.wire.connection import serve
from recycle_pp.wire.frames import encode
from recycle_pp.wire.messages.agreement import Leader, Membership, Place, Propose

TOKEN = "a token of the job"
pytestmark = pytest.mark.timeout(60)


class Supervisors:
    """Listening `Election`s, by rank. `die` closes the port and all connections, as SIGKILL would."""

    def __init__(self):
        self.servers, self.elections, self.places, self.peers = {}, {}, {}, {}

    async def add(self, rank, leader=None, patience=2.0, **more):
        self.peers[rank] = []

        async def handler(peer):
            self.peers[rank].append(peer)
            await self.elections[rank].handle(peer)

        self.servers[rank] = await serve(handler, "127.0.0.1", 0, TOKEN)
        self.places[rank] = Place(*self.servers[rank].sockets[0].getsockname()[:2])
        self.elections[rank] = Election(rank, self.places[rank], TOKEN, leader, patience, **more)

    def stop_answering(self, rank):
        self.servers[rank].close()
        for peer in self.peers[rank]:
            peer.abort()

    def die(self, *ranks):
        for rank in ranks:
            self.stop_answering(rank)
            self.servers.pop(rank)
            self.elections.pop(rank).close()
            self.places.pop(rank)

    async def agree(self, leader, generation, places=None):
        await self.elections[leader].agree(generation, places or self.places)
        newest = self.elections[leader].voter.memberships
        while any(election.voter.memberships != newest for election in self.elections.values()):
            await asyncio.sleep(0.01)  # until all know that the membership is agreed

    async def propose(self, leader, memberships, rank):
        """Delivers the leader's proposal only to the supervisor of this rank."""
        client = VoterClient(self.places[rank], TOKEN)
        await client.ask(encode(Propose(leader, memberships)))
        client.close()

    async def all_notice(self, term, *ranks):
        """The result of `leader(after=term)`, a leader or an exception, on each of these supervisors."""
        waiting = [self.elections[rank].leader(after=term) for rank in ranks or self.elections]
        return await asyncio.gather(*waiting, return_exceptions=True)


@asynccontextmanager
async def agreed(size, patience=2.0):
    """Yields `size` supervisors that follow rank 0 and have acknowledged the first membership."""
    supervisors = Supervisors()
    try:
        await supervisors.add(0, patience=patience)
        leader = await supervisors.elections[0].leader(after=-1)
        for rank in range(1, size):
            await supervisors.add(rank, leader, patience)
        await supervisors.agree(0, -1)
        yield supervisors
    finally:
        supervisors.die(*supervisors.elections)


def test_a_majority_is_more_than_half_or_the_half_with_the_lowest_id():
    assert majority({0, 1}, {0, 1, 2}) and not majority({2}, {0, 1, 2})
    assert majority({3, 9}, {3, 5, 7, 9}) and not majority({5, 7}, {3, 5, 7, 9})
    assert majority({4}, {4}) and not majority({1, 2, 3}, {4})


def test_the_next_rank_succeeds_a_dead_leader():
    async def main():
        async with agreed(4) as supervisors:
            supervisors.die(0)
            leaders = await supervisors.all_notice(0)
            assert {(leader.term, leader.rank) for leader in leaders} == {(1, 1)}
            assert await supervisors.elections[1].generation() == -1
            await supervisors.agree(1, 0)
            assert [await election.generation() for election in supervisors.elections.values()] == [0, 0, 0]
            supervisors.die(1)
            leaders = await supervisors.all_notice(1)
            assert {leader.rank for leader in leaders} == {2}

    asyncio.run(main())


def test_a_leader_may_die_before_the_others_know_that_a_membership_is_agreed():
    async def main():
        async with agreed(4) as supervisors:
            supervisors.die(0)
            await supervisors.all_notice(0)
            await supervisors.elections[1].agree(0, supervisors.places)
            supervisors.die(1)  # the others have acknowledged the membership, but do not know that it is agreed
            leaders = await supervisors.all_notice(1)
            assert {leader.rank for leader in leaders} == {2}
            await supervisors.elections[2].agree(1, supervisors.places)

    asyncio.run(main())


@pytest.mark.parametrize(("have_it", "next_one"), [([2, 3], 2), ([2], 2), ([3], 3)])
def test_a_supervisor_that_missed_the_newest_membership_yields_to_those_that_have_it(have_it, next_one):
    async def main():
        async with agreed(4) as supervisors:
            leader = supervisors.elections[0]
            newest = Membership((0, 0), 0, {rank: supervisors.places[rank] for rank in (0, 1, 2, 3)})
            known = [*leader.voter.memberships, newest]
            for rank in have_it:  # the leader dies before rank 1, the next in line, receives it
                await supervisors.propose(leader.voter.leader, known, rank)
            supervisors.die(0)
            async with asyncio.timeout(3):
                leaders = await supervisors.all_notice(0)
            assert {leader.rank for leader in leaders} == {next_one}

    asyncio.run(main())


def test_the_only_supervisor_that_knows_a_membership_without_itself_leads_if_its_vote_is_needed():
    async def main():
        async with agreed(6) as supervisors:
            leader = supervisors.elections[0]
            newest = Membership((0, 0), 0, {rank: supervisors.places[rank] for rank in (0, 2, 3, 4, 5)})
            await supervisors.propose(leader.voter.leader, [*leader.voter.memberships, newest], 1)
            supervisors.die(0, 2)
            assert {leader.rank for leader in await supervisors.all_notice(0)} == {1}

    asyncio.run(main())


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_after_any_deaths_and_partial_proposals_a_majority_elects_one_leader(data):
    """The leader dies after proposing up to two memberships, each received by some of the others."""
    size = data.draw(st.integers(4, 6))
    some, few = (st.sets(st.integers(1, size - 1), max_size=most) for most in (size, 1))
    proposals = [(set(range(size)) - data.draw(few), data.draw(some)) for _ in range(data.draw(st.integers(0, 2)))]
    left = set(range(1, size)) - data.draw(few)
    assume(left and all(majority(left, roster) for roster in [set(range(size)), *(of for of, _ in proposals)]))

    async def main():
        async with agreed(size, patience=6.0) as supervisors:
            leader = supervisors.elections[0]
            known = list(leader.voter.memberships)
            for generation, (roster, reached) in enumerate(proposals):
                known.append(Membership((0, generation), 0, {rank: supervisors.places[rank] for rank in roster}))
                for rank in reached:
                    await supervisors.propose(leader.voter.leader, known, rank)
            supervisors.die(*set(range(size)) - left)
            assert len(set(await supervisors.all_notice(0))) == 1

    asyncio.run(main())


def test_the_rank_after_next_leads_if_the_next_one_is_dead_too():
    async def main():
        async with agreed(5) as supervisors:
            supervisors.die(0, 1)
            leaders = await supervisors.all_notice(0)
            assert {leader.rank for leader in leaders} == {2}

    asyncio.run(main())


@pytest.mark.parametrize(("size", "dead"), [(4, [0, 1]), (5, [0, 2, 4]), (2, [0])])
def test_without_a_majority_the_election_fails_at_once(size, dead):
    async def main():
        async with agreed(size, patience=30.0) as supervisors:
            supervisors.die(*dead)
            async with asyncio.timeout(5):
                for refusal in await supervisors.all_notice(0):
                    assert isinstance(refusal, LostMajority) and "not a majority" in str(refusal)

    asyncio.run(main())


def test_the_half_with_the_lowest_rank_continues_and_becomes_the_next_membership():
    async def main():
        async with agreed(4) as supervisors:
            supervisors.die(2, 3)
            await supervisors.elections[0].agree(0, supervisors.places)
            supervisors.die(1)
            await supervisors.elections[0].agree(1, supervisors.places)

    asyncio.run(main())


def test_a_leader_without_a_majority_gets_an_error():
    async def main():
        async with agreed(4, patience=30.0) as supervisors:
            supervisors.die(1, 2, 3)
            async with asyncio.timeout(5):
                with pytest.raises(LostMajority, match="only 0 of supervisors 0, 1, 2, 3 can answer"):
                    await supervisors.elections[0].agree(0, supervisors.places)

    asyncio.run(main())


def test_a_leader_that_reaches_a_majority_is_not_deposed():
    async def main():
        async with agreed(4, patience=0.5) as supervisors:
            (leader,) = await supervisors.all_notice(0, 1)
            assert (leader.term, leader.rank) == (0, 0), "only rank 1's connection was lost"
            await supervisors.elections[0].agree(0, supervisors.places)

    asyncio.run(main())


def test_no_membership_of_a_deposed_leader_is_agreed():
    async def main():
        async with agreed(4) as supervisors:
            supervisors.stop_answering(0)
            leaders = await supervisors.all_notice(0, 1, 2, 3)
            assert {leader.rank for leader in leaders} == {1}
            with pytest.raises(Deposed, match="another supervisor coordinates now"):
                await supervisors.elections[0].agree(0, supervisors.places)

    asyncio.run(main())


def test_a_supervisor_with_an_older_membership_cannot_win():
    """Rank 1 missed the membership that excludes it. It could still get the votes of a majority of the first one."""

    async def main():
        async with agreed(4, patience=1.0) as supervisors:
            without = {rank: place for rank, place in supervisors.places.items() if rank != 1}
            await supervisors.elections[0].agree(0, without)
            supervisors.die(0)
            stale, *leaders = await supervisors.all_notice(0, 1, 2, 3)
            assert {leader.rank for leader in leaders} < {2, 3}
            assert stale == leaders[0], "rank 1 receives the name of the leader when it requests votes"

    asyncio.run(main())


def test_before_any_membership_is_agreed_the_job_ends_with_its_first_leader():
    async def main():
        supervisors = Supervisors()
        await supervisors.add(0)
        leader = await supervisors.elections[0].leader(after=-1)
        assert (leader.term, leader.rank) == (0, 0)
        await supervisors.add(1, leader)
        supervisors.die(0)
        (refusal,) = await supervisors.all_notice(0)
        assert isinstance(refusal, LostMajority)
        supervisors.die(1)

    asyncio.run(main())


def test_a_resumed_job_starts_with_a_newer_term():
    async def main():
        supervisors = Supervisors()
        try:
            await supervisors.add(0, first_term=7)
            leader = await supervisors.elections[0].leader(after=-1)
            for rank in (1, 2):
                await supervisors.add(rank, leader)
            await supervisors.agree(0, -1)
            assert leader.term == 7 == await supervisors.elections[0].confirm(held=True)
            supervisors.die(0)
            await supervisors.all_notice(7)
            assert await supervisors.elections[1].confirm(held=True) == 8
        finally:
            supervisors.die(*supervisors.elections)

    asyncio.run(main())


def test_a_leader_whose_lease_expired_while_all_others_ended_is_not_confirmed(monkeypatch):
    """The leader was suspended. Meanwhile the others may have elected another leader and finished the job."""

    async def main():
        supervisors = Supervisors()
        try:
            await supervisors.add(0)
            leader = await supervisors.elections[0].leader(after=-1)
            await supervisors.add(1, leader)
            await supervisors.agree(0, -1)
            # The first confirmation of a term needs no lease.
            assert await supervisors.elections[0].confirm(held=False) == leader.term
            supervisors.die(1)
            monkeypatch.setattr(election, "is_dead", lambda process: True)
            assert await supervisors.elections[0].confirm(held=True) == leader.term
            with pytest.raises(LostMajority, match=r"all supervisors \(0, 1\) except this one have ended"):
                await supervisors.elections[0].confirm(held=False)
        finally:
            supervisors.die(0)

    asyncio.run(main())


def test_a_leader_whose_rank_went_to_a_new_node_does_not_mistake_that_nodes_election_for_its_own():
    """The leader was suspended. Meanwhile its node was replaced, and the new node was elected later."""

    async def main():
        async with agreed(3) as supervisors:
            old = supervisors.elections[0]
            newer = Leader(5, 0, "127.0.0.1", 9)
            for rank in (1, 2):
                supervisors.elections[rank].voter.follow(newer)
            with pytest.raises(Deposed):
                await old.confirm(held=False)
            assert old.voter.leader == newer and not old.is_me(newer)

    asyncio.run(main())


def test_a_new_node_follows_a_leader_that_is_elected_before_it_is_a_member():
    async def main():
        async with agreed(3) as supervisors:
            lost = supervisors.elections[0].voter.leader
            others = dict(supervisors.places)
            await supervisors.add(3, lost, others=others)
            supervisors.die(0)
            found = await supervisors.all_notice(lost.term)
            assert [leader.rank for leader in found] == [1, 1, 1] and len(set(found)) == 1

    asyncio.run(main())


def test_a_candidate_waits_a_limited_time_for_many_silent_supervisors(monkeypatch):
    monkeypatch.setattr(election, "TURNS_SECONDS", 0.5, raising=False)

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as silent:
            here = Place("127.0.0.1", 1)
            last = Election(60, here, TOKEN)
            roster = {rank: Place(*silent.getsockname()) for rank in range(60)} | {60: here}
            last.voter.memberships = [Membership((0, 0), 60, roster)]
            begun = time.monotonic()
            await last._wait_for_turn(set())
            assert time.monotonic() - begun < 5
            last.close()

    asyncio.run(main())
