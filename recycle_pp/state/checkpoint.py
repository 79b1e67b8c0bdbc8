"""Writes and reads checkpoints. Workers save parts asynchronously; these are merged into a folder in torch's format.

    saver = Saver(folder)                                    # in each worker that saves
    saving = saver.save(step, stage, optimizer.state())      # copies the state, then writes it in a thread
    part = saving.result()                                   # name of the part; raises the thread's error
    finish(folder, step, [part, ...], about)                 # after all parts are saved: merge, check, sync, rename
    state = load(path, names); about = read_about(path)

`folder/step-000020` is an ordinary `torch.distributed.checkpoint` with the tensors `model.NAME`, `exponent.NAME`, and
`VECTOR.NAME` for each state vector of the optimizer (AdamW: `exp_avg`, `exp_avg_sq`). Names are those of the full
model, so the checkpoint can be loaded by `dcp.load` and by a run with any split into stages.

The folder gets its final name when all of its content is on disk. A killed save leaves `step-000020.tmp` and does not
touch the previous checkpoint. Each save writes a part into a new folder, and `finish` uses only the given parts, so
leftovers of a killed save never enter a checkpoint. Saving uses no collective, so a dying stage cannot block the other
stages.

A part may contain boxes, which are rectangular blocks of tensors (`NAME@OFFSETS/SHAPE`, such as
`model.head.weight@128,0/256,64`). The checkpoint stores boxes as chunks, as torch does for any sharded checkpoint.
"""

from __future__ import annotations

import json
import pickle
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from recycle_pp.config.settings import Settings
from recycle_pp.telemetry.checkpoint_folders import finished, name, step_of, temporary
from recycle_pp.wire.files import UnreadableFile, decode, read
from recycle_pp.wire.messages.islands import OuterState
from recycle_pp.wire.records import About

from .checksum import ABOUT, TABLE, fingerprint
from .replacing import delete_unfinished, rename, sync, write_synced
from .table_of_contents import check_chunks, check_files, read_table

POSITION = "islands (applied, begun, sent)"  # key in about.json
TOGETHER = "together.json"  # file in a part: names of the tensors that several parts save together


def _dcp() -> Any:
    """torch.distributed.checkpoint. Imported on first use, because the import takes a second."""
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    return dcp


class Saver:
    """Writes one worker's parts of checkpoints, one at a time."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._saving: Future[str] = Future()
        self._saving.set_result("")

    def save(
        self,
        step: int,
        part: object,
        state: Mapping[str, Tensor],
        together: Collection[str] = (),
        final: bool = False,
        in_use: Collection[int] | None = None,
    ) -> Future[str]:
        """Copies `state` and returns. A thread then writes the copy to the folder step-STEP.tmp/stage-PART-RANDOM. It
        waits until earlier saves of this object have ended.

        together: names of all tensors that the workers of this stage save together, each worker only its own boxes;
            `finish` fails if one of these tensors is in no part
        final: whether `state` will never change again; if so, tensors on the CPU are not copied
        in_use: steps of older checkpoints that are still being written or uploaded. The thread first deletes all other
            older unfinished checkpoints, because they may fill the disk. None: it deletes nothing

        The future's result is the name of the part's folder, available when the part is on disk. The future raises
        RuntimeError if the part cannot be written.
        """
        copy = {name: tensor.detach().to("cpu", copy=not final) for name, tensor in state.items()}
        before, self._saving = self._saving, Future()
        place = temporary(self._folder, step) / f"stage-{part}-{secrets.token_hex(4)}"
        clear = partial(delete_unfinished, self._folder, 0 if in_use is None else step, in_use or ())
        arguments = (self._saving, before, place, copy, sorted(together), clear)
        threading.Thread(target=_write_part, args=arguments, name="checkpoint", daemon=True).start()
        return self._saving

    @property
    def busy(self) -> bool:
        """Whether the most recent part is still being written. It stays True if the disk does not respond."""
        return not self._saving.done()

    def wait(self) -> str:
        """Blocks until the most recent part is on disk. Returns the name of the part's folder.

        Raises RuntimeError if the part could not be written."""
        return self._saving.result()


def _write_part(
    saving: Future[str],
    before: Future[str],
    part: Path,
    state: dict[str, Tensor],
    together: list[str],
    clear: Callable[[], None],
) -> None:
    futures.wait([before])
    try:
        clear()
        dcp = _dcp()
        # If per_thread_copy_ahead is not 0, torch creates a CUDA context on GPU 0 in this thread.
        writer = dcp.FileSystemWriter(part, per_thread_copy_ahead=0)
        dcp.save(state, storage_writer=writer, no_dist=True)
        (part / TOGETHER).write_text(json.dumps(together))
    except BaseException as error:  # torch's CheckpointException is not an Exception
        failures = getattr(error, "failures", None)  # the original errors, by rank
        cause = failures[0][0] if failures else error
        shutil.rmtree(part, ignore_errors=True)  # on a full disk, it would take the room of the next save
        saving.set_exception(RuntimeError(f"the checkpoint part {part} could not be written: {cause}"))
    else:
        saving.set_result(part.name)


def finish(folder: str | Path, step: int, parts: Sequence[str], about: Mapping[str, Any]) -> Path:
    """Merges parts into one checkpoint. Returns its folder. If the calling worker dies, another worker may call this,
    even if the checkpoint was finished before the death.

    parts  names that `Saver.save` returned
    about  JSON for a resume, see `describe`

    Raises ValueError if a tensor or a box is missing from all parts, or if a file is too short.
    """
    place, final = temporary(folder, step), Path(folder) / name(step)
    # Already finished, because names of parts contain a random number, so no other checkpoint has these parts.
    if not place.is_dir() and any((final / part).is_dir() for part in parts):
        return final
    table, data = merged(place, parts)
    write_synced(place / TABLE, table)
    check_files(place)
    files = {name: fingerprint(place / name) for name in sorted({TABLE, *data})}
    write_synced(place / ABOUT, json.dumps({"step": step, **about, "files": files}, indent=1).encode())
    for part in parts:
        sync(place / part)
    sync(place)
    rename(place, final)
    _delete_all_but(final, {ABOUT, *files})
    return final


def merged(place: Path, parts: Sequence[str]) -> tuple[bytes, set[str]]:
    """(content of `.metadata` for all parts together, paths of the files with tensors, relative to `place`).

    Reads the parts' tables of contents, but no tensors. Raises ValueError if a tensor or a box is missing from all
    parts."""
    from torch.distributed.checkpoint.metadata import Metadata

    tensors: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for part in parts:
        metadata = read_table(place / part)
        for index, info in (metadata.storage_data or {}).items():
            info.relative_path = f"{part}/{info.relative_path}"
            tensor, whole, where = _boxed(index, metadata.state_dict_metadata[index.fqn])
            if where not in storage:  # another holder may have saved the same box in its part
                storage[where] = info
                known = tensors.setdefault(tensor, whole)
                known.chunks += whole.chunks if known is not whole else []
    _check_whole(tensors, {tensor for part in parts for tensor in json.loads((place / part / TOGETHER).read_text())})
    paths = {tensor: (tensor,) for tensor in tensors}
    table = Metadata(tensors, paths, storage, version=read_table(place / parts[0]).version)
    return pickle.dumps(table), {info.relative_path for info in storage.values()}


def _delete_all_but(final: Path, files: Collection[str]) -> None:
    """Deletes all files in the folder `final` except `files` (paths relative to it): leftovers of killed saves of this
    step, and the parts' own tables of contents."""
    for path in sorted(final.rglob("*"), reverse=True):  # a folder after its content
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # the folder is not empty
                path.rmdir()
        elif str(path.relative_to(final)) not in files:
            with suppress(OSError):
                path.unlink()


def _boxed(index: Any, of: Any) -> tuple[str, Any, Any]:
    """(tensor name, tensor metadata, index in the merged table) for one entry of a part's table of contents. The entry
    describes a whole tensor or a box.

    index, of: key and value of the entry"""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

    if "@" not in index.fqn:
        return index.fqn, of, index
    name, _, place = index.fqn.rpartition("@")
    offsets, shape = (torch.Size(map(int, filter(None, text.split(",")))) for text in place.split("/"))
    whole = TensorStorageMetadata(of.properties, shape, [ChunkStorageMetadata(offsets, of.size)])
    return name, whole, MetadataIndex(name, offsets)


def _check_whole(tensors: Mapping[str, Any], together: Collection[str]) -> None:
    """Raises ValueError unless all elements of all tensors were saved. Compares numbers of elements, which is enough
    because boxes never overlap."""
    if gone := sorted(together - tensors.keys()):
        raise ValueError(f"{gone[0]} was not saved, because all workers that held it died")
    for tensor, of in tensors.items():
        there = sum(prod(chunk.sizes) for chunk in of.chunks)
        if there != prod(of.size):
            raise ValueError(
                f"only {there} of {prod(of.size)} elements of {tensor} were saved, because workers that held "
                "the rest died"
            )


def prune(folder: str | Path, step: int, keep: int, spared: Collection[int | None] = ()) -> None:
    """Deletes checkpoints up to step `step`, whose checkpoint has just been finished, except the newest `keep` and
    those whose steps are in `spared`. Also deletes the folders of older unfinished saves.

    Checkpoints of later steps are neither counted nor deleted. They belong to a later save, or existed before the job
    restarted from an older checkpoint, and may be damaged."""
    older = [path for number, path in finished(Path(folder)).items() if number <= step and (path / TABLE).is_file()]
    for path in older[:-keep]:
        if step_of(path.name) not in spared:
            shutil.rmtree(path, ignore_errors=True)
    delete_unfinished(Path(folder), step, spared)


def load(path: str | Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Name -> whole tensor, loaded from a checkpoint. names: the tensors to load; None: all.

    Raises ValueError for a missing or incomplete tensor, or an invalid table of contents.
    """
    dcp = _dcp()
    table = read_table(path)
    held = table.state_dict_metadata
    state: dict[str, Any] = {}
    for key in held if names is None else names:
        if key not in held:
            raise ValueError(f"the checkpoint {path} does not contain {key}")
        check_chunks(Path(path), key, table)
        state[key] = torch.empty(held[key].size, dtype=held[key].properties.dtype)
    dcp.load(state, storage_reader=_reader(path), no_dist=True)
    return state


def shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint. Reads only its table of contents."""
    return {name: tuple(held.size) for name, held in read_table(path).state_dict_metadata.items()}


def describe(settings: Settings, fingerprint: str, origin: str = "") -> dict[str, Any]:
    """Configuration key -> value, for settings that a resume must not change.

    fingerprint  identifies the data
    origin       identifies the content of model.path, from which frozen parameters are read; "" if none are frozen
    """
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
    frozen = {"model.path (its contents)": origin, "model.lora.alpha": model.lora.alpha} if origin else {}
    return {
        **{f"model.{key}": getattr(model, key) for key in keys},
        **frozen,
        "parallel.microbatch_size": parallel.microbatch_size,
        "parallel.pipelines * parallel.microbatches": parallel.pipelines * parallel.microbatches,
        "numerics.reproducible": settings.numerics.reproducible,
        "numerics.sums": settings.numerics.sums,
        "optimizer.moments": settings.optimizer.moments,
        "run.seed": settings.run.seed,
        "data.path (its contents)": fingerprint,
    }


def position(outer: OuterState | None) -> dict[str, Any]:
    """The entry of about.json with an island's position in the rounds; empty for a job without islands."""
    return {} if outer is None else {POSITION: [outer.applied, outer.begun, outer.sent]}


def position_in(path: str | Path) -> OuterState | None:
    """The island's position in a checkpoint; None if a job without islands saved it. Raises UnreadableFile."""
    found = read_about(path).get(POSITION)
    try:
        return None if found is None else OuterState(*msgspec.convert(found, tuple[int, int, int | None]))
    except msgspec.ValidationError as error:
        raise UnreadableFile(Path(path) / ABOUT, f"{POSITION}: {error}") from None


_ONCE = {"numerics.sums": "int64", "optimizer.moments": "fp32"}  # values for keys that old checkpoints lack


def read_about(path: str | Path) -> dict[str, Any]:
    """The JSON that was given to `finish`, plus `step` (number of completed steps) and `files` (fingerprints).

    Raises UnreadableFile if about.json is missing or damaged.
    """
    file = Path(path) / ABOUT
    try:
        data = read(file)
    except FileNotFoundError:
        raise UnreadableFile(file, "there is no such file") from None
    decode(file, data, About)
    return decode(file, data, dict[str, Any])


def refuse_mismatch(path: str | Path, now: Mapping[str, Any]) -> None:
    """Raises ValueError with one sentence if the checkpoint's settings differ from `now` (see `describe`)."""
    saved = read_about(path)
    for key, value in now.items():
        was = saved.get(key, _ONCE.get(key))
        if isinstance(was, dict | list):
            raise UnreadableFile(Path(path) / ABOUT, f"{key} is nested")
        if was != value:
            written = " ".join(str(was).split())
            raise ValueError(f"cannot resume from {path}: {key} is {written} in the checkpoint and {value} in this run")


def _reader(path: str | Path) -> Any:
    class Reader(_dcp().FileSystemReader):  # type: ignore[misc]
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return read_table(path)

    return Reader(path)
