"""The command `tokenize`: its output, and a signal, which loses only seconds of work."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recycle_pp import tokenize
from tests.recycle_pp.data import formats


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tokenizer and a text of 2 MB."""
    folder = tmp_path_factory.mktemp("place")
    formats.tokenizer(folder / "tokenizer")
    text = formats.text(300)
    formats.jsonl(folder / "long.jsonl", [text + str(i) for i in range(1000)])
    formats.jsonl(folder / "short.jsonl", ["one", "two"])
    return folder


def command(place, out, text="long.jsonl"):
    return [str(place / text), "--tokenizer", str(place / "tokenizer"), "--out", str(out)]


def test_the_command_describes_and_verifies_its_file(place, tmp_path, capsys):
    out = tmp_path / "train.bin"
    assert tokenize.main(command(place, out, "short.jsonl")) == 0
    words = f"{out}: 8 tokens (uint16), 2 documents; model.vocabulary must be at least 320"
    assert capsys.readouterr().out == words + "\n"
    assert tokenize.main(["--verify", str(out)]) == 0
    assert capsys.readouterr().out == words + "; its checksum is correct\n"


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"--out": "train.txt"}, "--out must end in .bin"),
        ({"--out": "/proc/none/train.bin"}, "No such file or directory"),
        ({"--tokenizer": "nowhere"}, "data.tokenizer must be bytes, a tokenizer.json or a folder"),
        ({"--separator": "nothing"}, "has no token 'nothing'"),
        ({"--column": "body"}, "has no text in 'body'"),
        ({"text": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_a_mistake_is_reported_in_one_sentence_with_exit_code_2_and_leaves_no_file(
    place, tmp_path, capsys, monkeypatch, change, sentence
):
    monkeypatch.chdir(tmp_path)
    options = {"--out": "train.bin", "--tokenizer": str(place / "tokenizer")} | change
    text = options.pop("text", str(place / "short.jsonl"))
    assert tokenize.main([text, *(part for option in options.items() for part in option)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and printed.count("\n") == 1 and sentence in printed
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize(
    "number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_after_a_signal_the_same_command_continues(place, tmp_path, number, code):
    out, record = tmp_path / "train.bin", tmp_path / "train.bin.partial.json"
    # Progress is recorded after every batch, so that the test need not wait for seconds. Batches outlast the signal.
    program = (
        "import sys, time; from recycle_pp import tokenize; from recycle_pp.data import tokenization as t; "
        "t.SURE_SECONDS, t.TOGETHER = 0.0, 1 << 14; renew = t._Writer._renew; "
        "t._Writer._renew = lambda self: (renew(self), time.sleep(0.05)); sys.exit(tokenize.main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command(place, out)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (record.exists() and json.loads(record.read_text())["tokens"]):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    printed, said = process.communicate(timeout=60)
    assert process.returncode == code and printed == "" and "Traceback" not in said
    assert not out.exists()
    sure = json.loads(record.read_text())
    assert sure["tokens"] > 0 and Path(f"{out}.partial").stat().st_size >= 2 * sure["tokens"]
    done = subprocess.run([sys.executable, "-m", "recycle_pp.tokenize", *command(place, out)], check=True)
    assert done.returncode == 0
    whole = tmp_path / "whole.bin"
    assert tokenize.main(command(place, whole)) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["train.bin", "train.bin.json", "whole.bin", "whole.bin.json"]


def test_help_shows_the_usage(capsys):
    with pytest.raises(SystemExit) as end:
        tokenize.main(["--help"])
    assert end.value.code == 0
    assert "python -m recycle_pp.tokenize corpus.parquet --tokenizer" in capsys.readouterr().out
