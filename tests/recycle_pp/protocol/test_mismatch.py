"""A wrong copy of a block is found if the votes show it, and no correct copy is called wrong."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.protocol.ballot import make_vote
from recycle_pp.protocol.mismatch import compare
from recycle_pp.wire.messages.units import UnitId

PEERS = range(6)


def table_of(*holders):
    """The holders of some blocks of one layer."""
    return {UnitId(0, number): of for number, of in enumerate(holders)}


@st.composite
def stages(draw):
    """(table, (block, worker) of wrong copies, those of these copies whose seal changed). All wrong copies differ."""
    holders = st.lists(st.sampled_from(PEERS), min_size=1, max_size=4, unique=True)
    table = table_of(*draw(st.lists(holders, min_size=1, max_size=8)))
    held = [(block, peer) for block, holders in table.items() for peer in holders]
    wrong = set(draw(st.lists(st.sampled_from(held), max_size=4)))
    seen = set(draw(st.lists(st.sampled_from(sorted(wrong)), max_size=4))) if wrong else set()
    return table, wrong, seen


def votes_of(table, wrong, seen):
    found = {}
    for peer in PEERS:
        mine = [block for block, holders in table.items() if peer in holders]
        blocks = array("q", [1 + peer if (block, peer) in wrong else 0 for block in mine])
        changed = [block for block in mine if (block, peer) in seen]
        found[peer] = make_vote(0, 1, [], True, True, [], [], False, blocks.tobytes(), changed)
    return found


@given(stages())
def test_only_workers_with_a_wrong_copy_are_called_wrong(stage):
    table, wrong, seen = stage
    found = compare(table, votes_of(*stage))
    bad = {peer for _, peer in wrong}
    assert (found is None) == (not seen and not any(_differ(table, wrong, block) for block in table))
    assert found is None or found.wrong.keys() <= bad
    if found is not None and not found.unclear:
        left = {block: [peer for peer in of if peer not in found.wrong] for block, of in table.items()}
        assert not any(_differ(left, wrong, block) for block in table), "the others agree"


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
    pair, trio = table_of([peer, other]), table_of([peer, other], [peer, (peer + 2) % 6, (peer + 3) % 6])
    first, second = trio
    assert compare(pair, votes_of(pair, {(first, peer)}, set())).unclear == [first]
    found = compare(trio, votes_of(trio, {(first, peer), (second, peer)}, set()))
    assert not found.unclear and found.wrong == {peer: second}


def test_a_copy_made_since_the_last_vote_does_not_count_towards_a_majority():
    """Worker 2 got its copy from worker 0, so the two agree, whether worker 0 or worker 1 is right."""
    three, four = table_of([0, 1, 2]), table_of([0, 1, 2, 3])
    (block,) = three
    votes = votes_of(three, {(block, 0)}, set())
    votes[2] = votes[0]
    assert compare(three, votes).wrong == {1: block}, "the wrong verdict, if worker 2 counted"
    assert compare(three, votes, {(block, 2)}).unclear == [block]
    more = votes_of(four, {(block, 0)}, set())
    more[3] = more[0]
    assert compare(four, more, {(block, 3)}).wrong == {0: block, 3: block}


def _differ(table, wrong, block):
    holders = table[block]
    bad = sum((block, peer) in wrong for peer in holders)
    return len(holders) > 1 and bad > 0
