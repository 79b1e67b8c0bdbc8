"""The Gantt chart in the terminal, as a user sees it."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recycle_schedules import KINDS, Problem, Trace, Worker, plan
from rich.console import Console

from recycle_pp.drawing import terminal
from recycle_pp.drawing.chart import Chart

from .examples import DEAD, one_f_one_b, recovered, shape


def drawn(*charts: Chart, width: int = 100, colour: bool = False, **options: object) -> str:
    console = Console(width=width, force_terminal=colour, color_system="truecolor" if colour else None, highlight=False)
    with console.capture() as got:
        terminal.show(charts, console, **options)  # type: ignore[arg-type]
    return got.get()


def row(text: str, worker: str) -> str:
    return next(line[6:].rstrip() for line in text.splitlines() if line.startswith(f"{worker} "))


def test_a_row_shows_the_workers_ops_in_order_with_their_lengths() -> None:
    text = drawn(Chart.of(one_f_one_b(shape())), width=6 + 27 * 3)
    assert row(text, "1.3") == "·" * 9 + "F6-I6-W6-F7-I7-W7-F8-I8-W8-F9-I9-W9-F10I10W10F11I11W11" + "·" * 18
    assert row(text, "0.0").startswith("F0-F1-F2-F3-······")


def test_rerouted_ops_are_small_letters_and_the_dead_are_hatched() -> None:
    text = drawn(Chart.of(plan(shape((DEAD,)))), width=120)
    assert re.search(r"╱+ dead ╱+", row(text, "1.2"))
    small = re.findall(r"[fiwb](\d+)", row(text, "0.2") + row(text, "2.2"))
    assert {int(g) for g in small} == set(range(6, 12))
    assert not re.search(r"[fiwb]", row(text, "0.1") + row(text, "1.3"))
    assert "small letter: re-routed" in text and "╱: dead" in text


def test_a_recovered_step_shows_and_describes_cut_lost_and_redone_ops_and_the_stall() -> None:
    text = drawn(Chart.of(recovered()), width=140)
    assert re.search(r"[FIW]\d*~+.*(!|W!).*╱ dead ╱", row(text, "1.2"))
    assert "::::" in row(text, "0.0") and re.search(r"f6\++", row(text, "0.2"))
    words = " ".join(text.split())
    assert "W(1,2) died at 213 ms; the stall was 40 ms: detected +2.1, announced +3.4" in words
    assert "cut off: 1.2 (2W7)" in words and "redone: 6 ops, by 0.2 (2F6" in words


def test_colour_never_changes_the_text() -> None:
    coloured = drawn(Chart.of(one_f_one_b(shape())), colour=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert re.findall(r"[FIW]\d+", row(plain, "2.1")) == re.findall(
        r"[FIW]\d+", row(drawn(Chart.of(one_f_one_b(shape()))), "2.1")
    )


def test_a_plan_wider_than_the_terminal_is_folded_with_a_note() -> None:
    text = drawn(Chart.of(one_f_one_b(shape())), width=20)
    assert "folded into 2 parts of 14 slots" in " ".join(text.split())
    assert len([line for line in text.splitlines() if line.startswith("1.2 ")]) == 2


def test_a_plan_that_is_much_wider_shows_the_load_of_each_worker() -> None:
    text = drawn(Chart.of(one_f_one_b(shape((Worker(0, 1),), (3, 4, 128)))), width=60)
    assert "one column is" in text and "█" in row(text, "2.0")
    assert row(text, "1.1").endswith("r") and row(text, "1.2").endswith("···")


def test_a_window_shows_its_part_with_a_note() -> None:
    text = drawn(Chart.of(one_f_one_b(shape())), window=(3, 9))
    assert row(text, "0.3").startswith("F0--I0--W0--F1--") and "shows 3 to 9 of 27 slots" in text


def test_rows_that_do_not_fit_are_omitted_and_named() -> None:
    chart = Chart.of(one_f_one_b(shape((Worker(7, 3),), (64, 4, 8))))
    text = drawn(chart, most_rows=12)
    assert "the stages with deaths come first (3): 2 of 64 workers" in text
    assert "of the other stages (0-2), pipeline 7 is drawn and 189 workers are folded" in text
    assert "7.3 " in text and "8.3 " in text and "5.0 " not in text
    assert "63.3  " in drawn(chart, most_rows=1000)


def test_a_comparison_uses_one_scale_and_prints_the_difference() -> None:
    first, second = Chart.of(one_f_one_b(shape()), "whole"), Chart.of(one_f_one_b(shape((DEAD,))), "hit")
    text = drawn(first, second, width=120)
    assert text.index("whole") < text.index("hit")
    ratio = second.plan.makespan / first.plan.makespan - 1
    assert re.search(rf"against whole +\+{ratio:.1%}".replace(".", r"\."), text)


@pytest.mark.parametrize("width", [20, 33, 80, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, drawn(Chart.of(recovered()), width=width).splitlines())) <= width


def test_an_ascii_terminal_gets_ascii() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    terminal.show([Chart.of(recovered())], Console(file=out, width=90, color_system=None))
    out.flush()
    assert b"///" in out.buffer.getvalue()  # type: ignore[attr-defined]


def test_charts_in_slots_and_in_milliseconds_have_separate_scales() -> None:
    text = drawn(Chart.of(one_f_one_b(shape()), "planned"), Chart.of(recovered(), "measured"), width=120)
    first, second = text[: text.index("measured")], text[text.index("measured") :]
    assert row(first, "0.0").startswith("F0--F1--F2--") and "0 slots" in first and "0 ms" in second
    assert re.search(r"^against planned +other unit", text, re.MULTILINE)
    assert re.search(r"^makespan +27 slots +680 ms", text, re.MULTILINE)


def test_ops_too_short_to_show_are_counted() -> None:
    trace = recovered()
    a = trace.arrays
    short = type(a)(a.kind, a.microbatch, a.stage, a.pipeline, a.start, np.where(a.kind == 2, a.start + 0.5, a.end))
    quick = Trace(trace.problem, short, 0.0, "ms", generation=1, status=trace.status, phases=trace.phases)
    quick_ops = int((short.end - short.start < 1).sum())
    assert f"{quick_ops} ops are shorter than half a column" in " ".join(drawn(Chart.of(quick), width=120).split())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_every_op_of_any_plan_appears_once_in_its_workers_row_in_order(data: st.DataObject) -> None:
    D, P, M = (data.draw(st.integers(1, most)) for most in (3, 4, 4))
    failed = {Worker(data.draw(st.integers(0, D - 1)), s) for s in range(P) if D > 1 and data.draw(st.booleans())}
    made = plan(Problem(D, P, M, failed=sorted(failed), durations={"O": data.draw(st.integers(1, 3))}))
    text = drawn(Chart.of(made), width=6 + 4 * int(made.arrays.end.max()))
    for worker in made.problem.workers():
        letters = re.findall(f"[{''.join(KINDS)}]", row(text, str(worker)).upper())
        assert letters == [op.kind for op in made.of(worker)]


@pytest.mark.parametrize("width", [60, 80])
def test_the_legend_breaks_between_entries_and_explains_the_fill(width: int) -> None:
    lines = drawn(Chart.of(recovered()), width=width).splitlines()
    cut, lost, fill = "!: cut off by the death", "~: lost with its worker", "-: fills an op to its length"
    for entry in ("small letter: re-routed", cut, lost, fill):
        assert any(entry in line and len(line) <= width for line in lines), f"{entry} is broken over two lines"
