"""The tokenizer of an exported model.

write_tokenizer(run, model_path, folder)     # returns False if the tokenizer is unknown
separator(run, model_path)                   # the id of the token after every document; None if it is unknown
answer_end(run)                              # the id of the token after every answer; None without conversations
copy_files(source, ["config.json"], folder); write_json(folder / "config.json", {...})
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from recycle_pp.data import tokenizer
from recycle_pp.data.chat.template import ChatTemplate
from recycle_pp.data.sources import is_text, paths
from recycle_pp.data.token_file import describe
from recycle_pp.storage.local_copy import copy, is_stored
from recycle_pp.storage.local_copy import place as local

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


def write_tokenizer(run: Mapping[str, Any], origin: Path | None, folder: Path) -> bool:
    """Writes the files of the tokenizer to `folder`. Returns False if the tokenizer is unknown.

    run     the run's settings; only the groups `data` and `model` are read
    origin  the folder model.path, or None; its tokenizer is used if neither data.tokenizer nor the data name one
    """
    data, place = run["data"], _place(run, origin)
    if place is None:  # the run was trained on files of tokens or on the user's own dataset
        return origin is not None and copy_files(origin, TOKENIZER, folder)
    if place == tokenizer.BYTES:
        _write_bytes_tokenizer(folder)
        return True
    if is_stored(place):
        copy(place, small=True)
    _copy_tokenizer(tokenizer.definition(place), data.get("separator"), folder)
    return True


def separator(run: Mapping[str, Any], origin: Path | None) -> int | None:
    """The id of the token that followed every document of the run's data; None if it is unknown."""
    data, place = run["data"], _place(run, origin)
    if place == tokenizer.BYTES:
        return 0
    with suppress(ValueError, OSError):  # a tokenizer may define no such token, and token files may have been deleted
        if place is not None:
            return tokenizer.end_of_text(tokenizer.definition(place), data.get("separator"))[1]
        described = filter(None, map(describe, map(local, paths(data.get("path")))))
        return next((of.separator for of in described if of.packed is None), None)
    return None


def answer_end(run: Mapping[str, Any]) -> int | None:
    """The id of the special token that ends an answer in the run's conversations; None without data.format=chat."""
    place = run["data"].get("tokenizer")
    if run["data"].get("format") != "chat" or place is None:
        return None
    with suppress(ValueError):  # the folder of the tokenizer may have been deleted
        return ChatTemplate(place).end
    return None


def end_ids(*found: int | Sequence[int] | None) -> list[int]:
    """All ids in values of `eos_token_id`."""
    several = [of if isinstance(of, Sequence) else [of] for of in found if of is not None]
    return list(dict.fromkeys(one for of in several for one in of))


def _place(run: Mapping[str, Any], origin: Path | None) -> str | None:
    """data.tokenizer, or its default; None if the data are not text."""
    data = run["data"]
    place = data.get("tokenizer")
    return tokenizer.BYTES if place is None and _are_bytes(data, run["model"], origin) else place


def _are_bytes(data: Mapping[str, Any], model: Mapping[str, Any], origin: Path | None) -> bool:
    """Whether a run without data.tokenizer was trained on the bytes of text."""
    pretrained = model.get("kind") in ("hf", "llama") and model.get("init") != "random"
    if pretrained and origin is not None and (origin / "tokenizer.json").is_file():
        return False  # because `config.checks` refuses bytes for such a model
    return data.get("build") is None and all(
        # The files show whether they contain text or tokens. Without them, a vocabulary of 256 means bytes.
        is_text(path) and (local(path).exists() or model.get("vocabulary") == 256)
        for path in paths(data.get("path"))
    )


def copy_files(source: Path, names: Sequence[str], folder: Path) -> bool:
    """Copies the named files that exist in `source`. Returns whether any exists."""
    there = [name for name in names if (source / name).is_file()]
    for name in there:
        shutil.copyfile(source / name, folder / name)
    return bool(there)


def _copy_tokenizer(definition: Path, separator: str | None, folder: Path) -> None:
    """Copies a tokenizer.json and the files next to it. If there is no tokenizer_config.json, writes the minimum that
    `from_pretrained` needs."""
    if definition.name == "tokenizer.json":
        copy_files(definition.parent, TOKENIZER, folder)
    shutil.copyfile(definition, folder / "tokenizer.json")
    if not (folder / "tokenizer_config.json").exists():
        end, _ = tokenizer.end_of_text(definition, separator)
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})


def _write_bytes_tokenizer(folder: Path) -> None:
    """Writes a byte-level BPE tokenizer without merges: a token's id is the value of its byte. Byte 0 ends a text. It
    is a special token whose name is the byte itself, so that no other text is mistaken for it."""
    symbols = ["\0", *_byte_symbols()[1:]]
    end = {"id": 0, "content": "\0", "special": True, "normalized": False}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {symbol: byte for byte, symbol in enumerate(symbols)}, "merges": []}
    write_json(
        folder / "tokenizer.json",
        {"version": "1.0", "added_tokens": [end], "pre_tokenizer": level, "decoder": level, "model": model},
    )
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "eos_token": "\0"},
    )


def _byte_symbols() -> list[str]:
    """GPT-2's printable character for each byte: the character with the byte's code if that is printable, else a
    character from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
