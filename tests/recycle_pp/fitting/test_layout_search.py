"""The best layout for the live workers."""

import pytest
from recycle_schedules import Worker, plan

from recycle_pp.fitting.layout_search import search
from recycle_pp.fitting.model_layers import ModelLayers
from recycle_pp.fitting.problem import initial_problem
from recycle_pp.model.memory import PROCESS, stage_memory
from recycle_pp.protocol.live_problem import all_workers

from ..in_process import small

JOB = {
    "model__layers": 32, "emulate__mode": "sleep", "emulate__O": 0.0, "parallel__pipelines": 3, "parallel__stages": 4,
    "parallel__microbatches": 6, "schedule__memory_extra": None, "optimizer__stagger": True,
}  # fmt: skip
EVEN = (8, 8, 8, 8)


def found(settings, *dead, current=None, keep=None):
    layers = ModelLayers(settings)
    layout = current or layers.start
    whole = initial_problem(layers.settings(layout))
    return search(whole, all_workers(whole) - set(dead), layers, layout, keep)


def test_the_worked_example():
    """W(1,2) is dead. A step needs 27 slots of 20 ms with re-routing, and 21 with moved layers (docs/planner.md)."""
    best = found(small(**JOB), Worker(1, 2))
    assert best.now == pytest.approx(0.54) and best.then <= 0.44
    assert sum(best.layout) == 32 and best.layout[2] < 8
    assert plan(best.live).value == best.then and best.live.dead == {Worker(1, 2)}
    assert not best.whole.dead and best.whole.per_stage("F") == best.live.per_stage("F")


def test_a_second_search_finds_no_better_layout_until_a_worker_returns():
    start = small(**JOB)
    there = found(start, Worker(1, 2))
    assert found(start, Worker(1, 2), current=there.layout) is None
    back = found(start, current=there.layout)
    assert back.then < back.now and found(start, current=back.layout) is None


def test_an_explicit_split_stays_while_no_worker_is_dead():
    settings, split = small(**JOB, model__split=[9, 9, 5, 9]), (9, 9, 5, 9)
    assert found(settings, keep=split) is None
    assert found(settings, Worker(1, 0), keep=split).layout != split
    assert found(settings, current=EVEN, keep=split).layout == split, "the explicit split is restored"


def test_the_bytes_of_a_move_are_the_sum_over_its_receivers():
    settings = small(**JOB)
    layers, best = ModelLayers(settings), found(settings, Worker(1, 2))
    gained = layers.gained(EVEN, best.layout)
    live = (3, 3, 2, 3)
    assert best.bytes == sum(n * layers.state_bytes(of, n) for n, of in zip(live, gained, strict=True))
    assert 0 < best.most <= best.bytes


MEMORY = {"model__layers": 8, "parallel__pipelines": 3, "parallel__microbatches": 6, "run__device": "cpu"}


def with_memory(more, **changes):
    """Two stages of four layers. A worker of stage 0 has `more` bytes beyond its peak without deaths."""
    peak = sum(stage_memory(small(**MEMORY), 0).peak(3, 6, 4).values())
    return small(**MEMORY, **changes, parallel__memory=f"{PROCESS + peak + more}")


def test_the_new_layout_has_the_memory_limits_of_a_job_that_starts_with_it():
    best = found(with_memory(1e9), Worker(1, 1))
    assert best.layout[0] > 4, "stage 1 has lost a worker"
    assert best.whole.memory == initial_problem(with_memory(1e9, model__split=list(best.layout))).memory


@pytest.mark.parametrize(("share", "moves"), [(0.5, False), (1.5, True)])
def test_a_layout_without_room_for_one_micro_batch_is_not_chosen(share, moves):
    """Stage 1 has one micro-batch in flight. It has room for a new layer with `share` of the layer's activations."""
    wide = MEMORY | {"model__sequence": 256, "parallel__microbatch_size": 4, "schedule__memory_extra": 0}
    one = stage_memory(ModelLayers(small(**wide)).settings((1,) * 8), 3)
    held = sum(stage_memory(small(**wide), 1).peak(3, 6, 1).values()) + sum(one.always(3, 0).values())
    job = small(**wide, parallel__memory=f"{PROCESS + held + share * one.each()}")
    assert (found(job, Worker(1, 0)) is not None) == moves


def test_layers_do_not_move_to_workers_without_free_memory_for_them():
    one = ModelLayers(small(**MEMORY)).settings((1,) * 8)
    arriving = sum(stage_memory(one, 4).always(3, 0).values())
    assert found(with_memory(0.5 * arriving), Worker(1, 1)) is None
    assert found(with_memory(6 * arriving), Worker(1, 1)).layout[0] > 4
