"""A folder of safetensors, read by name.

folder = Folder(Path("SmolLM2-135M"))
folder.read("model.norm.weight")        # only that tensor, in the dtype of the file
folder.find("lm_head.weight")           # None if missing
folder.refuse_others(names)             # raises ValueError if the files contain tensors that the model does not have
initial("norm.weight", value, shape)    # the value, if it can be the initial value of a parameter of this shape
folder_digest(Path("SmolLM2-135M"))     # equal for folders with equal configuration and weights
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

PIECES, PIECE = 256, 1 << 16  # number and bytes of the pieces of a large file that its digest covers
AGAIN = "download it again, or run `git lfs pull` if git cloned the folder"
REWRITE = "from_pretrained and save_pretrained(save_original_format=False)"
# Tensors that older versions of transformers wrote, and that the newer ones compute: rotary tables, causal masks.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(attn|attention)\.(masked_)?bias$")


def folder_digest(path: Path) -> str:
    """The first 16 digits of a SHA-256 over config.json and the safetensors. Covers only the size and 256 pieces of a
    large file. Raises OSError if a file cannot be read."""
    digest = hashlib.sha256()
    for file in sorted([*path.glob("config.json"), *path.glob("model*.safetensors")]):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        whole = size <= PIECES * PIECE
        starts = range(0, size, PIECE) if whole else np.linspace(0, size - PIECE, PIECES).astype(np.int64).tolist()
        with file.open("rb") as opened:
            for start in starts:
                digest.update(os.pread(opened.fileno(), PIECE, start))
    return digest.hexdigest()[:16]


class Folder:
    """The safetensors of a Hugging Face folder. Tensors are read one at a time, on request.

    prefix: prefix of parameter names (`transformer.wte.weight`) that files of the bare model omit (`wte.weight`).

    Like the methods, raises ValueError, with one sentence for the user, if a file is missing or incomplete.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self._path, self._prefix = path, f"{prefix}." if prefix else ""
        if (method := _quantization(path)) is not None:
            raise ValueError(
                f"model.path={path} contains quantised weights ({method}), which cannot be trained; use a folder with "
                "bfloat16 or float32 weights"
            )
        index, single = path / "model.safetensors.index.json", path / "model.safetensors"
        if index.exists():
            self._files: dict[str, str] = _weight_map(index)
        elif single.exists():
            with _opened(single) as file:
                self._files = dict.fromkeys(file.keys(), single.name)
        else:
            raise ValueError(
                f"model.path={path} contains no model.safetensors; model.init=random trains from the beginning"
            )

    def read(self, name: str) -> Tensor:
        found = self.find(name)
        if found is None:
            some = ", ".join(sorted(self._files)[:3])
            raise ValueError(
                f"model.path={self._path} does not contain {name} (it contains {some}, ...), because transformers "
                f"converts such files as it loads them; rewrite the folder with {REWRITE}"
            )
        return found

    def find(self, name: str) -> Tensor | None:
        for candidate in (name, name.removeprefix(self._prefix)):
            if candidate in self._files:
                with _opened(self._path / self._files[candidate]) as file:
                    return file.get_tensor(candidate)
        return None

    def refuse_others(self, names: Collection[str], ignored: Collection[str] = ()) -> None:
        """Raises ValueError if the files contain tensors that the model does not have.

        names    names of all tensors of the model
        ignored  patterns of further names that the files may contain
        """
        known = {*names, *(name.removeprefix(self._prefix) for name in names)}
        unused = re.compile("|".join([*COMPUTED, *ignored]))
        if others := sorted(name for name in self._files if name not in known and not unused.search(name)):
            raise ValueError(
                f"model.path={self._path} contains {others[0]}{', ...' * (len(others) > 1)}, but the model has no "
                "such tensor: either transformers converts such files as it loads them, or the config.json belongs to "
                f"other weights; rewrite the folder with {REWRITE}"
            )


def initial(name: str, value: Tensor, shape: Sequence[int]) -> Tensor:
    """`value`, which a file contains for the parameter `name`.

    Raises ValueError if its shape is not `shape`, or if it has a dtype (integers, float8) whose values mean nothing
    without their scales."""
    if value.shape != torch.Size(shape):
        raise ValueError(f"{name} is {tuple(value.shape)} in the file and {tuple(shape)} in the model")
    if not value.is_floating_point() or value.dtype.itemsize == 1:
        raise ValueError(
            f"{name} is {str(value.dtype).removeprefix('torch.')} in the file, so it is quantised; use a folder with "
            "bfloat16 or float32 weights"
        )
    return value


def _quantization(path: Path) -> str | None:
    """The quantisation method that config.json names; None if the weights are not quantised."""
    try:
        found = json.loads((path / "config.json").read_text()).get("quantization_config")
    except (OSError, ValueError, AttributeError):  # model=custom does not need the file, and allows other content
        return None
    return found and str(found.get("quant_method", "quantization_config"))


def _weight_map(index: Path) -> dict[str, str]:
    """Name of a tensor -> name of its file."""
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"model.path: {index} is not an index of safetensors; {AGAIN}") from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ValueError(
            "reading safetensors needs the package: pip install -e '.[hf]' in the clone of recycle_pp"
        ) from error
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError as error:
        raise ValueError(f"model.path: {path} is missing; {AGAIN}") from error
    except (SafetensorError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"model.path: {path} is not a complete safetensors file ({reason}); {AGAIN}") from error
