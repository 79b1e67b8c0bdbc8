"""The price per million tokens, the best shape, and the commands that print them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recycle_pp.simulate import main
from recycle_pp.simulation import report
from recycle_pp.simulation.availability import HOUR, Availability, Change
from recycle_pp.simulation.compare import compare
from recycle_pp.simulation.costs import Costs
from recycle_pp.simulation.job import Job
from recycle_pp.simulation.prices import Kind
from recycle_pp.simulation.shapes import best_shapes

PRICES = Path(__file__).parents[3] / "examples" / "prices.csv"
JOB = Job.of(pipelines=2, stages=2, microbatches=4, layers=8)
QUIET = Availability(4, 10 * HOUR, ())


def test_dollars_per_million_tokens_are_machine_hours_divided_by_work():
    found = compare(JOB, QUIET, Costs(), ["bound"])
    each_hour = 4 * 3600 / (3 * 2 * 0.1)  # four machines; F, I and W of two stages
    assert report.dollars(found, Kind("k", 2.0, 0.0))["bound"] == pytest.approx(1e6 * 4 * 2.0 / each_hour)


def test_absent_machines_cost_nothing():
    away = Availability(4, 10 * HOUR, (Change(0.0, 0, False),))
    full, less = (compare(JOB, there, Costs(), ["bound"]) for there in (QUIET, away))
    kind = Kind("k", 2.0, 0.0)
    assert report.dollars(less, kind)["bound"] == pytest.approx(report.dollars(full, kind)["bound"])


def test_the_json_has_a_price_for_every_kind(tmp_path, capsys):
    flags = f"--mtbf 5d --days 1 --pipelines 2 --stages 2 --microbatches 4 --policy bound --prices {PRICES}"
    assert main([*flags.split(), "--json", str(tmp_path / "out.json")]) == 0
    prices = json.loads((tmp_path / "out.json").read_text())["policies"]["bound"]["dollars_per_million"]
    assert list(prices) == ["reserved", "spot", "older"]
    assert prices["reserved"] / prices["spot"] == pytest.approx(2.1 / 0.9)


def test_a_faster_machine_does_the_same_work_in_less_time():
    usual, twice = (compare(job, QUIET, Costs(), ["rerouted"]).outcomes["rerouted"] for job in (JOB, JOB.faster(2)))
    assert twice.steps == pytest.approx(2 * usual.steps)


def test_the_best_shape_fits_and_beats_the_others():
    found = best_shapes(JOB, QUIET, Costs(), "rerouted", capacity=17e9)
    shapes = [(f.job.pipelines, f.job.stages, f.job.problem.counts[0]) for f in found]
    assert set(shapes) == {(2, 2, 4), (1, 3, 8), (1, 4, 8)}, "one stage of 32 GB does not fit"
    assert [f.rate for f in found] == sorted((f.rate for f in found), reverse=True)
    assert {f.job.total for f in found} == {8}, "the global batch is unchanged"


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--best --mtbf 1d", "--best needs --capacity"),
        ("--best --mtbf 1d --capacity 1GB", "--capacity: a single layer does not fit"),
        ("--fleet 1000", "--fleet needs --prices"),
        (f"--fleet 1e12 --prices {PRICES}", "--fleet: no fleet within the limits of --prices reaches the target"),
        (f"--fleet -5 --prices {PRICES}", "--fleet must be above 0"),
        ("--prices nowhere.csv", "nowhere.csv: No such file"),
        (f"--prices {PRICES} --json x.json", "--prices: --json and --out need --trace or --mtbf"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence_with_exit_code_2(flags, words, capsys):
    assert main([*["--pipelines", "2", "--stages", "2", "--microbatches", "4", "--layers", "8"], *flags.split()]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1
