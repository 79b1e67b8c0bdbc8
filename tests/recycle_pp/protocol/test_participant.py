"""A participant copes with repeated and lost messages, and with layers that its stage gains or loses."""

from recycle_schedules import Worker

from recycle_pp.protocol.holdings import NOTHING, Holdings
from recycle_pp.protocol.participant import Participant
from recycle_pp.wire.messages.generations import Adopt, Announce, Attempt, Shares
from recycle_pp.wire.messages.steps import Commit
from recycle_pp.wire.messages.units import UnitId, packed


def test_a_commit_received_twice_is_applied_once():
    """After a reset the coordinator repeats the newest commit, which may have arrived already."""
    me = Participant(0, Worker(0, 0))
    me.holdings.adopt(Shares([(0, 0, 1)], [(1, [0])], together=True, copies=[], knows=None))
    for _ in range(2):
        me.commit(Commit(0, 0, scale=1.0, norm=1.0, loss=2.0))
    assert me.committed == 0 and len(me.commits) == 1


def test_a_commit_that_arrives_after_the_next_generation_is_applied():
    """The commit was lost in a reset, and meanwhile another reconnected member has caused a new generation."""
    me = Participant(0, Worker(0, 0))
    me.announce(Announce(0, {0: Worker(0, 0)}, committed=-1, base=0))
    me.holdings.adopt(Shares([(0, 0, 1)], [(1, [0])], together=True, copies=[], knows=None))
    me.announce(Announce(1, {0: Worker(0, 0)}, committed=0, base=1))
    me.commit(Commit(0, 0, scale=1.0, norm=1.0, loss=2.0))
    assert me.committed == 0 and len(me.commits) == 1


MEMBERS = {0: Worker(0, 0), 1: Worker(0, 1)}
NOW, THEN = {0: [0, 1], 1: [2]}, {0: [0], 1: [1, 2]}
U = [UnitId(layer, number) for layer in range(3) for number in range(2)]


def of(*layers):
    return [unit for unit in U if unit.layer in layers]


def member(number, loaded=-1):
    """A member that holds all units of its stage, after step 0."""
    me = Participant(number, MEMBERS[number], Holdings(number, of(*NOW[number]), loaded))
    enter(me, 0, NOW)
    me.commit(Commit(0, 0, scale=1.0, norm=1.0, loss=2.0, hold=True))
    me.holdings.gathered(0)
    return me


def enter(me, generation, layout):
    """Announces and adopts a generation. Returns the report."""
    report = me.announce(Announce(generation, MEMBERS, me.committed, base=0, layout=layout))
    units = of(*layout[me.worker.stage])
    shares = Shares.of({unit: [me.member] for unit in units}, together=True, copies=[], knows=None)
    me.adopt(Adopt(generation, {}, None, [], None, False, shares))
    return report


def test_an_understudy_that_takes_over_returns_the_checkpoints_that_it_will_not_save():
    for applied in (False, True):
        me = Participant(0, MEMBERS[0], Holdings(0, of(*NOW[0]), -1))
        enter(me, 0, NOW)
        me.commit(Commit(0, 0, scale=1.0, norm=1.0, loss=2.0, savers=[0, 1]))
        if applied:
            me.next_commit()
        me.announce(Announce(1, {0: MEMBERS[1]}, 0, base=0, layout=NOW))
        shares = Shares.of({unit: [0] for unit in of(*NOW[1])}, together=True, copies=[], knows=None)
        assert me.adopt(Adopt(1, {}, None, [], None, False, shares)) == ([] if applied else [1])


def test_a_worker_reports_the_layout_of_its_agreed_generation_until_the_next_one_is_agreed():
    me = member(0)
    assert me.state(linked=True).layout == NOW and me.orders is None
    me.announce(Announce(1, MEMBERS, 0, base=0, layout=THEN))
    assert me.state(linked=True).layout == NOW
    enter(me, 2, THEN)
    assert me.state(linked=True).layout == THEN and me.orders.layers == [0]


def test_arrived_units_count_as_held_only_in_a_generation_with_their_layers_and_at_their_step():
    me = member(1)
    me.followed(0, of(1))
    assert enter(me, 1, NOW).holds.units == packed(of(2))
    assert enter(me, 2, THEN).holds.units == packed(of(1, 2))
    me.followed(-1, of(1))
    assert enter(me, 3, THEN).holds.units == packed(of(2))
    me.followed(NOTHING, ())
    assert enter(me, 4, THEN).holds.units == packed(of(2))


def test_a_worker_knows_the_exponents_of_its_new_layers_if_a_unit_of_each_has_arrived():
    me = member(1)
    assert enter(me, 1, THEN).holds.weights == NOTHING
    me.followed(0, of(1)[:1])
    assert enter(me, 2, THEN).holds.weights == -1, "the worker knows the exponents, but not all weights"
    me.relayout(of(1, 2))
    assert me.holdings.units == {*of(1)[:1], *of(2)} and me.holdings.weights == -1
    me.holdings.took(U[3])
    assert enter(me, 3, THEN).holds.units == packed(of(1, 2))


def test_a_stage_with_new_layers_keeps_arrived_units_and_drops_those_of_layers_that_left():
    gains, loses = member(1), member(0)
    gains.followed(0, of(1))
    for me in (gains, loses):
        enter(me, 1, THEN)
        me.relayout(of(*me.orders.layers))
    assert gains.holdings.units == {*of(1, 2)} and loses.holdings.units == {*of(0)}
    assert gains.holdings.weights == loses.holdings.weights == 0
    assert enter(gains, 2, THEN).holds == gains.holdings.reported()


def test_after_a_wrong_copy_was_found_a_worker_reports_only_the_units_assigned_to_it():
    """Its other units may be wrong, because it has received the weights of the wrong copy for them."""
    me = member(1)
    me.followed(0, of(1))
    enter(me, 1, THEN)
    me.relayout(of(1, 2))
    me.holdings.adopt(Shares.of({unit: [9 if unit == U[2] else 1] for unit in of(1, 2)}, False, [], None))
    me.holdings.settled()
    again = Announce(2, MEMBERS, 0, base=0, layout=THEN, attempt=Attempt(repaired=1))
    assert me.announce(again).holds.units == packed(of(1, 2)[1:])
