"""Checkpoints of a job: every stage writes its part, asynchronously; one folder of torch's own format comes out.

    saver = Saver(folder)                                    # one per worker that saves
    saving = saver.save(step, stage, optimizer.state())      # copies, then writes in a thread of its own
    saving.result()                                          # raises what went wrong in the thread
    finish(folder, step, [0, 1], about)                      # once these parts are there: merge, sync, rename
    newest(folder); state = load(path, names); about = read_about(path)

`folder/step-000020` is one ordinary `torch.distributed.checkpoint`: `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`
(and `exponent.NAME`) with full-model names, so any split into stages reads it, and so does `dcp.load`. It appears by a
rename, after everything in it has reached the disk: a save that was killed leaves `step-000020.tmp` and the previous
checkpoint as it was. No collective is used: a stage that dies cannot block the others. A part may hold boxes of tensors
(`NAME@OFFSETS/SHAPE`, as `model.head.weight@128,0/256,64`); in the checkpoint they are the tensors' chunks, as any
sharded save of torch has them.

(A little longer than other files: what reads checkpoints must know what writes them.)
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import threading
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from enum import Enum, EnumMeta
from math import prod
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings

from .checksum import fingerprint

TOGETHER = "together.json"  # in a part: the tensors of which it and others hold boxes


def _dcp() -> Any:
    """torch.distributed.checkpoint, imported when it is needed: it takes a second, which no start should pay."""
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return dcp


class Saver:
    """Writes one worker's parts of checkpoints, one after the other."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._saving: Future[None] = Future()
        self._saving.set_result(None)

    def save(
        self, step: int, part: object, state: Mapping[str, Tensor], together: Collection[str] = ()
    ) -> Future[None]:
        """Copies `state` and returns; a thread writes the copy to step-STEP.tmp/stage-PART, once the last save has
        ended. The future ends when it is on disk, or with RuntimeError if it cannot be written.

        together: the tensors of which this part and others hold boxes, each worker its own."""
        copy = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        before, self._saving = self._saving, Future()
        place = temporary(self._folder, step) / f"stage-{part}"
        arguments = (self._saving, before, place, copy, sorted(together))
        threading.Thread(target=_write_part, args=arguments, name="checkpoint", daemon=True).start()
        return self._saving

    @property
    def busy(self) -> bool:
        """The last part is not written yet: on a disk that is slow, or a file system that does not answer."""
        return not self._saving.done()

    def wait(self) -> None:
        """Until the last part is on disk; RuntimeError if it could not be written."""
        self._saving.result()


def _write_part(
    saving: Future[None], before: Future[None], part: Path, state: dict[str, Tensor], together: list[str]
) -> None:
    futures.wait([before])
    try:
        dcp = _dcp()
        shutil.rmtree(part, ignore_errors=True)  # of a save that was killed
        # Nothing to copy ahead: with more than 0 bytes of it torch makes a CUDA context on GPU 0 in this thread.
        writer = dcp.FileSystemWriter(part, per_thread_copy_ahead=0)
        dcp.save(state, storage_writer=writer, no_dist=True)
        (part / TOGETHER).write_text(json.dumps(together))
    except BaseException as error:  # torch's CheckpointException is no Exception
        failures = getattr(error, "failures", None)  # ... and holds the real one, with a traceback, by rank
        cause = failures[0][0] if failures else error
        saving.set_exception(RuntimeError(f"the checkpoint part {part} could not be written: {cause}"))
    else:
        saving.set_result(None)


def finish(folder: str | Path, step: int, names: Sequence[object], about: Mapping[str, Any]) -> Path:
    """Makes these parts one checkpoint and gives it its name; returns the folder.

    about: JSON that a resume wants to know, see `describe`. ValueError: some tensor, or a box of it, is in none of the
    parts.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    place = temporary(folder, step)
    parts = [place / f"stage-{part}" for part in names]
    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    paths: dict[str, Any] = {}
    for part in parts:
        metadata = _metadata(part)
        for index, info in (metadata.storage_data or {}).items():
            info.relative_path = f"{part.name}/{info.relative_path}"
            tensor, whole, where = _boxed(index, metadata.state_dict_metadata[index.fqn])
            if where not in storage:  # else another holder has written it too
                storage[where] = info
                known = tensors.setdefault(tensor, whole)
                known.chunks += whole.chunks if known is not whole else []
            paths[tensor] = (tensor,)
    _check_whole(tensors, {tensor for part in parts for tensor in json.loads((part / TOGETHER).read_text())})
    merged = Metadata(tensors, paths, storage, version=_metadata(parts[0]).version)
    _write_synced(place / ".metadata", pickle.dumps(merged))
    for part in parts:
        (part / ".metadata").unlink()
        (part / TOGETHER).unlink()
        _sync(part)
    files = {str(p.relative_to(place)): fingerprint(p) for p in sorted(place.rglob("*")) if p.is_file()}
    _write_synced(place / "about.json", json.dumps({"step": step, **about, "files": files}, indent=1).encode())
    _sync(place)
    final, replaced = Path(folder) / name(step), Path(folder) / f"{name(step)}.replaced.tmp"
    if final.exists():  # the job was restored from an older one and came here again
        final.rename(replaced)
    place.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _boxed(index: Any, of: Any) -> tuple[str, Any, Any]:
    """(tensor, what is known of it, where in it) of what a part calls `index`: all of the tensor, or a box of it."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

    if "@" not in index.fqn:
        return index.fqn, of, index
    name, _, place = index.fqn.rpartition("@")
    offsets, shape = (torch.Size(map(int, filter(None, text.split(",")))) for text in place.split("/"))
    whole = TensorStorageMetadata(of.properties, shape, [ChunkStorageMetadata(offsets, of.size)])
    return name, whole, MetadataIndex(name, offsets)


def _check_whole(tensors: Mapping[str, Any], together: Collection[str]) -> None:
    """Boxes are the blocks of a layout: no two of them have an element in common."""
    if gone := sorted(together - tensors.keys()):
        raise ValueError(f"nothing of {gone[0]} was saved: who held it has died")
    for name, of in tensors.items():
        there = sum(prod(chunk.sizes) for chunk in of.chunks)
        if there != prod(of.size):
            raise ValueError(
                f"only {there} of the {prod(of.size)} elements of {name} were saved: who held the others has died"
            )


def name(step: int) -> str:
    return f"step-{step:06d}"


def temporary(folder: str | Path, step: int) -> Path:
    """Where the parts of a save lie until it is finished."""
    return Path(folder) / f"{name(step)}.tmp"


def complete(folder: str | Path) -> list[Path]:
    """The finished checkpoints in `folder`, oldest first."""
    found = [path for path in Path(folder).glob("step-*") if path.suffix != ".tmp" and (path / ".metadata").exists()]
    return sorted(found, key=_step)


def newest(folder: str | Path) -> Path | None:
    """The newest finished checkpoint in `folder`, or None."""
    return found[-1] if (found := complete(folder)) else None


def prune(folder: str | Path, keep: int) -> None:
    """Deletes all finished checkpoints but the newest `keep`, and what killed saves left of older steps."""
    for path in complete(folder)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
    last = newest(folder)
    for path in Path(folder).glob("step-*.tmp"):
        if last is not None and _step(path) < _step(last):
            shutil.rmtree(path, ignore_errors=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def load(path: str | Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors `names` (all by default) of a checkpoint, each whole, whatever split wrote it.

    Raises:
        ValueError: a name that the checkpoint does not hold, or a table of contents that is none.
    """
    dcp = _dcp()
    held = _metadata(path).state_dict_metadata
    state: dict[str, Any] = {}
    for key in held if names is None else names:
        if key not in held:
            raise ValueError(f"the checkpoint {path} does not hold {key}")
        if type(held[key]).__name__ != "TensorStorageMetadata":
            raise ValueError(f"the checkpoint {path} holds {key}, and not as a tensor")
        state[key] = torch.empty(held[key].size, dtype=held[key].properties.dtype)
    dcp.load(state, storage_reader=_reader(path), no_dist=True)
    return state


def shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint; reads its table of contents only."""
    return {name: tuple(held.size) for name, held in _metadata(path).state_dict_metadata.items()}


def describe(settings: Settings, fingerprint: str) -> dict[str, Any]:
    """What must not change between a checkpoint and its resume, by configuration key; `fingerprint` is the data's."""
    model, parallel = settings.model, settings.parallel
    keys = [
        "layers",
        "width",
        "heads",
        "kv_heads",
        "ffn",
        "sequence",
        "vocabulary",
        "rope_theta",
        "norm_eps",
        "dropout",
    ]
    if not model.own:
        keys = ["kind", "build", "loss", "path", "init", "layers", "sequence", "vocabulary"]
    return {
        **{f"model.{key}": getattr(model, key) for key in keys},
        "parallel.microbatch_size": parallel.microbatch_size,
        "parallel.pipelines * parallel.microbatches": parallel.pipelines * parallel.microbatches,
        "numerics.reproducible": settings.numerics.reproducible,
        "numerics.sums": settings.numerics.sums,
        "run.seed": settings.run.seed,
        "data.path (its contents)": fingerprint,
    }


_ONCE = {"numerics.sums": "int64"}  # what checkpoints had that do not say it


def read_about(path: str | Path) -> dict[str, Any]:
    """The JSON that `finish` was given, and `step`: the number of steps done."""
    return json.loads((Path(path) / "about.json").read_text())


def refuse_mismatch(path: str | Path, now: Mapping[str, Any]) -> None:
    """Raises ValueError with one sentence if the checkpoint was written under settings that do not go with `now`."""
    saved = read_about(path)
    for key, value in now.items():
        was = saved.get(key, _ONCE.get(key))
        if was != value:
            raise ValueError(f"cannot resume from {path}: {key} was {was} and is now {value}")


def _metadata(path: str | Path) -> Any:
    """A checkpoint's table of contents. torch keeps it as a pickle; only classes that it is made of are let in.

    ValueError, one sentence, for anything else: whoever wrote the file decides what an ordinary unpickler runs.
    """
    content = (Path(path) / ".metadata").read_bytes()
    try:
        table = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a pickle that is none can fail in any way
        raise ValueError(f"{path} is no checkpoint that can be read: {error or type(error).__name__}") from error
    if type(table).__name__ != "Metadata" or not isinstance(table.state_dict_metadata, dict):
        raise ValueError(f"{path} is no checkpoint that can be read: its .metadata is no table of contents")
    return table


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:  # exactly: pickle reads a dotted name as attributes of attributes
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickle a member of an Enum
            return _member
        if (module, name) == ("pathlib._local", "PosixPath"):  # where Python 3.13 has it
            return PosixPath
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"a checkpoint's metadata names {module}.{name}, which has no place there")


def _member(kind: Any, name: str) -> Enum:
    """An enum's member by name: the only use of `getattr` that is let through."""
    if not isinstance(kind, EnumMeta) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"a checkpoint's metadata asks for {name} of {kind}, which has no place there")
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


def _reader(path: str | Path) -> Any:
    class Reader(_dcp().FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return _metadata(path)

    return Reader(path)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
