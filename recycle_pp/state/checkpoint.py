"""Checkpoints of a job: every stage writes its part, asynchronously; one folder of torch's own format comes out.

    saver = Saver(folder)                                    # one per worker that saves
    saving = saver.save(step, stage, optimizer.state())      # copies, then writes in a thread of its own
    part = saving.result()                                   # name of the part; raises what went wrong in the thread
    finish(folder, step, [part, ...], about)                 # once all parts are there: merge, check, sync, rename
    newest(folder); state = load(path, names); about = read_about(path)

`folder/step-000020` is one ordinary `torch.distributed.checkpoint`: `model.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME`
(and `exponent.NAME`) with full-model names, so any split into stages reads it, and so does `dcp.load`. It appears by a
rename, after everything in it has reached the disk: a save that was killed leaves `step-000020.tmp` and the previous
checkpoint as it was. Each attempt writes its part into a folder of its own, and only files that these parts name become
part of the checkpoint, so the remains of a killed save never do. No collective is used: a stage that dies cannot block
the others. A part may hold boxes of tensors (`NAME@OFFSETS/SHAPE`, as `model.head.weight@128,0/256,64`); in the
checkpoint they are the tensors' chunks, as any sharded save of torch has them.

(Longer than other files: reading and writing a checkpoint share its format.)
"""

from __future__ import annotations

import io
import json
import os
import pickle
import secrets
import shutil
import threading
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from enum import Enum, EnumMeta
from math import prod
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.checkpoint_folders import finished, name, unfinished
from recycle_pp.wire.files import UnreadableFile, decode, read
from recycle_pp.wire.records import About

from .checksum import ABOUT, fingerprint

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
        self._saving: Future[str] = Future()
        self._saving.set_result("")

    def save(self, step: int, part: object, state: Mapping[str, Tensor], together: Collection[str] = ()) -> Future[str]:
        """Copies `state` and returns; a thread writes the copy to a new folder step-STEP.tmp/stage-PART-..., once the
        last save has ended. The future returns the folder's name when it is on disk; RuntimeError if it cannot be
        written.

        together: the tensors of which this part and others hold boxes, each worker its own."""
        copy = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        before, self._saving = self._saving, Future()
        place = temporary(self._folder, step) / f"stage-{part}-{secrets.token_hex(4)}"
        arguments = (self._saving, before, place, copy, sorted(together))
        threading.Thread(target=_write_part, args=arguments, name="checkpoint", daemon=True).start()
        return self._saving

    @property
    def busy(self) -> bool:
        """The last part is not written yet: on a disk that is slow, or a file system that does not answer."""
        return not self._saving.done()

    def wait(self) -> str:
        """Blocks until the last part is on disk; its name. RuntimeError if it could not be written."""
        return self._saving.result()


def _write_part(
    saving: Future[str], before: Future[str], part: Path, state: dict[str, Tensor], together: list[str]
) -> None:
    futures.wait([before])
    try:
        dcp = _dcp()
        # Nothing to copy ahead: with more than 0 bytes of it torch makes a CUDA context on GPU 0 in this thread.
        writer = dcp.FileSystemWriter(part, per_thread_copy_ahead=0)
        dcp.save(state, storage_writer=writer, no_dist=True)
        (part / TOGETHER).write_text(json.dumps(together))
    except BaseException as error:  # torch's CheckpointException is no Exception
        failures = getattr(error, "failures", None)  # ... and holds the real one, with a traceback, by rank
        cause = failures[0][0] if failures else error
        saving.set_exception(RuntimeError(f"the checkpoint part {part} could not be written: {cause}"))
    else:
        saving.set_result(part.name)


def finish(folder: str | Path, step: int, parts: Sequence[str], about: Mapping[str, Any]) -> Path:
    """Makes these parts, by the names that `Saver.save` returned, one checkpoint and gives it its name; returns the
    folder. May be repeated by another worker if the first one dies meanwhile.

    about: JSON that a resume needs to know, see `describe`. ValueError: some tensor, or a box of it, is in none of the
    parts, or a file is shorter than the table of contents requires.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    place = temporary(folder, step)
    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for part in parts:
        metadata = _metadata(place / part)
        for index, info in (metadata.storage_data or {}).items():
            info.relative_path = f"{part}/{info.relative_path}"
            tensor, whole, where = _boxed(index, metadata.state_dict_metadata[index.fqn])
            if where not in storage:  # else another holder has written it too
                storage[where] = info
                known = tensors.setdefault(tensor, whole)
                known.chunks += whole.chunks if known is not whole else []
    _check_whole(tensors, {tensor for part in parts for tensor in json.loads((place / part / TOGETHER).read_text())})
    paths = {tensor: (tensor,) for tensor in tensors}
    merged = Metadata(tensors, paths, storage, version=_metadata(place / parts[0]).version)
    _write_synced(place / ".metadata", pickle.dumps(merged))
    _check_files(place)
    names = sorted({".metadata", *(info.relative_path for info in storage.values())})
    files = {name: fingerprint(place / name) for name in names}
    _write_synced(place / ABOUT, json.dumps({"step": step, **about, "files": files}, indent=1).encode())
    for part in parts:
        _sync(place / part)
    _sync(place)
    final = _rename(place, Path(folder) / name(step))
    _delete_all_but(final, {ABOUT, *files})
    return final


def _rename(place: Path, final: Path) -> Path:
    """Gives a finished checkpoint its name; one of the same name goes (the job was restored from an older one)."""
    replaced = final.with_name(f"{final.name}.replaced.tmp")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    place.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _delete_all_but(final: Path, files: Collection[str]) -> None:
    """Deletes what killed saves of this step have left, and the parts' own tables of contents."""
    for path in sorted(final.rglob("*"), reverse=True):  # a folder after what is in it
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # not empty
                path.rmdir()
        elif str(path.relative_to(final)) not in files:
            with suppress(OSError):
                path.unlink()


def _check_files(path: Path) -> None:
    """ValueError if the table of contents of `path` names bytes that are not there, or lacks a chunk."""
    table = _metadata(path)
    for key in table.state_dict_metadata:
        _check_chunks(path, key, table)
    ends: dict[str, int] = {}
    for info in table.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for file, end in ends.items():
        size = (path / file).stat().st_size
        if size < end:
            raise ValueError(f"{path / file} has {size} bytes, not the {end} that its table of contents names")


def _check_chunks(path: Path, key: str, table: Any) -> None:
    """ValueError, one sentence: `key` is not a tensor all of whose elements are stored."""
    held = table.state_dict_metadata[key]
    if type(held).__name__ != "TensorStorageMetadata":
        raise ValueError(f"the checkpoint {path} holds {key}, and not as a tensor")
    size = tuple(held.size)
    stored = {(index.fqn, tuple(index.offset or ())) for index in table.storage_data or {}}
    elements = 0
    for chunk in {tuple(chunk.offsets): chunk for chunk in held.chunks}.values():
        ends = [offset + length for offset, length in zip(chunk.offsets, chunk.sizes, strict=True)]
        inside = (
            len(ends) == len(size) and all(map(int.__le__, ends, size)) and min((0, *chunk.offsets, *chunk.sizes)) == 0
        )
        # A tensor that was saved whole is stored without an offset.
        there = (key, tuple(chunk.offsets)) in stored or ((key, ()) in stored and tuple(chunk.sizes) == size)
        if inside and there:
            elements += prod(chunk.sizes)
    if elements != prod(size) or min((0, *size)) < 0:
        raise ValueError(
            f"the checkpoint {path} lacks a part of {key}: {elements} of its {prod(size)} elements are stored"
        )


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
        raise ValueError(f"nothing of {gone[0]} was saved: its holders have died")
    for tensor, of in tensors.items():
        there = sum(prod(chunk.sizes) for chunk in of.chunks)
        if there != prod(of.size):
            raise ValueError(
                f"only {there} of the {prod(of.size)} elements of {tensor} were saved: the holders of "
                "the others have died"
            )


def temporary(folder: str | Path, step: int) -> Path:
    """Where the parts of a save lie until it is finished."""
    return Path(folder) / f"{name(step)}.tmp"


def complete(folder: str | Path) -> list[Path]:
    """The finished checkpoints in `folder`, oldest first."""
    return [path for path in finished(Path(folder)).values() if (path / ".metadata").is_file()]


def newest(folder: str | Path) -> Path | None:
    """The newest finished checkpoint in `folder`, or None."""
    return found[-1] if (found := complete(folder)) else None


def prune(folder: str | Path, keep: int) -> None:
    """Deletes all finished checkpoints but the newest `keep`, and what killed saves have left of older steps."""
    for path in complete(folder)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
    last = max(finished(Path(folder)), default=0)
    for path, step in unfinished(Path(folder)).items():
        if step < last:
            shutil.rmtree(path, ignore_errors=True)


def load(path: str | Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """The tensors `names` (all by default) of a checkpoint, each whole, whatever split wrote it.

    Raises:
        ValueError: a name that the checkpoint does not hold, a tensor that is not all there, or an invalid table of
            contents.
    """
    dcp = _dcp()
    table = _metadata(path)
    held = table.state_dict_metadata
    state: dict[str, Any] = {}
    for key in held if names is None else names:
        if key not in held:
            raise ValueError(f"the checkpoint {path} does not hold {key}")
        _check_chunks(Path(path), key, table)
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
    """The JSON that `finish` was given, and `step`: the number of steps done.

    Raises:
        UnreadableFile: it is missing or damaged.
    """
    file = Path(path) / ABOUT
    try:
        data = read(file)
    except FileNotFoundError:
        raise UnreadableFile(file, "there is no such file") from None
    decode(file, data, About)
    return decode(file, data, dict[str, Any])


def refuse_mismatch(path: str | Path, now: Mapping[str, Any]) -> None:
    """Raises ValueError with one sentence if the checkpoint was written under settings that do not go with `now`."""
    saved = read_about(path)
    for key, value in now.items():
        was = saved.get(key, _ONCE.get(key))
        if isinstance(was, dict | list):
            raise UnreadableFile(Path(path) / ABOUT, f"{key} is nested")
        if was != value:
            written = " ".join(str(was).split())
            raise ValueError(f"cannot resume from {path}: {key} was {written} and is now {value}")


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
