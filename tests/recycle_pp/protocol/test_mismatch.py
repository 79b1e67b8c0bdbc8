"""A wrong copy of a block is found whenever the votes show it, and no right copy is called wrong."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.protocol.commit import make_vote
from recycle_pp.protocol.mismatch import compare

PEERS = range(6)


@st.composite
def stages(draw):
    """(table, (block, worker) of wrong copies, those of them with a changed seal). All wrong copies differ."""
    table = draw(
        st.lists(st.lists(st.sampled_from(PEERS), min_size=1, max_size=4, unique=True), min_size=1, max_size=8)
    )
    held = [(block, peer) for block, holders in enumerate(table) for peer in holders]
    wrong = set(draw(st.lists(st.sampled_from(held), max_size=4)))
    seen = set(draw(st.lists(st.sampled_from(sorted(wrong)), max_size=4))) if wrong else set()
    return table, wrong, seen


def votes_of(table, wrong, seen):
    found = {}
    for peer in PEERS:
        mine = [block for block, holders in enumerate(table) if peer in holders]
        blocks = array("q", [1 + peer if (block, peer) in wrong else 0 for block in mine])
        changed = [block for block in mine if (block, peer) in seen]
        found[peer] = make_vote(0, 1, [], True, True, [], [], False, blocks.tobytes(), changed)
    return found


@given(stages())
def test_only_workers_with_a_wrong_copy_are_called_wrong(stage):
    table, wrong, seen = stage
    found = compare(table, votes_of(*stage))
    bad = {peer for _, peer in wrong}
    assert (found is None) == (not seen and not any(_differ(table, wrong, block) for block in range(len(table))))
    assert found is None or found.wrong.keys() <= bad
    if found is not None and not found.unclear:
        left = [[peer for peer in holders if peer not in found.wrong] for holders in table]
        assert not any(_differ(left, wrong, block) for block in range(len(table))), "the others agree"


@given(stages())
def test_a_worker_with_a_changed_seal_or_a_copy_unlike_two_others_is_wrong(stage):
    table, wrong, seen = stage
    found = compare(table, votes_of(*stage))
    for block, peer in wrong:
        right = [other for other in table[block] if (block, other) not in wrong]
        if (block, peer) in seen or len(right) >= 2:
            assert peer in found.wrong


@given(st.integers(0, 5))
def test_of_two_differing_copies_the_wrong_one_is_unknown_without_evidence_from_another_block(peer):
    other = (peer + 1) % 6
    pair, trio = [[peer, other]], [[peer, other], [peer, (peer + 2) % 6, (peer + 3) % 6]]
    assert compare(pair, votes_of(pair, {(0, peer)}, set())).unclear == [0]
    found = compare(trio, votes_of(trio, {(0, peer), (1, peer)}, set()))
    assert not found.unclear and found.wrong == {peer: 1}


def test_a_copy_made_since_the_last_vote_does_not_count_towards_a_majority():
    """Worker 2 has its copy from worker 0, so both agree, whether 0 or 1 is right."""
    votes = votes_of([[0, 1, 2]], {(0, 0)}, set())
    votes[2] = votes[0]
    assert compare([[0, 1, 2]], votes).wrong == {1: 0}, "which is why"
    assert compare([[0, 1, 2]], votes, {(0, 2)}).unclear == [0]
    more = votes_of([[0, 1, 2, 3]], {(0, 0)}, set())
    more[3] = more[0]
    assert compare([[0, 1, 2, 3]], more, {(0, 3)}).wrong == {0: 0, 3: 0}


def _differ(table, wrong, block):
    holders = table[block]
    bad = sum((block, peer) in wrong for peer in holders)
    return len(holders) > 1 and bad > 0
