"""All commands report errors and exit codes in the same way."""

import io
import sys

import pytest

from recycle_pp.command import exit_code

ENDINGS = [
    (ValueError("--days must be above 0"), 2, "error: --days must be above 0\n"),
    (FileNotFoundError(2, "No such file or directory", "gone.csv"), 2, "error: gone.csv: No such file or directory\n"),
    (OSError("no space"), 2, "error: no space\n"),
    (KeyboardInterrupt(), 130, "\nstopped\n"),
]


@pytest.mark.parametrize(("raised", "code", "said"), ENDINGS, ids=[type(error).__name__ for error, *_ in ENDINGS])
def test_an_error_ends_a_command_with_one_sentence_and_a_code(raised, code, said, capsys):
    def run():
        raise raised

    assert exit_code(run) == code
    assert capsys.readouterr().err == said


def test_a_character_that_the_terminal_cannot_show_is_no_error(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert exit_code(lambda: print("step 3 \u00b7 5 \u2192 6") or 0) == 0
    assert written.getvalue() == b"step 3 ? 5 ? 6\n"


def test_a_closed_pipe_is_not_an_error(capfd):
    def run():
        raise BrokenPipeError

    assert exit_code(run) == 0
    assert capfd.readouterr().err == ""
