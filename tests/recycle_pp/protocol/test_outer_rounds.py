"""When an island cuts its delta and applies a round."""

from recycle_pp.protocol.outer_rounds import OuterRounds
from recycle_pp.wire.messages.islands import OuterState
from recycle_pp.wire.messages.units import UnitId

LIVE = {0, 1}


def run(rounds, steps, first=0, ready=None):
    """Commits these steps. ready: step -> number of applied rounds that all workers have computed before it. Returns
    (steps after which a delta was cut, step -> applied rounds)."""
    cuts, applied = [], {}
    for step in range(first, first + steps):
        for member in LIVE if ready and step in ready else ():
            rounds.ready(member, ready[step], {})
        assert not rounds.waits(LIVE, step), step
        order = rounds.commit(LIVE, step)
        if order.apply is not None:
            applied[step] = order.apply
        if order.cut:
            cuts.append(step + 1)
    return cuts, applied


def test_rounds_follow_each_other_every_h_steps():
    rounds = OuterRounds(steps=10, delay=1, max_local=20)
    assert run(rounds, 32, ready={10: 1, 20: 2, 30: 3}) == ([10, 20, 30], {10: 1, 20: 2, 30: 3})


def test_a_round_that_is_ready_early_is_applied_after_the_delay():
    rounds = OuterRounds(steps=10, delay=4, max_local=20)
    assert run(rounds, 24, ready={10: 1}) == ([10, 20], {13: 1})


def test_after_a_late_round_the_island_makes_h_steps_again():
    rounds = OuterRounds(steps=10, delay=1, max_local=20)
    assert run(rounds, 28, ready={17: 1}) == ([10, 27], {17: 1})


def test_with_h_1_every_commit_applies_a_round_and_cuts_the_next_delta():
    rounds = OuterRounds(steps=1, delay=1, max_local=1)
    assert run(rounds, 4, ready={1: 1, 2: 2, 3: 3}) == ([1, 2, 3, 4], {1: 1, 2: 2, 3: 3})


def test_the_island_waits_after_max_local_steps_until_all_workers_have_theta():
    rounds = OuterRounds(steps=10, delay=1, max_local=15)
    run(rounds, 15)
    assert rounds.waits(LIVE, 15)
    rounds.ready(0, 1, {})
    assert rounds.waits(LIVE, 15)
    rounds.ready(1, 1, {})
    assert not rounds.waits(LIVE, 15) and rounds.commit(LIVE, 15).apply == 1


def test_a_round_is_applied_only_if_all_workers_have_computed_the_same_one():
    rounds = OuterRounds(steps=10, delay=1, max_local=20)
    run(rounds, 10)
    rounds.ready(0, 3, {})
    rounds.ready(1, 1, {})
    assert rounds.behind(LIVE, 1) == {1: 3} == rounds.behind(LIVE, 0)
    assert rounds.commit(LIVE, 10).apply is None
    rounds.ready(1, 3, {})
    assert rounds.behind(LIVE, 1) == {} == rounds.behind(LIVE, 0)
    assert rounds.commit(LIVE, 11).apply == 3


def test_a_new_generation_waits_for_the_reports_of_its_workers():
    rounds = OuterRounds(steps=10, delay=1, max_local=20)
    run(rounds, 10)
    for member in LIVE:
        rounds.ready(member, 1, {})
    rounds.regrouped()
    assert rounds.commit(LIVE, 10).apply is None
    rounds.ready(0, 1, {})
    assert rounds.commit({0}, 11).apply == 1


def test_a_lost_delta_is_cut_again():
    rounds = OuterRounds(steps=10, delay=1, max_local=12)
    run(rounds, 12)
    first, second = UnitId(0, 0), UnitId(0, 1)
    rounds.lacks(0, 9, [(first, [0])])  # about an earlier delta, so it is ignored
    rounds.lacks(0, 10, [(first, [0, 1])])  # worker 1 still has the delta
    rounds.lacks(1, 10, [(second, [0, 1])])  # but not that of another unit, which worker 0 has
    assert rounds.waits(LIVE, 12)
    rounds.lacks(1, 10, [(first, [0, 1])])
    assert not rounds.waits(LIVE, 12)
    order = rounds.commit(LIVE, 12)
    assert order.cut and order.state.sent == 13


def test_a_restarted_island_cuts_at_the_same_steps_and_applies_its_rounds_only_then():
    rounds = OuterRounds(steps=10, delay=1, max_local=20)
    rounds.begin(OuterState(applied=2, begun=20, sent=None, mine={2: 34, 3: 44}))
    cuts, applied = run(rounds, 22, first=25, ready={25: 3, 40: 4})
    assert cuts == [34, 44] and applied == {34: 3, 44: 4}


def test_an_island_repeats_the_steps_of_a_delta_that_an_earlier_start_completes_later():
    rounds = OuterRounds(steps=10, delay=1, max_local=20)
    rounds.begin(OuterState(applied=2, begun=20))
    for member in LIVE:
        rounds.ready(member, 3, {1: 20, 2: 34})
    assert rounds.state.mine == {2: 34}
    assert run(rounds, 10, first=25) == ([34], {34: 3}) and not rounds.state.mine


def test_the_last_step_of_a_job_cuts_no_delta():
    rounds = OuterRounds(steps=10, delay=1, max_local=20)
    run(rounds, 9)
    assert not rounds.commit(LIVE, 9, last=True).cut
