"""Prices, and the cheapest fleet compared with an exhaustive search."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.simulation.fleet import cheapest, of
from recycle_pp.simulation.prices import Kind, read_prices

pytest.importorskip("scipy")

WORKED = [
    Kind("reserved", 2.1, 0.0, limit=8),
    Kind("spot", 0.9, 0.05, limit=30),
    Kind("older", 0.35, 0.2, speed=0.4, limit=40),
]
"""The kinds of machines in the example of docs/simulate.md."""


def tried(kinds, target, repair, lost, least=0.0):
    """The lowest cost of all fleets within the limits, by trying them all. None if none reaches the target."""
    fleets = (of(kinds, counts, repair=repair, lost=lost)
              for counts in itertools.product(*(range(kind.limit + 1) for kind in kinds)))  # fmt: skip
    fine = [f.dollars_an_hour for f in fleets if f.speed >= target - 1e-9 and f.machines >= least - 1e-9]
    return min(fine, default=None)


@pytest.mark.parametrize("target", [5.0, 20.0, 40.0])
def test_the_worked_example_is_the_cheapest_of_all_fleets(target):
    fleet = cheapest(WORKED, target, repair=1200, lost=20.0)
    assert fleet.dollars_an_hour == pytest.approx(tried(WORKED, target, 1200, 20.0))
    assert fleet.speed >= target - 1e-6


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_fleet_within_the_limits_is_cheaper(data):
    kinds = [
        Kind(f"k{k}", data.draw(st.integers(1, 40)) / 10, data.draw(st.sampled_from([0.0, 0.02, 0.3, 2.0])),
             data.draw(st.sampled_from([0.3, 1.0, 2.5])), data.draw(st.integers(0, 6)))
        for k in range(data.draw(st.integers(1, 3)))
    ]  # fmt: skip
    target, lost = data.draw(st.sampled_from([0.5, 3.0, 9.0])), data.draw(st.sampled_from([0.0, 30.0, 400.0]))
    least = data.draw(st.sampled_from([0.0, 4.0]))
    best = tried(kinds, target, 1200, lost, least)
    if best is None:
        with pytest.raises(ValueError, match="no fleet within the limits of --prices reaches the target"):
            cheapest(kinds, target, repair=1200, lost=lost, least=least)
    else:
        assert cheapest(kinds, target, repair=1200, lost=lost, least=least).dollars_an_hour == pytest.approx(best)


def test_machines_that_are_interrupted_too_often_are_not_worth_their_price():
    kinds = [Kind("calm", 1.0, 0.01), Kind("wild", 0.5, 30.0)]
    assert cheapest(kinds, 10.0, repair=600, lost=60.0).counts[1] == 0
    assert cheapest(kinds, 10.0, repair=1e-6, lost=0.0).counts[0] == 0, (
        "without the cost of interruptions they are worth it"
    )


def test_a_file_of_prices_is_read(tmp_path):
    path = tmp_path / "prices.csv"
    path.write_text("kind, price, interruptions_per_hour, limit\nspot, 0.9, 0.05, 30\nreserved, 2.1, 0,\n")
    spot, reserved = read_prices(path)
    assert spot == Kind("spot", 0.9, 0.05, 1.0, 30) and reserved.limit is None
    assert spot.mtbf == 72000 and spot.up(repair=1200) == pytest.approx(60 / 61)


@pytest.mark.parametrize("text", ["", "kind,price\na,1\n", "kind,price,interruptions_per_hour\na,b,c\n",
                                  "kind,price,interruptions_per_hour\na,1,0\na,2,0\n",
                                  "kind,price,interruptions_per_hour,colour\na,1,0,red\n",
                                  "kind,price,interruptions_per_hour\na,-1,0\n"])  # fmt: skip
def test_an_invalid_file_of_prices_is_reported_in_one_sentence(tmp_path, text):
    path = tmp_path / "prices.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^--prices .*interruptions_per_hour"):
        read_prices(path)
