"""The page in a real headless Chromium: user actions and their visible results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recycle_schedules import Worker, plan

from recycle_pp.drawing import page
from recycle_pp.drawing.chart import Chart

from .examples import DEAD, one_f_one_b, recovered, shape

LABELS, HEAD = 64, 24  # pixels left of and above the ops, as in paint.js


class Page:
    """An open page, and methods that act on it like a user."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get_log("browser")  # discards messages of earlier pages
        driver.get(path.as_uri())
        self.until(lambda: self.state("painted"), 20)

    def state(self, name: str) -> str:
        return self.driver.execute_script("return document.body.dataset[arguments[0]] ?? ''", name)

    @property
    def view(self) -> dict[str, float]:
        return json.loads(self.state("view"))

    def until(self, true: Callable[[], object], seconds: float = 5) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.driver.get_log("browser")
            time.sleep(0.02)

    def changes(self, act: Callable[[], object]) -> tuple[dict[str, float], dict[str, float]]:
        """The view before and after an action."""
        before = self.view
        act()
        self.until(lambda: self.view != before)
        return before, self.view

    def text(self, selector: str) -> str:
        return self.driver.execute_script("return document.querySelector(arguments[0]).innerText", selector)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def place(self, row: int, t: float) -> tuple[int, int]:
        """Screen coordinates of time `t` in row `row`, if the page shows one chart with 4 stages."""
        v = self.view
        width = self.driver.execute_script("return document.getElementById('stage').clientWidth") - LABELS - 10
        left, top = self.driver.execute_script(
            "const b = document.getElementById('canvas').getBoundingClientRect(); return [b.x, b.y]"
        )
        x = left + LABELS + (t - v["t0"]) / (v["t1"] - v["t0"]) * width
        y = top + HEAD + (row + row // 4 * 0.4 + 0.5 - v["top"]) * v["row"]
        return int(x), int(y)

    def mouse(self, kind: str, x: int, y: int, **more: object) -> None:
        """Sends a mouse event through the browser, not through the page's script."""
        event = {"type": kind, "x": x, "y": y, **more}
        self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def click(self, x: int, y: int) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.mouse(kind, x, y, **button)

    def complaints(self) -> list[Any]:
        return self.driver.get_log("browser")


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Callable[..., Page]:
    def open_steps(*steps: page.Step, **options: Any) -> Page:
        page.save(steps, tmp_path / "x.html", **options)
        return Page(browser, tmp_path / "x.html")

    return open_steps


@pytest.fixture
def adapted(open_page: Callable[..., Page]) -> Page:
    return open_page(page.Step("plan", [Chart.of(one_f_one_b(shape((DEAD,))))]), title="worked example")


def test_the_page_loads_without_errors_and_network_requests(adapted: Page) -> None:
    assert adapted.complaints() == []
    assert adapted.text("h1") == "worked example"
    asked = adapted.driver.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [url for url in asked if not url.startswith("data:")] == []


def test_hovering_shows_an_op_and_the_source_of_its_input(adapted: Page) -> None:
    adapted.mouse("mouseMoved", *adapted.place(10, 32.5))
    adapted.until(lambda: "2F6" in adapted.text("#tip"))
    tip = adapted.text("#tip")
    assert "micro-batch 6 (pipeline 1, index 0), stage 2" in tip and "on W(2,2), re-routed from W(1,2)" in tip
    assert "slots, 1 long" in tip
    adapted.mouse("mouseMoved", *adapted.place(6, 10))
    adapted.until(lambda: "W(1,2) dead" in adapted.text("#tip"))


def test_a_click_shows_the_micro_batchs_whole_route_and_escape_hides_it(adapted: Page) -> None:
    adapted.click(*adapted.place(4, 0.5))
    adapted.until(lambda: adapted.text("#route-title").startswith("Micro-batch 6 "))
    stops = adapted.text("#route-ops").split("\n")
    assert len([s for s in stops if s.startswith("W(")]) == 12
    assert "W(2,2) re-routed" in stops and "W(1,3)" in stops
    adapted.press("\ue00c")
    adapted.until(lambda: adapted.driver.execute_script("return document.getElementById('route').hidden"))


def test_the_wheel_zooms_around_the_pointer_and_dragging_moves(adapted: Page) -> None:
    x, y = adapted.place(5, 20.0)
    before, after = adapted.changes(lambda: adapted.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400))
    assert after["t1"] - after["t0"] < 0.7 * (before["t1"] - before["t0"])
    assert abs(adapted.place(5, 20.0)[0] - x) <= 1
    adapted.mouse("mousePressed", x, y, button="left", clickCount=1)
    before, after = adapted.changes(lambda: adapted.mouse("mouseMoved", x - 100, y, button="left", buttons=1))
    adapted.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    assert after["t0"] > before["t0"] and after["t1"] - after["t0"] == pytest.approx(before["t1"] - before["t0"])
    _, after = adapted.changes(lambda: adapted.press("0"))
    assert after["t0"] == 0


def test_everything_works_from_the_keyboard(adapted: Page) -> None:
    right, down, shift, enter = "\ue014", "\ue015", "\ue008", "\ue007"
    before, after = adapted.changes(lambda: adapted.press("+", "+"))
    assert after["t1"] - after["t0"] < before["t1"] - before["t0"]
    before, after = adapted.changes(lambda: adapted.press(right))
    assert after["t0"] > before["t0"]
    adapted.press("0")
    from selenium.webdriver import ActionChains

    keys = ActionChains(adapted.driver).key_down(shift).send_keys(right, right, down).key_up(shift)
    keys.perform()
    adapted.until(lambda: adapted.text("#said").startswith("1"))
    assert "on W(0,1)" in adapted.text("#said")
    adapted.press(enter)
    adapted.until(lambda: adapted.text("#route-title").startswith("Micro-batch"))
    adapted.press("?")
    adapted.until(lambda: adapted.driver.execute_script("return document.getElementById('keys').open"))
    adapted.press("\ue00c")
    light = adapted.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    adapted.press("t")
    adapted.until(
        lambda: adapted.driver.execute_script("return getComputedStyle(document.body).backgroundColor") != light
    )
    assert adapted.complaints() == []


def test_the_search_field_finds_micro_batches_and_workers_and_rejects_other_text(adapted: Page) -> None:
    field = adapted.driver.find_element("id", "find")
    field.send_keys("17\ue007")
    adapted.until(lambda: adapted.text("#route-title").startswith("Micro-batch 17 (pipeline 2, index 5)"))
    field.clear()
    field.send_keys("9.9\ue007")
    assert "no such" in adapted.driver.execute_script("return document.getElementById('find').validationMessage")


def test_the_slider_goes_through_the_steps_of_a_run(open_page: Callable[..., Page]) -> None:
    steps = [
        page.Step("step 19", [Chart.of(one_f_one_b(shape(scale=20.0)))]),
        page.Step("step 20", [Chart.of(recovered(), "as measured")], "W(1,2) died"),
    ]
    got = open_page(*steps, first=1)
    assert got.text("#note") == "W(1,2) died" and "the stall was 40 ms" in got.text("#story")
    slider = got.driver.find_element("id", "slider")
    assert slider.get_attribute("value") == "1"
    slider.send_keys("\ue012")  # the left arrow key
    got.until(lambda: got.state("step") == "0")
    assert got.text("#step-name") == "step 19" and got.text("#story") == ""
    got.driver.find_element("id", "canvas").click()
    got.press(".")
    got.until(lambda: got.state("step") == "1")
    assert got.complaints() == []


def test_comparing_shows_both_charts_or_either(open_page: Callable[..., Page]) -> None:
    pair = [Chart.of(one_f_one_b(shape()), "fault-free"), Chart.of(plan(shape((DEAD,))), "adapted")]
    got = open_page(page.Step("compare", pair))
    assert "fault-free" in got.text("#figures") and "adapted" in got.text("#figures")
    button = got.driver.find_element("id", "compare")
    labels = []
    for _ in range(3):
        labels.append(button.text)
        button.click()
    assert labels == ["Both", "fault-free", "adapted"] and button.text == "Both"


def test_a_name_from_a_file_is_never_markup(open_page: Callable[..., Page]) -> None:
    evil = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>"
    got = open_page(page.Step(evil, [Chart.of(one_f_one_b(shape()), evil)], evil), title=evil)
    assert got.text("h1") == evil and got.text("#note") == evil and got.driver.title == evil
    assert got.driver.execute_script("return document.images.length") == 0 and got.complaints() == []


def test_a_plan_of_393216_ops_paints_within_3_seconds_and_zooms_to_single_ops(open_page: Callable[..., Page]) -> None:
    failed = (Worker(0, 2), Worker(9, 7), Worker(40, 12))
    got = open_page(page.Step("plan", [Chart.of(one_f_one_b(shape(failed, (64, 16, 128))))]))
    assert float(got.state("painted")) <= 3000
    got.press("f")  # shows all 1024 workers
    got.until(lambda: got.state("detail") == "pixels")
    got.driver.find_element("id", "find").send_keys("777\ue007")
    got.until(lambda: got.text("#route-title").startswith("Micro-batch 777 (pipeline 6, index 9)"))
    got.driver.find_element("id", "canvas").click()
    for key in "]" * 18 + "+" * 12:
        got.press(key)
    got.until(lambda: got.state("detail") == "boxes")
    assert got.complaints() == []


def test_4096_workers_and_a_million_ops_pan_without_stutter(open_page: Callable[..., Page]) -> None:
    got = open_page(page.Step("plan", [Chart.of(one_f_one_b(shape((Worker(3, 3),), (128, 32, 85))))]))
    frames = []
    for key in "+\ue014\ue014\ue012-":
        got.changes(lambda key=key: got.press(key))  # type: ignore[misc]
        frames.append(float(got.state("frame")))
    assert sorted(frames)[len(frames) // 2] < 150, frames  # ms, in software on two busy cores


def test_a_large_job_shows_only_workers_affected_by_deaths_until_all_are_requested(
    open_page: Callable[..., Page],
) -> None:
    got = open_page(page.Step("plan", [Chart.of(one_f_one_b(shape((Worker(1, 2),), (8, 8, 64))))]))
    got.until(lambda: "stages with deaths come first (2)" in got.text("#note"))
    assert "of the other stages (0-1, 3-7), pipeline 1 is drawn and 49 workers are folded" in got.text("#note")
    assert got.text("#fold") == "All workers" and got.complaints() == []
    before, after = got.changes(lambda: got.press("f"))
    assert after["row"] < before["row"] and got.text("#fold") == "Fold" and got.text("#note") == ""
    got.press("f")
    got.until(lambda: got.text("#fold") == "All workers")
    assert got.complaints() == []
