"""Tokenizers: a Hugging Face tokenizer.json, a folder that contains one, or bytes.

    tokenizer = load("bytes"); tokenizer = load("models/smollm", separator=None)
    tokenizer.encode(["a text", "another"])      # one array of ids each; no special tokens are added
    tokenizer.separator                          # the id after every document

Nothing is downloaded. Reading a tokenizer.json needs the package tokenizers (the extra `hf`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recycle_pp.storage import local_copy

BYTES = "bytes"
ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<end_of_text>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer.

    encode      texts -> the token ids of each text, without special tokens
    vocabulary  the largest id + 1
    base        the largest id + 1, of the tokens that were not added to the vocabulary later
    separator   the id to put after every document
    digest      digest of everything that affects the tokens of a text
    """

    encode: Callable[[Sequence[str]], list[np.ndarray]]
    vocabulary: int
    base: int
    separator: int
    digest: str


def load(place: str, separator: str | None = None) -> Tokenizer:
    """The tokenizer at `place`: bytes, a tokenizer.json or a folder with one.

    separator: the token after every document; None: the tokenizer's end-of-text token (for bytes: the byte 0).

    Raises:
        ValueError: `place` is something else, or the tokenizer has no such token; the message names the configuration
            key.
    """
    if place == BYTES:
        if separator is not None:
            raise ValueError("data.separator must be null for data.tokenizer=bytes, whose separator is the byte 0")
        return Tokenizer(_bytes, 256, 256, 0, BYTES)
    file = definition(place)
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            f"data.tokenizer={place} needs the package tokenizers; pip install -e '.[hf]' in the clone of recycle_pp"
        ) from None
    text = file.read_bytes()
    try:
        found = tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # any exception that the library raises for an invalid file
        raise ValueError(f"data.tokenizer: {file} is not a tokenizer ({str(error).splitlines()[0]})") from None
    found.no_truncation()
    found.no_padding()
    ids = found.get_vocab(with_added_tokens=True)
    name = _end_of_text(file, ids, separator)

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        encodings = found.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    digest = hashlib.sha256(text).hexdigest()
    base = max(found.get_vocab(with_added_tokens=False).values(), default=-1) + 1
    return Tokenizer(encode, max(ids.values()) + 1, base, ids[name], f"{digest}-{ids[name]}")


def definition(place: str) -> Path:
    """The path of the tokenizer.json at `place`. Raises ValueError if there is none."""
    path = local_copy.place(place)
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.is_file() and (path / "tokenizer.model").is_file():
        raise ValueError(
            f"data.tokenizer: {place} has only tokenizer.model; convert it once, in Python: "
            f"transformers.AutoTokenizer.from_pretrained({place!r}).save_pretrained({place!r})"
        )
    if not file.is_file():
        raise ValueError(f"data.tokenizer must be bytes, a tokenizer.json or a folder that contains one, not {place!r}")
    return file


def _bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def end_of_text(definition: Path, separator: str | None) -> tuple[str, int]:
    """The token that ends a text, and its id: `separator`, or else the one in the tokenizer's files.

    definition: path of the tokenizer.json

    Raises ValueError if there is no such token.
    """
    found = json.loads(definition.read_text())
    vocabulary = found["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram: [token, score], by id
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    ids = vocabulary | {token["content"]: token["id"] for token in found.get("added_tokens", ())}
    name = _end_of_text(definition, ids, separator)
    return name, ids[name]


def _end_of_text(file: Path, ids: Container[str], separator: str | None) -> str:
    """`separator`, or else the end-of-text token in the files beside a tokenizer.json, or else one of the usual names.

    file  path of the tokenizer.json
    ids   names of all tokens
    """
    if separator is not None:
        if separator not in ids:
            raise ValueError(f"data.separator: {file} has no token {separator!r}")
        return separator
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            found: Any = json.loads((file.parent / name).read_text())["eos_token"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found = found.get("content") if isinstance(found, dict) else found
        if isinstance(found, str) and found in ids:
            return found
    for name in ENDS:
        if name in ids:
            return name
    raise ValueError(f"data.separator must name the token after every document: {file} does not name one")
