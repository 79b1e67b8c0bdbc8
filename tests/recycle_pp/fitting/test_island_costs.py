"""Bytes, seconds and dollars of a round of islands."""

import json

import pytest

from recycle_pp.fitting.island_costs import costs
from recycle_pp.islands.codec import encoded_bytes
from recycle_pp.model.stage import Stage
from recycle_pp.plan import main
from tests.recycle_pp.in_process import CPU, small


@pytest.mark.parametrize("bits", [8, 32])
def test_the_bytes_are_those_of_a_real_model(bits):
    settings = small(parallel__stages=1, islands__bits=bits, parallel__pipelines=2)
    layout = Stage(settings, 0, CPU).layout
    found = costs(settings, islands=3, link=1.0, share=0.05, step_seconds=None)
    assert found.sent == pytest.approx(sum(encoded_bytes(size, bits) for size in layout.unit_sizes), rel=0.2)
    assert found.received == 6 * found.sent and found.steps is None


@pytest.mark.parametrize("fragments", [1, 3])
def test_more_steps_keep_the_link_below_the_share(fragments):
    settings = small(islands__egress_per_gb=0.09, islands__fragments=fragments)
    found = costs(settings, islands=2, link=0.001, share=0.1, step_seconds=2.0)
    every = found.steps / fragments
    assert every.is_integer() and found.seconds / (every * 2.0) <= 0.1 < found.seconds / ((every - 1) * 2.0)
    assert found.dollars == pytest.approx(found.sent * 0.09 / 1e9)


def test_the_command_prints_json_and_refuses_impossible_values(capsys):
    assert main(["model=llama1b", "parallel=2x4", "--islands", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] > 1e9
    assert main(["model=llama1b", "--islands", "0"]) == 2
    assert "--islands must be above 0" in capsys.readouterr().err
