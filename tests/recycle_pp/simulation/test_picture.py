"""The content of the picture and the page, read from the structure of the svg."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from recycle_pp.simulate import main
from recycle_pp.simulation import page, picture
from recycle_pp.simulation.availability import HOUR, Availability, Change
from recycle_pp.simulation.compare import compare
from recycle_pp.simulation.costs import Costs
from recycle_pp.simulation.job import Job
from recycle_pp.simulation.policies import NAMES

THERE = Availability(4, 4 * HOUR, (Change(HOUR, 1, False), Change(2 * HOUR, 1, True), Change(3 * HOUR, 2, False)))


@pytest.fixture(scope="module")
def found():
    return compare(Job.of(pipelines=2, stages=2, microbatches=4, layers=4), THERE, Costs(), NAMES, plans=2)


def test_the_picture_has_a_curve_for_every_policy_the_machines_and_the_causes(found):
    root = ET.fromstring(picture.svg(found))
    ids = {element.get("id") for element in root.iter()}
    assert {f"speed-{name}" for name in NAMES} | {"machines"} <= ids
    words = " ".join("".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text"))
    assert "hours" in words and "recovering" in words
    for name in NAMES:
        assert f"{name} {found.outcomes[name].relative:.2f}" in words


def test_the_mean_of_each_curve_agrees_with_the_table(found):
    for outcome in found.outcomes.values():
        edges, values = picture.averaged(outcome)
        lost = outcome.redone * found.times.reference / outcome.seconds  # work done and discarded later
        assert np.average(values, weights=np.diff(edges)) == pytest.approx(outcome.relative + lost)


def test_labels_do_not_cover_each_other(found):
    axes = picture.draw(found).axes[0]
    places = sorted(text.xy[1] for text in axes.texts)
    assert min(np.diff(places)) > 0.05 * axes.get_ylim()[1]


def test_the_page_is_self_contained_and_has_the_table(found):
    text = page.render(found)
    assert not re.search(r"(src|href)=\"(?!#)", text.replace('xlink:href="#', "")), "no external resources"
    assert "<script" not in text and text.count("<svg") == 1
    assert all(f"<td>{name}</td><td>{found.outcomes[name].relative:.3f}</td>" in text for name in NAMES)
    assert "assumed: a worker&#x27;s state" in text


@pytest.mark.parametrize("ending", ["html", "svg", "png", "pdf"])
def test_the_suffix_selects_the_format(tmp_path, ending):
    path = tmp_path / f"report.{ending}"
    flags = "--mtbf 5d --days 2 --pipelines 2 --stages 2 --microbatches 4 --policy torchft,bound --out"
    assert main([*flags.split(), str(path)]) == 0
    assert path.read_bytes()[:4] in (b"<!do", b"<?xm", b"\x89PNG", b"%PDF")


def test_another_suffix_is_rejected(capsys):
    flags = "--mtbf 5d --pipelines 2 --stages 2 --microbatches 4 --out report.doc"
    assert main(flags.split()) == 2
    assert "--out report.doc: the name must end in .html, .svg, .png or .pdf" in capsys.readouterr().err
