"""Availability of machines, from files and at random."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recycle_pp.simulation.availability import HOUR, Availability, Change, draw, read


def written(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def up_over_time(there: Availability) -> list[tuple[float, set[int]]]:
    up = set(range(there.machines)) - there.absent
    out = [(0.0, set(up))]
    for change in there.changes:
        assert (change.machine in up) != change.up, "every change has an effect"
        (up.add if change.up else up.discard)(change.machine)
        out.append((change.at, set(up)))
    return out


def test_a_file_of_counts_gives_the_number_of_machines_at_each_time(tmp_path):
    there = read(written(tmp_path, "hour,gpus_alive\n0.0,4\n0.5,2\n1.0,3\n2.0,3\n"), seed=3)
    assert (there.machines, there.seconds, there.losses) == (4, 2 * HOUR, 2)
    assert list(there.counts()) == [(0, 1800, 4), (1800, 3600, 2), (3600, 7200, 3)]
    assert there.mean == pytest.approx((4 * 0.5 + 2 * 0.5 + 3) / 2)


def test_a_file_of_counts_may_start_with_missing_machines_and_after_time_zero(tmp_path):
    there = read(written(tmp_path, "minutes,alive\n10,2\n20,4\n30,4\n"), machines=6)
    assert len(there.absent) == 4 and there.seconds == 1200
    assert [change.at for change in there.changes] == [600, 600]


def test_a_file_of_machines_gives_the_changes_of_each_machine(tmp_path):
    there = read(written(tmp_path, "second,machine,up\n0,a,1\n0,b,0\n5,a,down\n7,b,up\n9,b,1\n10,c,0\n"))
    assert (there.machines, there.absent) == (3, {1})
    assert there.changes == (Change(5, 0, False), Change(7, 1, True), Change(10, 2, False))


def test_a_machine_that_first_goes_up_after_the_start_is_absent_until_then(tmp_path):
    there = read(written(tmp_path, "hour,machine,up\n0,a,1\n5,b,1\n10,a,1\n"))
    assert (there.absent, there.changes) == ({1}, (Change(5 * HOUR, 1, True),))
    assert there.mean == 1.5


@pytest.mark.parametrize(
    "text", ["", "day,count\n0,1\n1,2\n", "hour,count\n0,1\n", "hour,count\n1,2\n0,2\n", "hour,count\n0,a\n1,2\n",
             "hour,machine,up\n0,a,perhaps\n1,a,1\n", "hour,count\n0,4\n1,1e999\n", "hour,count\n0,4\n1e999,4\n",
             "hour,count\n0,4\nnan,4\n", "hour,count\n1e999,4\n1e999,4\n"],
)  # fmt: skip
def test_a_file_of_another_format_is_reported_in_one_sentence(tmp_path, text):
    with pytest.raises(ValueError, match=r"^--trace .*hour"):
        read(written(tmp_path, text))


@given(st.integers(0, 99), st.sampled_from([0.7, 1.0, 2.0]), st.booleans())
def test_random_losses_and_returns_of_a_machine_alternate(seed, shape, in_groups):
    there = draw(machines=8, seconds=50 * HOUR, mtbf=4 * HOUR, repair=HOUR, seed=seed, shape=shape,
                 groups=[(4, 10 * HOUR)] if in_groups else [])  # fmt: skip
    up_over_time(there)
    assert list(there.changes) == sorted(there.changes) and there.changes[-1].at < there.seconds


def test_the_share_of_live_machines_follows_from_failure_and_repair_times():
    there = draw(machines=40, seconds=2000 * HOUR, mtbf=3 * HOUR, repair=HOUR, seed=5)
    assert there.mean / 40 == pytest.approx(0.75, abs=0.01)
    weibull = draw(machines=40, seconds=2000 * HOUR, mtbf=3 * HOUR, repair=HOUR, seed=5, shape=0.7)
    assert weibull.mean / 40 == pytest.approx(0.75, abs=0.02)


def test_a_group_is_lost_together():
    there = draw(machines=8, seconds=1000 * HOUR, mtbf=1e9 * HOUR, repair=HOUR, seed=1, groups=[(4, 100 * HOUR)])
    assert there.losses >= 40
    lost = {}
    for change in there.changes:
        lost.setdefault((change.at, change.up), set()).add(change.machine)
    assert set(map(frozenset, lost.values())) == {frozenset(range(4)), frozenset(range(4, 8))}


def test_the_same_seed_gives_the_same_availability():
    one, same, other = (draw(machines=5, seconds=100 * HOUR, mtbf=HOUR, repair=HOUR, seed=s) for s in (1, 1, 2))
    assert one == same != other
