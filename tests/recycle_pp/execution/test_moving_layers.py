"""Layers move between stages while a job trains. All parts are real, except that workers are threads (`cluster`)."""

import pytest

from recycle_pp.protocol.events import MoveWanted
from tests.recycle_pp.execution.cluster import Cluster
from tests.recycle_pp.in_process import small

THERE = {0: [-1, 0], 1: [1, 2, 3, 4]}  # layer 1 moves from stage 0 to stage 1
BACK = {0: [-1, 0, 1, 2], 1: [3, 4]}  # layers 1 and 2 move from stage 1 to stage 0


def trained(moves, back=None, **changes):
    """Runs a job of 2 x 2 workers and ten steps.

    moves  step -> layout that is requested after its commit
    back   first step in which member 3 takes part; None: it takes part from the start
    """
    config = small(
        model__layers=4, parallel__pipelines=2, parallel__microbatches=2, run__steps=10, numerics__reproducible=True,
        **changes,
    )  # fmt: skip
    with Cluster(config) as cluster:
        for step, layout in moves.items():
            cluster.at(step, lambda job, layout=layout: [MoveWanted(layout, job.problem)])
        if back is not None:
            cluster.returns(3, at=0, earliest=back)
        cluster.run()
    assert [note["how"] for note in cluster.notes if note["event"] == "move_ended"] == ["switched"] * len(moves)
    return cluster


def same(moving, still):
    """Whether all workers of both jobs have the same weights at the end."""
    weights = still.weights[0] | still.weights[1]
    return all(moving.weights[d] | moving.weights[d + 1] == weights for d in (0, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel__sharded": True, "numerics__precision": "bf16"},
        {"optimizer__stagger": True, "model__tied": True},
        {"optimizer__name": "muon", "parallel__sharded": True},
    ],
    ids=str,
)
def test_a_job_whose_layers_move_there_and_back_has_the_weights_of_a_job_without_moves(changes):
    tied = "model__tied" in changes
    there, back = ({s: [k for k in layers if k >= 0] + [5] if tied else layers for s, layers in of.items()}
                   for of in (THERE, BACK))  # fmt: skip
    moving = trained({1: there, 5: back}, **changes)
    assert {m: [*node.stage.layout.layers] for m, node in moving.nodes.items()} == {m: back[m % 2] for m in range(4)}
    assert same(moving, trained({}, **changes))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_worker_that_returns_after_layers_have_moved_adopts_the_new_layout(sharded):
    moving = trained({0: BACK}, back=8, parallel__sharded=sharded)
    assert [*moving.nodes[3].stage.layout.layers] == BACK[1]
    assert same(moving, trained({}, parallel__sharded=sharded))
