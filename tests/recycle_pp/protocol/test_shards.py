"""What workers say of their blocks, and what the coordinator makes of it."""

import re
from array import array

import pytest
from recycle_schedules import Worker

from recycle_pp.protocol.commit import ProtocolViolation, make_vote
from recycle_pp.protocol.holdings import Holdings
from recycle_pp.protocol.shards import Shards
from recycle_pp.protocol.stage_lost import StageLost

SIZES = [128] * 6


def workers(*pipelines, loaded=-1):
    return {pipeline: Holdings(pipeline, SIZES, loaded) for pipeline in pipelines}


def share(shards, found, committed):
    shares = shards.share(0, {p: holdings.reported() for p, holdings in found.items()}, committed)
    for holdings in found.values():
        holdings.adopt(shares)
    return shares


def heal(found, committed):
    for holdings in found.values():
        for block, _, to in holdings.shares.copies:
            if to == holdings.me:
                holdings.took(block)
        holdings.settled()
        holdings.gathered(committed)


def running(copies, *pipelines):
    """A stage of these workers after step 0."""
    shards, found = Shards(copies), workers(*pipelines)
    assert share(shards, found, -1).copies == [], "all begin with all of it"
    heal(found, -1)
    for holdings in found.values():
        holdings.commit()
        holdings.gathered(0)
    return shards, found


def test_after_a_death_only_what_is_missing_is_copied_and_no_weights_are_sent():
    shards, found = running(2, 0, 1, 2, 3)
    dead = found.pop(1)
    shares = share(shards, found, 0)
    assert len(shares.copies) == len(dead.blocks) and shares.knows is None


def test_who_comes_back_has_nothing_and_is_sent_all_weights():
    shards, found = running(2, 0, 1)
    found.pop(1)
    share(shards, found, 0)
    heal(found, 0)
    found |= workers(1)
    found[1].join(committed=3)
    assert found[1].reported().loaded is None
    found[0].commit()
    found[0].gathered(3)
    shares = share(shards, found, 3)
    assert [copy[1:] for copy in shares.copies] == [(0, 1)] * 6
    assert shares.knows == 0


def test_a_heal_that_was_broken_off_goes_on_with_what_has_arrived():
    shards, found = running(2, 0, 1, 2)
    found.pop(0)
    first = share(shards, found, 0)
    block, _, to = first.copies[0]
    found[to].took(block)
    again = share(shards, found, 0)
    assert again.holders == first.holders and again.copies == first.copies[1:]
    successor = share(Shards(2), found, 0)  # a new coordinator knows what the workers say, and nothing else
    assert block not in [copy[0] for copy in successor.copies]


def test_what_all_holders_took_with_them_is_lost():
    shards, found = running(2, 0, 1, 2, 3)
    gone = found[0].blocks & found.pop(2).blocks
    found.pop(0)
    with pytest.raises(StageLost) as lost:
        share(shards, found, 0)
    assert str(lost.value) == f"stage 0 has no copy left of {len(gone)} of its 6 blocks"


NAME = "block 2 of the optimizer's state of stage 0 (w)"


def compared(copies, flips, changed=(), third=False):
    """What becomes of the votes of a group whose copies of block 2 are flipped."""
    shards, found = running(copies, *range(copies))
    shards._third, shards.hosts, shards.names = third, {(0, 0): "h"}, {0: ["u", "v", "w"]}
    votes = {
        Worker(p, 0): make_vote(
            1, 4, [], True, True, [], [], False, array("q", [7, 7, 8 if p in flips else 7, 7, 7, 7]).tobytes(),
            [2] if p in changed else [],
        )
        for p in found
    }  # fmt: skip
    return shards.compare(votes, 4)


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ("aabb", None),
        ("aaaa", None),
        ("aaab", "all copies of some blocks of the optimizer's state of stage 0 are on a: if it is lost, the job goes"),
    ],
)
def test_a_group_on_one_of_several_hosts_is_told(hosts, says):
    shards, found = Shards(2), workers(0, 1, 2, 3)
    shards.hosts = {(pipeline, 0): host for pipeline, host in enumerate(hosts)}
    share(shards, found, -1)
    said = shards.on_one_host()
    assert said == says if says is None else said.startswith(says)


@pytest.mark.parametrize(
    ("copies", "third", "says"),
    [
        (2, False, f"workers 0.0 on h and 1.0 hold different copies of {NAME}, found in step 4: memory"),
        (2, True, f"different copies of {NAME}, found in step 4, and nobody can tell which of them is right: memory"),
        (3, False, f"worker 1.0 holds another copy of {NAME} than 0.0 on h and 2.0, found in step 4: memory"),
    ],
)
def test_where_nobody_knows_who_is_wrong_or_is_to_say_the_job_ends_and_names_worker_host_and_block(copies, third, says):
    with pytest.raises(ProtocolViolation, match=re.escape(says)):
        compared(copies, flips=[1], third=third)


@pytest.mark.parametrize(
    ("copies", "changed", "detail"),
    [
        (3, [], f"its copy of {NAME} is not that of the other holders"),
        (3, [1], f"its copy of {NAME} has changed since its update"),
        (2, [1], f"its copy of {NAME} has changed since its update"),
        (1, [1], f"its copy of {NAME} has changed since its update"),
    ],
)
def test_who_differs_from_two_or_has_seen_its_own_state_change_is_wrong(copies, changed, detail):
    wrong = min(1, copies - 1)
    found = compared(copies, flips=[wrong], changed=[min(of, wrong) for of in changed], third=True)
    assert found == {Worker(wrong, 0): detail}


def test_holders_that_agree_are_all_right():
    assert compared(2, flips=[]) == compared(3, flips=[], third=True) == {}
