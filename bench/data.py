"""Time to find a sample's window and tokens by its number.

    python bench/data.py train.bin --samples 10000000

Prints microseconds of CPU time per sample, for one source and for three weighted sources, in order and at random
positions of a run. Also checks that each epoch has every window once.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable

import numpy as np

from recycle_pp.config.settings import Data, Model, Settings
from recycle_pp.data.samples import Samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a token file")
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--out", help="also as JSON")
    arguments = parser.parse_args()
    one = _samples(arguments, [arguments.path], None)
    three = _samples(arguments, [arguments.path] * 3, [0.7, 0.2, 0.1])
    n, draws = arguments.samples, random.Random(0)
    anywhere = [draws.randrange(10**12) for _ in range(n // 10)]
    rows = {
        f"{n:,} windows, in order": _microseconds(lambda i: one.ids(i, 1), range(n)),
        f"{n // 10:,} windows, anywhere in a run of 10^12": _microseconds(lambda i: one.ids(i, 1), anywhere),
        f"{n // 10:,} windows, three sources with weights": _microseconds(lambda i: three.ids(i, 1), range(n // 10)),
        f"{n // 100:,} samples with their tokens": _microseconds(lambda i: one.train(*one.ids(i, 1)), range(n // 100)),
    }
    seen = np.bincount(one.ids(0, one.windows), minlength=one.windows)
    assert seen.min() == seen.max() == 1, "an epoch skips a window or sees one twice"
    print(f"{arguments.path}: {one.windows:,} windows of {arguments.sequence} tokens")
    for name, value in rows.items():
        print(f"{value:8.2f} us  {name}")
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump({"windows": one.windows, "microseconds": rows}, file, indent=1)


def _samples(arguments: argparse.Namespace, paths: list[str], weights: list[float] | None) -> Samples:
    data = Data(path=list(paths), weights=weights, validation_share=0.0)
    return Samples(Settings(model=Model(sequence=arguments.sequence, vocabulary=1 << 16), data=data))


def _microseconds(find: Callable[[int], object], numbers: Iterable[int]) -> float:
    begun, count = time.process_time(), 0
    for number in numbers:
        find(number)
        count += 1
    return (time.process_time() - begun) / count * 1e6


if __name__ == "__main__":
    main()
