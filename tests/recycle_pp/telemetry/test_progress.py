"""The lines on the console during a run."""

import io

import pytest

from recycle_pp.telemetry import progress as module
from recycle_pp.telemetry.progress import Progress

RECORD = {"step": 20, "loss": 2.30594, "tokens_per_second": 51234.5, "live_workers": 12}
HURT = RECORD | {"live_workers": 11, "least_live_stage": 2, "least_live": 2}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_gets_plain_text():
    stream = io.StringIO()
    progress = Progress(steps=60, workers=12, stream=stream)
    progress.step(RECORD)
    progress.say("step 20: worker 1.2 died")
    progress.step(HURT)
    first = "step 20  loss 2.3059  12 workers  39 steps left"
    assert stream.getvalue().splitlines()[0] == first, "the first one has no speed"
    assert stream.getvalue().splitlines()[1] == "step 20: worker 1.2 died"
    assert (
        " tokens/s  11 of 12 workers, stage 2 has the fewest: 2  39 steps left, ETA "
        in stream.getvalue().splitlines()[2]
    )
    assert "\x1b" not in stream.getvalue()


def test_a_validation_has_its_number_of_samples():
    stream = io.StringIO()
    Progress(steps=60, workers=12, stream=stream).step(RECORD | {"val_loss": 2.5, "val_samples": 32})
    assert "  loss 2.3059  val 2.5000 (32 samples)  12 workers" in stream.getvalue()


def test_steps_count_from_0_and_the_last_of_60_is_59():
    stream = io.StringIO()
    progress = Progress(60, 12, stream)
    for step in (0, 58, 59):
        progress.step({"step": step})
    assert [line.split(", ETA")[0] for line in stream.getvalue().splitlines()] == [
        "step  0  59 steps left",
        "step 58  1 step left",
        "step 59  0 steps left",
    ]


def test_a_terminal_shows_colour_and_a_bar_unless_no_color_is_set(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    Progress(60, 12, coloured).step(RECORD)
    assert "█" * 7 + "░" * 13 in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    Progress(60, 12, plain).step(RECORD)
    assert "\x1b" not in plain.getvalue()


def test_the_time_left_follows_the_recent_steps(monkeypatch):
    clock = iter([0.0, 2.0, 4.0, 6.0, 100.0])  # one step stalls
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    progress = Progress(steps=3605, workers=1, stream=stream)
    for step in range(5):
        progress.step({"step": step})
    assert stream.getvalue().splitlines()[-1].endswith("ETA 2:00:00")


@pytest.mark.parametrize("absent", list(RECORD)[1:])
def test_missing_measures_are_left_out(absent):
    stream = io.StringIO()
    Progress(60, 12, stream).step({key: value for key, value in RECORD.items() if key != absent} | {"val_loss": None})
    assert "None" not in stream.getvalue()
    assert "val" not in stream.getvalue()


def test_a_reader_that_closes_the_pipe_does_not_stop_the_run():
    class Pipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    progress = Progress(60, 12, Pipe())
    progress.step(RECORD)
    progress.say("lost")
