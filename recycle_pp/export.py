"""Writes a run's model as a folder that Hugging Face's from_pretrained loads.

    python -m recycle_pp.export runs/mine out                  # the newest complete checkpoint, even while the job runs
    python -m recycle_pp.export runs/mine out --step 2000 --dtype bfloat16
    python -m recycle_pp.export runs/mine out --best           # the lowest validation loss (checkpoint.keep_best)
    python -m recycle_pp.export runs/mine s3://bucket/models/mine  # also gs://, az://
    python -m recycle_pp.export runs/lora out --merge          # without --merge: the adapters, for peft
    python -m recycle_pp.export runs/oregon out --theta        # the common weights of all islands

Writes safetensors (with an index if there are several files), config.json and the tokenizer. The project's own model
becomes a Llama. A model from a folder (model.path) keeps that folder's config.json, tokenizer and names. A model from
your own code is written without a config.json. The last step renames a temporary folder to `out`, so `out` is never
incomplete. In a store, config.json is written last. See docs/data.md.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch

from recycle_pp.command import parser_of
from recycle_pp.state.hf_folder import best_step, of_run, refuse_existing, write
from recycle_pp.state.hf_upload import refuse_stored, upload
from recycle_pp.storage.local_copy import is_stored

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 2 after printing one sentence about an error; 130 or 143 after a signal."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    try:
        out = arguments.out
        refuse_stored(out) if is_stored(out) else refuse_existing(Path(out))
        step = best_step(arguments.run_dir) if arguments.best else arguments.step
        vector = "theta" if arguments.theta else "model"
        model, path = of_run(arguments.run_dir, step, DTYPES[arguments.dtype], arguments.merge, vector)
        if is_stored(out):
            has_tokenizer = upload(model, out, report=_report)
        else:
            has_tokenizer = write(model, Path(out), report=_report)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; nothing was written", file=sys.stderr)
        return 130
    print(f"{out}: {len(model.parts)} tensors of {path.name} in {arguments.dtype}")
    if model.config is None:
        print("without a config.json: the model is your own code; load the weights by name")
    if not has_tokenizer:
        print("without a tokenizer: neither data.tokenizer nor model.path names one, and data.path is not text")
    return 0


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _report(done: int, total: int) -> None:
    if done < total:
        print(f"{done / 1e9:.1f} of {total / 1e9:.1f} GB written", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("export", __doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="the folder of a run, run.dir, or the URL of its checkpoint.store")
    add("out", metavar="OUT", help="a folder that does not exist yet, or a URL of a store")
    add(
        "--step",
        type=int,
        metavar="N",
        help="the checkpoint step-N, the state before step N (default: the newest)",
    )
    add("--best", action="store_true", help="the checkpoint with the lowest validation loss")
    add("--merge", action="store_true", help="for a run with model.lora: the whole model, not only the adapters")
    add("--theta", action="store_true", help="for an island: the common weights after the latest round that it applied")
    add("--dtype", choices=list(DTYPES), default="float32", help="dtype of the weights (default float32)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
