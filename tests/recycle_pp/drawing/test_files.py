"""The content of figures, Chrome traces and files in torch's notation."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex
from recycle_schedules import KINDS, Worker, plan

from recycle_pp.drawing import figure, palette, perfetto, torch_csv
from recycle_pp.drawing.chart import REROUTED, Chart

from .examples import DEAD, one_f_one_b, recovered, shape

SVG = "{http://www.w3.org/2000/svg}"


def groups(path: Path) -> dict[str, ET.Element]:
    return {g.get("id", ""): g for g in ET.parse(path).getroot().iter(f"{SVG}g")}


def boxes(group: ET.Element) -> int:
    """The drawn ops of a group: its paths, except definitions of clips and hatches."""
    return sum(1 for e in group.iter() if e.tag in (f"{SVG}path", f"{SVG}use")) - sum(
        1 for d in group.iter(f"{SVG}defs") for e in d.iter() if e.tag == f"{SVG}path"
    )


def test_the_worked_example_has_a_numbered_box_for_every_op(tmp_path: Path) -> None:
    fault_free, adapted = Chart.of(one_f_one_b(shape()), "Fault-free"), Chart.of(plan(shape((DEAD,))), "Adapted")
    figure.save([fault_free, adapted], tmp_path / "x.svg")
    found = groups(tmp_path / "x.svg")
    for number, chart in enumerate((fault_free, adapted)):
        for k in np.unique(chart.kind):
            for name, bit in (("", 0), ("-rerouted", REROUTED)):
                ops = int(((chart.kind == k) & ((chart.marks & REROUTED) == bit)).sum())
                group = found.get(f"{number}-{KINDS[k]}{name}")
                assert (0 if group is None else boxes(group)) == ops
    assert "1-dead-1.2" in found and "0-dead-1.2" not in found
    words = [e.text for e in ET.parse(tmp_path / "x.svg").getroot().iter(f"{SVG}text")]
    assert {"Fault-free", "Adapted", "W(1,2) dead", "re-routed", "forward", "2.3"} <= set(words)
    assert all(words.count(str(g)) >= 2 * 3 * 3 for g in range(18))  # F, I, W on at least 3 stages, twice


def test_a_recovered_step_shows_the_death_the_stall_and_the_fate_of_the_ops(tmp_path: Path) -> None:
    figure.save([Chart.of(recovered(), "step 20")], tmp_path / "x.svg")
    found = groups(tmp_path / "x.svg")
    assert {"0-death", "0-stall", "0-dead-1.2", "0-W-cut", "0-F-lost", "0-F-redone", "0-F-rerouted"} <= set(found)
    text = " ".join(e.text or "" for e in ET.parse(tmp_path / "x.svg").getroot().iter(f"{SVG}text"))
    assert "detected +2.1, announced +3.4" in text and "stall 40 ms" in text


def test_the_same_chart_gives_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        figure.save([Chart.of(recovered())], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF-")])
def test_png_and_pdf_files_have_their_formats(tmp_path: Path, ending: str, magic: bytes) -> None:
    path = tmp_path / f"x.{ending}"
    figure.save([Chart.of(recovered())], path)
    assert path.read_bytes().startswith(magic)


def test_a_figure_of_a_large_job_shows_the_effects_of_a_death_and_notes_folded_rows(tmp_path: Path) -> None:
    notes = figure.save([Chart.of(one_f_one_b(shape((Worker(9, 3),), (256, 4, 4))))], tmp_path / "x.png")
    assert notes == [
        "the stages with deaths come first (3): 2 of 256 workers (the dead and the peers that run most of their work)",
        "of the other stages (0-2), pipeline 9 is drawn and 765 workers are folded",
    ]


def test_in_jobs_of_8x8x64_or_more_re_routed_ops_have_a_dark_foot(tmp_path: Path) -> None:
    figure.save([Chart.of(one_f_one_b(shape((Worker(1, 2),), (8, 8, 64))))], tmp_path / "x.svg")
    drawn = (tmp_path / "x.svg").read_text()
    assert 'id="0-F-rerouted-foot"' in drawn and 'id="0-W-rerouted-foot"' in drawn


def test_the_legend_shows_re_routed_ops_as_they_are_drawn() -> None:
    for jobs, colour in ((8, 8, 64), palette.INK), ((3, 4, 6), palette.PAPER):
        drawing, _ = figure.draw([Chart.of(one_f_one_b(shape((Worker(1, 2),), jobs)))])
        (mark,) = (p for p in drawing.legends[0].get_patches() if p.get_label() == "re-routed")
        assert to_hex(mark.get_facecolor()) == to_hex(colour)


def test_side_by_side_is_wide_and_one_above_the_other_is_high() -> None:
    charts = [Chart.of(one_f_one_b(shape())), Chart.of(recovered())]
    beside, stacked = (figure.draw(charts, beside=b)[0].get_size_inches() for b in (True, False))
    assert beside[0] > stacked[0] and beside[1] < stacked[1]


def loaded(path: Path) -> list[dict]:  # type: ignore[type-arg]
    return json.loads(path.read_text())["traceEvents"]


def test_the_chrome_trace_has_a_slice_per_op_and_a_flow_per_tensor(tmp_path: Path) -> None:
    chart = Chart.of(plan(shape((DEAD,)).replace(send=0.5)))
    perfetto.save([chart], tmp_path / "x.json")
    events = loaded(tmp_path / "x.json")
    by_phase = Counter(e["ph"] for e in events)
    assert by_phase["X"] == len(chart) and by_phase["s"] == by_phase["f"] == 2 * 18 * 3
    slices = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            slices[e["pid"], e["tid"]].append(e)
    ends: dict[int, dict[str, str]] = defaultdict(dict)
    for e in (e for e in events if e["ph"] in "sf"):
        around = [x for x in slices[e["pid"], e["tid"]] if x["ts"] <= e["ts"] <= x["ts"] + x["dur"]]
        assert len(around) == 1
        ends[e["id"]][e["ph"]] = around[0]["name"]
    assert {"s": "1F6", "f": "2F6"} in ends.values() and {"s": "2I6", "f": "1I6"} in ends.values()
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert "W(1,2) (dead)" in threads and len(threads) == 12


def test_the_chrome_trace_of_a_recovered_step_has_the_death_and_the_phases(tmp_path: Path) -> None:
    perfetto.save([Chart.of(recovered())], tmp_path / "x.json")
    events = loaded(tmp_path / "x.json")
    death = next(e for e in events if e["ph"] == "i")
    assert death["name"] == "W(1,2) dies" and death["ts"] == 213_000
    phases = [(e["name"], round(e["dur"])) for e in events if e.get("cat") == "recovery"]
    assert phases[0] == ("detected", 2100) and phases[-1][0] == "resumed" and sum(d for _, d in phases) == 40_000


def test_two_charts_in_one_chrome_trace_share_no_process_and_no_flow(tmp_path: Path) -> None:
    perfetto.save([Chart.of(one_f_one_b(shape()), "a"), Chart.of(recovered(), "b")], tmp_path / "x.json")
    events = loaded(tmp_path / "x.json")
    processes = Counter(e["pid"] for e in events if e["name"] == "process_name")
    assert len(processes) == 7 and set(processes.values()) == {1}  # 3 + 3 pipelines and the recovery
    flows = Counter((e["ph"], e["id"]) for e in events if e["ph"] in "sf")
    assert set(flows.values()) == {1}


def test_torch_reads_a_file_in_its_notation(tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import _Action

    chart = Chart.of(one_f_one_b(shape((), (1, 4, 6))))
    torch_csv.save(chart, tmp_path / "x.csv")
    rows = [line.split(",") for line in (tmp_path / "x.csv").read_text().splitlines()]
    actions = [[_Action.from_str(text) for text in row] for row in rows]
    assert [len(row) for row in actions] == [18] * 4
    assert [str(a) for a in actions[3][:4]] == ["3F0", "3I0", "3W0", "3F1"]
    assert {a.microbatch_index for row in actions for a in row if a} == set(range(6))


def test_a_dead_workers_line_is_empty_and_its_peers_have_its_ops() -> None:
    lines = torch_csv.lines(Chart.of(plan(shape((DEAD,)))))
    assert lines[6] == [] and len(lines) == 12
    assert {"2F6", "2F11"} <= set(lines[2]) | set(lines[10])
    assert not any("O" in op for line in lines for op in line)
