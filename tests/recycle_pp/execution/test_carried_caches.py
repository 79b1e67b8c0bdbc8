"""Compiled kernels are copied between machines intact, despite concurrent writers, torn files and different paths."""

import hashlib
import importlib
import json
import os
import threading
import zlib
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recycle_kernels.compile import SHAPE
from recycle_kernels.compile import _pretend as pretend
from recycle_kernels.launches import launches

from recycle_pp.execution import carried_caches
from recycle_pp.execution.carried_caches import Carried, CarriedCaches, Carrier
from recycle_pp.execution.compile_caches import compiling

SMALL = replace(SHAPE, batch=1, sequence=64, width=64, heads=2, kv_heads=1, ffn=128, vocabulary=0)


def machine(tmp_path, name):
    """The caches of a machine. All machines share one folder."""
    return CarriedCaches(tmp_path / "shared", {"triton": tmp_path / name})


def compiled(cache, key="KERNEL", text="code"):
    """Writes a cache entry in Triton's format. Returns its folder."""
    entry = cache / key
    entry.mkdir(parents=True)
    for name in ("kernel.cubin", "kernel.json"):
        (entry / name).write_text(f"{text} {name}")
    paths = {name: str(entry / name) for name in os.listdir(entry)}
    (entry / "__grp__kernel.json").write_text(json.dumps({"child_paths": paths}))
    return entry


def packed(tmp_path):
    return sorted((tmp_path / "shared" / "triton").iterdir())


def test_an_entry_arrives_with_the_paths_of_the_other_machine(tmp_path):
    a, b = machine(tmp_path, "a"), machine(tmp_path, "b")
    compiled(tmp_path / "a")
    assert a.write().entries == 1 and a.write().entries == 0, "an entry is written once"
    assert b.read().entries == 1 and b.read() == Carried(), "an entry is read once"
    assert (tmp_path / "b/KERNEL/kernel.cubin").read_text() == "code kernel.cubin"
    paths = json.loads((tmp_path / "b/KERNEL/__grp__kernel.json").read_text())["child_paths"]
    assert set(paths.values()) == {str(tmp_path / "b/KERNEL" / name) for name in ("kernel.cubin", "kernel.json")}
    assert os.listdir(tmp_path / "b") == ["KERNEL"] and b.write() == Carried(), (
        "an entry from another machine is not written"
    )


def test_earlier_and_unfinished_entries_are_not_written(tmp_path):
    os.utime(compiled(tmp_path / "a", "OLD"), (1e9, 1e9))
    (compiled(tmp_path / "a", "UNFINISHED") / "__grp__kernel.json").unlink()
    (compiled(tmp_path / "a", "WRITING") / "tmp.pid_7_x").mkdir()
    (tmp_path / "a" / "LAUNCHER").mkdir()
    (tmp_path / "a" / "LAUNCHER" / "launcher.so").write_bytes(b"elf")
    assert machine(tmp_path, "a").write().entries == 1
    assert [path.name for path in packed(tmp_path)] == ["LAUNCHER.entry"]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), flipped=st.integers(0, 255))
def test_a_torn_or_damaged_file_is_never_used_and_is_written_again(tmp_path_factory, share, flipped):
    """flipped: the bits to flip in the byte at `share` of the file; 0: truncate the file there."""
    tmp_path = tmp_path_factory.mktemp("torn")
    a, b = machine(tmp_path, "a"), machine(tmp_path, "b")
    compiled(tmp_path / "a")
    a.write()
    (path,) = packed(tmp_path)
    whole = path.read_bytes()
    at = int(share * len(whole))  # a share, because the length depends on the name of the folder
    path.write_bytes(whole[:at] + (bytes([whole[at] ^ flipped]) + whole[at + 1 :] if flipped else b""))
    assert b.read() == Carried(damaged=1) and not (tmp_path / "b/KERNEL").exists() and not packed(tmp_path)
    assert a.write().entries == 1 and b.read().entries == 1


def test_an_entry_with_a_file_outside_its_folder_counts_as_damaged(tmp_path):
    (tmp_path / "shared/triton").mkdir(parents=True)
    content = zlib.compress(msgspec.msgpack.encode({"../../evil": b"x"}))
    (tmp_path / "shared/triton/KERNEL.entry").write_bytes(hashlib.sha256(content).digest() + content)
    assert machine(tmp_path, "b").read().damaged == 1 and not (tmp_path / "evil").exists()


def test_many_machines_may_write_and_read_at_once(tmp_path):
    keys, count = [f"KERNEL{n}" for n in range(20)], 6
    caches = [machine(tmp_path, f"m{n}") for n in range(count)]
    for n in range(count):
        for key in keys[n::2]:
            compiled(tmp_path / f"m{n}", key)
    failed = []

    def play(carried):
        try:
            for _ in range(3):
                carried.write()
                assert carried.read().damaged == 0
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=play, args=(carried,)) for carried in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and [path.name for path in packed(tmp_path)] == sorted(f"{key}.entry" for key in keys)
    late = machine(tmp_path, "late")
    assert late.read().entries == len(keys) and sorted(os.listdir(tmp_path / "late")) == sorted(keys)


def test_an_unusable_folder_is_reported_once_in_the_log(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(carried_caches, "folders", lambda: {"triton": tmp_path / "a"})
    said = []
    carrier = Carrier(str(tmp_path / "file"), said.append)
    carrier.read()
    compiled(tmp_path / "a")
    carrier._try("written to", CarriedCaches.write)
    assert len(said) == 1 and "nothing was written to the folder" in said[0] and "Not a directory" in said[0]


def test_without_a_folder_nothing_happens():
    carrier = Carrier(None, pytest.fail)
    carrier.read()
    carrier.write()


@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="Triton interprets in this process")
def test_triton_compiles_no_kernel_that_another_machine_has_compiled(tmp_path, monkeypatch):
    a, b = machine(tmp_path, "a"), machine(tmp_path, "b")
    assert kernels_compiled_in(tmp_path / "a", monkeypatch)
    a.write()
    (tmp_path / "a").rename(tmp_path / "gone")  # so that paths stored in the cache no longer work
    assert b.read().entries >= 1 and not kernels_compiled_in(tmp_path / "b", monkeypatch)
    assert kernels_compiled_in(tmp_path / "empty", monkeypatch), "this process must not keep them itself"


def kernels_compiled_in(cache, monkeypatch):
    """The kernels that Triton compiles for one launch, for a GPU that is not present."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    kernels = importlib.import_module("recycle_kernels.rms_norm")  # because the package has a function of this name
    seconds = {}
    with compiling(seconds), pretend(90):
        launches(SMALL, torch.device("meta"))["norm"]()
    for kernel in (kernels._forward_kernel, kernels._backward_kernel):
        kernel.device_caches.clear()
    return seconds
