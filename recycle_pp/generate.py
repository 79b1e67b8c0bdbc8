"""Samples text from a checkpoint of a run.

    python -m recycle_pp.generate runs/mine --prompt "def "                      # the newest complete checkpoint
    python -m recycle_pp.generate runs/mine --prompt "def " --temperature 0      # always the likeliest token
    python -m recycle_pp.generate runs/mine --prompt "def " --top-k 40 --seed 1 --max-tokens 200 --step 2000

The prompt and the model's output go to stdout as they are generated. The same seed gives the same text on the same
machine. Needs the extra `hf`: transformers runs the model as exported by `recycle_pp.export`, on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from recycle_pp.command import parser_of
from recycle_pp.state.hf_folder import Exported, of_run
from recycle_pp.state.hf_tokenizer import end_ids


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 2 after printing one sentence about an error; 130 or 143 after a signal."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    try:
        _check(arguments)
        model, tokenizer = load(of_run(arguments.run_dir, arguments.step, torch.float32, merge=True)[0])
        generate(model, tokenizer, arguments)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def load(weights: Exported) -> tuple[Any, Any]:
    """Returns the transformers model and tokenizer, ready to generate.

    Raises ValueError if the run has no config.json or no tokenizer.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "generate needs the package transformers; pip install -e '.[hf]' in the clone of recycle_pp"
        ) from None
    transformers.logging.set_verbosity_error()
    if weights.config is None:
        raise ValueError(
            "generate needs a model with a config.json, and this model is your own code; sample with that code"
        )
    with tempfile.TemporaryDirectory() as folder:
        if not weights.write_config(Path(folder)):
            raise ValueError(
                "this run has no tokenizer: neither data.tokenizer nor model.path names one, and data.path is not text"
            )
        config = transformers.AutoConfig.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        file = Path(folder, "generation_config.json")
        ends = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    model = transformers.AutoModelForCausalLM.from_config(config)
    state = weights.load(list(weights.parts))
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = set(getattr(model, "all_tied_weights_keys", None) or model._tied_weights_keys or ())
    if wrong := sorted({*missing, *unexpected} - tied):
        raise ValueError(f"config.json and the checkpoint do not match: {wrong[0]}")
    of_config = getattr(config, "eos_token_id", None)
    model.generation_config.eos_token_id = end_ids(ends, of_config, tokenizer.eos_token_id, weights.separator) or None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def generate(model: Any, tokenizer: Any, arguments: argparse.Namespace) -> None:
    """Prints the prompt and up to --max-tokens generated tokens. Stops at a token that ends a text."""
    import transformers

    ids = tokenizer(arguments.prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
    if not ids.shape[1]:
        raise ValueError("--prompt must have at least one token")
    room = getattr(model.config, "max_position_embeddings", None)
    if room is not None and ids.shape[1] >= room:
        raise ValueError(f"--prompt must have fewer than {room} tokens, the positions of the model, not {ids.shape[1]}")
    count = arguments.max_tokens if room is None else min(arguments.max_tokens, room - ids.shape[1])
    sampling: dict[str, Any] = {"do_sample": False}
    if arguments.temperature:
        sampling = {"do_sample": True, "temperature": arguments.temperature, "top_k": arguments.top_k, "top_p": 1.0}
    torch.manual_seed(arguments.seed)
    ends = model.generation_config.eos_token_id
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            pad_token_id=ends[0] if ends else 0,
            eos_token_id=ends,
            streamer=transformers.TextStreamer(tokenizer, skip_special_tokens=True),
            **sampling,
        )
    if count < arguments.max_tokens:
        print(f"(at most {count} tokens, because the model has {room} positions)", file=sys.stderr)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("max_tokens", 1), ("top_k", 0), ("temperature", 0), ("seed", 0)):
        if not getattr(arguments, name) >= least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(arguments, name)}")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("generate", __doc__)
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", help="the folder of a run, run.dir, or the URL of its checkpoint.store")
    add("--prompt", required=True, help="the beginning of the text")
    add(
        "--step",
        type=int,
        metavar="N",
        help="the checkpoint step-N, the state before step N (default: the newest)",
    )
    add("--max-tokens", type=int, default=200, help="number of tokens to add (default 200)")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token (default 0.8)")
    add("--top-k", type=int, default=0, help="draw from the k likeliest tokens (default 0: from all)")
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
