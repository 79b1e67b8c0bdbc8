"""Tokenises text once, into a file for data.path.

    python -m recycle_pp.tokenize corpus.parquet --tokenizer models/smollm --out train.bin
    python -m recycle_pp.tokenize notes/ more.jsonl --tokenizer tokenizer.json --column body --out train.bin
    python -m recycle_pp.tokenize chats.jsonl --tokenizer models/qwen --sequence 1024 --out chats.bin
    python -m recycle_pp.tokenize --verify train.bin

Accepts text files, folders, .jsonl and .parquet, also in a store (s3://, gs://, az://), and writes a separator token
after every document. The file holds raw uint16 numbers like nanoGPT's files (uint32 if the tokenizer has more than
65536 tokens). train.bin.json next to it records the type and a checksum. With --sequence, the text consists of
conversations, and the file is for data.format=chat with this model.sequence. After Ctrl-C, SIGTERM or SIGKILL, the same
command continues the work; only a few seconds are lost. See docs/data.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from recycle_pp.command import parser_of
from recycle_pp.config.loading import load
from recycle_pp.config.settings import Settings
from recycle_pp.data.chat.recipe import ChatRecipe
from recycle_pp.data.documents import Corpus
from recycle_pp.data.hub import local
from recycle_pp.data.token_file import Description
from recycle_pp.data.tokenization import Preparation, Recipe, Report, tokenise, verify
from recycle_pp.data.tokenizer import load as load_tokenizer
from recycle_pp.linux.processes import die_with_parent
from recycle_pp.storage.local_copy import ProgressLines, copy, is_stored


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 2 after printing one sentence about an error; 130 or 143 after a signal."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    try:
        if arguments.settings:
            return _for_run()
        if arguments.verify:
            print(_sentence(arguments.verify, verify(Path(arguments.verify))) + "; its checksum is correct")
        elif arguments.text and arguments.tokenizer and arguments.out:
            return _tokenise(arguments)
        else:
            parser.error("give either TEXT with --tokenizer and --out, or only --verify")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        return 130
    return 0


def _tokenise(arguments: argparse.Namespace) -> int:
    recipe: Preparation
    for url in filter(is_stored, (*arguments.text, arguments.tokenizer)):
        copy(url, url == arguments.tokenizer, ProgressLines(url).show)
    corpus = Corpus.of([local(text) for text in arguments.text], arguments.column)
    if arguments.sequence is None:
        recipe = Recipe(corpus, load_tokenizer(arguments.tokenizer, arguments.separator))
    else:
        recipe = ChatRecipe(corpus, arguments.tokenizer, arguments.sequence)
    out, progress = Path(arguments.out), ProgressLine(sys.stderr.isatty())
    if out.suffix != ".bin":
        raise ValueError(f"--out must end in .bin, so that data.path reads tokens from it; {arguments.out} does not")
    description = tokenise(recipe, out, lambda report: progress.show("", report))
    progress.close()
    print(_sentence(out, description))
    return 0


def _for_run() -> int:
    """Reads settings from stdin, tokenises and checks their training data, and returns the exit code.

    Prints sentences for the user to stdout. The last line contains the numbers of held-out samples and of training
    samples. After an error, prints one sentence instead. Rank 0 of a training job starts this process.
    """
    die_with_parent(os.getppid(), signal.SIGINT)
    progress = ProgressLine(sys.stderr.isatty())
    from recycle_pp.data.batches import samples_of  # imports torch

    try:
        samples = samples_of(load(json.load(sys.stdin), Settings), progress.show)
    except (ValueError, OSError) as error:
        print(error)
        return 2
    finally:
        progress.close()
    for name, packed in samples.packed.items():
        print(f"{name}: {packed.sentence}")
    print(samples.held_outs, samples.windows)
    return 0


class ProgressLine:
    """A progress line on stderr: overwritten on a terminal, else a new line every four seconds."""

    def __init__(self, terminal: bool):
        self._terminal, self._seconds = terminal, 0.5 if terminal else 4.0
        self._begun = self._next = time.monotonic()
        self._shown = False

    def show(self, name: str, report: Report) -> None:
        now = time.monotonic()
        if now < self._next or now < self._begun + 1.0:
            return
        self._next, self._shown = now + self._seconds, True
        speed = (report.done - report.begun) / (now - self._begun)
        left = (report.total - report.done) / speed if speed else 0.0
        line = (
            f"tokenising {name or 'text'}: {100 * report.done / report.total:.1f} % of {_bytes(report.total)}, "
            f"{report.tokens:,} tokens, {_bytes(speed)}/s, {_time(left)} left"
        )
        print(
            f"\r{line}\x1b[K" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        if self._terminal and self._shown:
            print(file=sys.stderr)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _sentence(out: Path, description: Description) -> str:
    content = f"{description.tokens:,} tokens ({description.dtype}), {description.documents:,} documents"
    if description.packed is not None:
        content = description.packed.sentence
    return f"{out}: {content}; model.vocabulary must be at least {description.vocabulary}"


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB" if number < 1000 else f"{number:.0f} GB"


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("tokenize", __doc__)
    add = parser.add_argument
    add(
        "text",
        nargs="*",
        metavar="TEXT",
        help="text file, folder, .jsonl, .parquet, dataset folder, hf://NAME:SPLIT or s3://...",
    )
    add("--tokenizer", help="a folder with a tokenizer.json, the file itself, or the word bytes")
    add("--out", metavar="FILE.bin", help="the token file; FILE.bin.json is written next to it")
    add("--column", default="text", help="column of .jsonl and .parquet that holds the text (default text)")
    add("--sequence", type=int, help="for conversations: pack them into samples of this many tokens")
    add("--separator", help="token after every document (default: the tokenizer's end-of-text token)")
    add("--verify", metavar="FILE.bin", help="read a finished file and check its checksum")
    add("--settings", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
