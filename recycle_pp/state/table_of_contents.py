"""Reads and checks the table of contents of a checkpoint (torch's file `.metadata`) without running code from it.

    table = read_table(path)                 # torch's Metadata
    check_chunks(path, name, table)          # all elements of this tensor are stored
    check_files(path)                        # all tensors are complete, and no file is too short

Each function raises ValueError, with one sentence, if its check fails.
"""

from __future__ import annotations

import io
import pickle
from enum import Enum, EnumMeta
from math import prod
from pathlib import Path, PosixPath
from typing import Any

import torch


def read_table(path: str | Path) -> Any:
    """A checkpoint's table of contents: torch's `Metadata` object.

    torch stores it as a pickle, and an ordinary unpickler would run any code in the file. This function loads only the
    classes of which a table consists.
    """
    content = (Path(path) / ".metadata").read_bytes()
    try:
        table = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # an invalid pickle can raise any exception
        raise ValueError(f"{path} is not a readable checkpoint: {error or type(error).__name__}") from error
    if type(table).__name__ != "Metadata" or not isinstance(table.state_dict_metadata, dict):
        raise ValueError(f"{path} is not a readable checkpoint: its .metadata is not a table of contents")
    return table


def check_files(path: Path) -> None:
    """Checks that every tensor is complete and that every file is as long as the table requires."""
    table = read_table(path)
    for key in table.state_dict_metadata:
        check_chunks(path, key, table)
    ends: dict[str, int] = {}
    for info in table.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for file, end in ends.items():
        size = (path / file).stat().st_size
        if size < end:
            raise ValueError(f"{path / file} has {size} bytes, but its table of contents requires {end}")


def check_chunks(path: Path, key: str, table: Any) -> None:
    """Checks that `key` is a tensor and that all of its elements are stored."""
    held = table.state_dict_metadata[key]
    if type(held).__name__ != "TensorStorageMetadata":
        raise ValueError(f"the checkpoint {path} contains {key}, which is not a tensor")
    size = tuple(held.size)
    stored = {(index.fqn, tuple(index.offset or ())) for index in table.storage_data or {}}
    elements = 0
    for chunk in {tuple(chunk.offsets): chunk for chunk in held.chunks}.values():
        ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        inside = (
            len(ends) == len(size) and all(map(int.__le__, ends, size)) and min((0, *chunk.offsets, *chunk.sizes)) == 0
        )
        # `stored` contains a tensor that was saved as a whole without an offset.
        there = (key, tuple(chunk.offsets)) in stored or ((key, ()) in stored and tuple(chunk.sizes) == size)
        if inside and there:
            elements += prod(chunk.sizes)
    if elements != prod(size) or min((0, *size)) < 0:
        raise ValueError(
            f"the checkpoint {path} lacks a part of {key}: {elements} of its {prod(size)} elements are stored"
        )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:  # excludes dotted names, which pickle resolves as nested attributes
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle enum members this way
            return _member
        if (module, name) == ("pathlib._local", "PosixPath"):  # the module of PosixPath in Python 3.13
            return PosixPath
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"a checkpoint's metadata names {module}.{name}, which is not allowed there")


def _member(kind: Any, name: str) -> Enum:
    """The member `name` of the enum `kind`. This is the only permitted use of `getattr`."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"a checkpoint's metadata names {name} of {kind}, which is not an enum member")
    return kind[name]


_CLASSES = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
}
