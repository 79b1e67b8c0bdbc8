"""A worker whose state differs from that of its peers is found and named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recycle_schedules import Worker

from recycle_pp.coordinator.replicas import Replicas, difference
from recycle_pp.wire.messages.saving import Digests

A, B, C, OTHER = Worker(0, 0), Worker(1, 0), Worker(2, 0), Worker(0, 1)


@pytest.mark.parametrize(
    ("digests", "sentence"),
    [
        ({A: {"w": "1"}, B: {"w": "1"}}, None),
        ({A: {"w": "1"}, B: {"w": "2"}}, "workers 0.0 and 1.0 hold different weights (w)"),
        ({A: {"w": "1"}, B: {"w": "2"}, C: {"w": "1"}}, "worker 1.0 holds different weights than 0.0 and 2.0 (w)"),
        (
            {A: {"v": "1", "w": "1"}, B: {"v": "2", "w": "2"}},
            "workers 0.0 and 1.0 hold different weights (v and 1 more)",
        ),
        ({A: {"tied": "1"}, OTHER: {"tied": "2"}}, "workers 0.0 and 0.1 hold different weights (tied)"),
    ],
)
def test_a_difference_names_the_workers_and_the_tensors(digests, sentence):
    assert difference(digests) == sentence


@given(st.permutations([A, B, C]), st.sampled_from([A, B, C]))
def test_the_one_of_three_workers_that_differs_is_named_whatever_the_order_of_reports(order, wrong):
    replicas = Replicas(8, dict(enumerate([A, B, C, OTHER])))
    for number, worker in enumerate(order):
        replicas.add([A, B, C].index(worker), Digests(8, {"w": "wrong" if worker == wrong else "right"}))
        assert (replicas.verdict() is None) == (number < 2)
    assert replicas.verdict().startswith(f"worker {wrong} holds different weights than ")


def test_reports_of_dead_workers_count_and_reports_of_other_steps_do_not():
    replicas = Replicas(8, {3: A, 5: B})
    replicas.add(3, Digests(8, {"w": "1"}))
    replicas.add(5, Digests(4, {"w": "2"}))
    replicas.died(3)
    assert replicas.verdict() is None and replicas.silent == {5}
    replicas.add(5, Digests(8, {"w": "2"}))
    assert replicas.verdict() == "workers 0.0 and 1.0 hold different weights (w) after 8 steps"
