"""Tokenises a large text with and without interruptions, compares the bytes, and measures the speed.

    python bench/tokenise.py [--gigabytes 1] [--bpe 16000] [--keep train.bin]

The text is one .jsonl file of this machine's Python sources, repeated. It is tokenised as bytes or, with --bpe, by a
byte-level BPE of that size, which the bench trains. The second run gets SIGINT, SIGKILL, SIGINT and SIGKILL, each after
another fifth of the work, and each time the same command continues. Both files must be equal.

Prints wall and CPU seconds. `bench/data.py` can then measure the file kept with --keep.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from recycle_pp.data import token_file

STOPS = (signal.SIGINT, signal.SIGKILL, signal.SIGINT, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--bpe", type=int, metavar="TOKENS")
    parser.add_argument("--keep", type=Path, help="path at which to keep the token file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recycle-bench-") as name:
        folder = Path(name)
        corpus, documents = write(folder / "corpus.jsonl", int(arguments.gigabytes * 1e9))
        size = corpus.stat().st_size
        print(f"{size / 1e9:.2f} GB of .jsonl, {documents:,} documents", flush=True)
        tokenizer = "bytes" if arguments.bpe is None else str(trained(folder / "tokenizer.json", arguments.bpe))
        print(f"{'':22}{'seconds':>9}{'CPU':>8}{'MB/CPU s':>10}{'to the end after SIGINT':>26}")
        at_once, stopped = folder / "at_once.bin", folder / "stopped.bin"
        row("at once", size, lambda: tokenise(corpus, tokenizer, at_once))
        row("stopped four times", size, lambda: interrupted(corpus, tokenizer, stopped, size))
        one, other = (token_file.describe(path) for path in (at_once, stopped))
        assert one is not None and one == other
        same = subprocess.run(["cmp", at_once, stopped], check=False).returncode == 0
        print(
            f"{one.tokens:,} tokens, {one.documents:,} documents: the files are {'the same' if same else 'DIFFERENT'}"
        )
        if arguments.keep:
            shutil.move(at_once, arguments.keep)
            shutil.move(token_file.sidecar(at_once), token_file.sidecar(arguments.keep))
    return 0 if same and one.documents == documents else 1


def row(name: str, size: int, work: object) -> None:
    assert callable(work)
    begun, before = time.monotonic(), used()
    ends = work()
    seconds, cpu = time.monotonic() - begun, used() - before
    said = ", ".join(f"{end:.1f}" for end in ends) if ends else ""
    print(f"{name:22}{seconds:9.0f}{cpu:8.0f}{size / 1e6 / cpu:10.1f}{said:>26}", flush=True)


def used() -> float:
    """CPU seconds of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def command(corpus: Path, tokenizer: str, out: Path) -> list[str]:
    return [sys.executable, "-m", "recycle_pp.tokenize", str(corpus), f"--tokenizer={tokenizer}", f"--out={out}"]


def tokenise(corpus: Path, tokenizer: str, out: Path) -> list[float]:
    subprocess.run(command(corpus, tokenizer, out), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return []


def interrupted(corpus: Path, tokenizer: str, out: Path, size: int) -> list[float]:
    """Interrupts the tokenisation repeatedly. Returns the seconds from each SIGINT to the end of the process."""
    ends, partial = [], Path(f"{out}.partial")
    whole = Path(out.with_name("at_once.bin")).stat().st_size
    for k, number in enumerate(STOPS, 1):
        process = subprocess.Popen(
            command(corpus, tokenizer, out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while not partial.exists() or partial.stat().st_size < whole * k / (len(STOPS) + 1):
            assert process.poll() is None, "the process ended before it was interrupted"
            time.sleep(0.002)
        process.send_signal(number)
        begun = time.monotonic()
        process.wait()
        if number == signal.SIGINT:
            ends.append(time.monotonic() - begun)
    tokenise(corpus, tokenizer, out)
    return ends


def write(path: Path, size: int) -> tuple[Path, int]:
    """Writes the corpus. Returns its path and its number of documents."""
    texts = [path.read_text(errors="replace") for path in sources()]
    with path.open("w") as file:
        for count in itertools.count(1):
            number, turn = (count - 1) % len(texts), (count - 1) // len(texts)
            file.write(json.dumps({"text": f"# copy {turn}\n{texts[number]}"}) + "\n")
            if count % 100 == 0 and file.tell() >= size:
                return path, count
    raise AssertionError


def sources() -> Iterator[Path]:
    paths = sysconfig.get_paths()
    for root in (paths["stdlib"], paths["purelib"]):
        yield from sorted(path for path in Path(root).rglob("*.py") if 0 < path.stat().st_size < 1 << 20)


def trained(path: Path, tokens: int) -> Path:
    """The path of a trained tokenizer.json."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    some = itertools.islice(sources(), 0, None, 40)
    tokenizer.train_from_iterator((path.read_text(errors="replace") for path in some), trainer)
    tokenizer.save(str(path))
    return path


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
