"""Local copies of stored objects: complete or absent, made once, and up to date with the store."""

import errno
import json
import os
import threading
import time

import pytest

from recycle_pp.storage.local_copy import copy, is_copied, place
from recycle_pp.storage.store import Absent, Store, StoreError

PIECE, SYNCED = 1000, 4000  # bytes, instead of megabytes


@pytest.fixture
def store(server, proxy, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"LOOK_SECONDS": 1.0, "PIECE": PIECE, "SYNCED": SYNCED}.items():
        monkeypatch.setattr(f"recycle_pp.storage.local_copy.{name}", value)
    for name, value in server.environment(proxy.port).items():
        monkeypatch.setenv(name, value)
    return Store(f"s3://bucket/{os.urandom(4).hex()}")


def at_once(count, call):
    """The results of concurrent calls."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_url_names_an_object_a_folder_or_a_pair_with_the_files_beside_it(store):
    for name in ("a.txt", "a.txt.json", "b.bin", "b.bin.json", "pair.bin", "pair.idx", "f/x.txt", "f/g/y.txt"):
        store.put(name, name.encode())
    store.put("f/g", b"")  # an empty object, with which web consoles mark a folder
    beside = {
        "a.txt": {"a.txt"}, "b.bin": {"b.bin", "b.bin.json"},
        "f": {"f/x.txt", "f/g/y.txt"}, "f/": {"f/x.txt", "f/g/y.txt"},
        "pair": {"pair.bin", "pair.idx"}, "pair.bin": {"pair.bin", "pair.idx"}, "pair.idx": {"pair.bin", "pair.idx"},
    }  # fmt: skip
    for name, expected in beside.items():
        path = copy(f"{store.url}/{name}")
        assert path == place(f"{store.url}/{name}") and path.name == name.rstrip("/")
        assert files(path.parent) == {one: one.encode() for one in expected}, name


def test_a_missing_object_is_reported_in_one_sentence(store):
    for name in ("none", "none.bin", "none.idx"):
        with pytest.raises(Absent, match=f"^{store.url}/{name} does not exist$"):
            copy(f"{store.url}/{name}")
        assert not place(f"{store.url}/{name}").exists()
    with pytest.raises(StoreError, match=r"^s3://no-bucket/a.bin: NoSuchBucket \("):
        copy("s3://no-bucket/a.bin")


def test_a_copy_follows_the_store_and_fetches_only_what_has_changed(store, proxy):
    for name in ("f/same", "f/changed", "f/removed"):
        store.put(name, b"old")
    path, asked = copy(f"{store.url}/f"), []
    opened = (path / "changed").open("rb")
    store.put("f/changed", b"new")
    store.delete(["f/removed"])
    proxy.judge = lambda method, path: asked.append(path.rpartition("/")[2]) if "list-type" not in path else None
    assert files(copy(f"{store.url}/f")) == {"same": b"old", "changed": b"new"}
    assert asked == ["changed"] and opened.read() == b"old"  # a job that has the file open keeps reading it
    assert int((path / "changed").stat().st_mtime) == int(store.head("f/changed").modified)


def test_a_killed_copy_continues_and_no_part_of_it_is_seen(store):
    content = os.urandom(2 * SYNCED + PIECE + 3)
    store.put("big", content)
    path, reports = place(f"{store.url}/big"), []

    def killed(done, total):
        assert not path.exists()
        if done > SYNCED + PIECE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(f"{store.url}/big", report=killed)
    assert not is_copied(f"{store.url}/big")
    copy(f"{store.url}/big", report=lambda done, total: reports.append((done, total)))
    assert path.read_bytes() == content
    assert reports[0] == (SYNCED, len(content)) and reports[-1][0] == len(content)


@pytest.mark.parametrize("record", ["", "{}", "[]", '{"upto": 9, "objects": 5}'])
def test_a_copy_with_a_damaged_record_is_made_again(store, record):
    url = f"{store.url}/train.bin"
    store.put("train.bin", b"content")
    path = copy(url)
    (path.parent.parent / "copy.json").write_text(record)
    assert not is_copied(url)
    assert copy(url).read_bytes() == b"content" and is_copied(url)


@pytest.mark.parametrize("answers", [True, False])
def test_a_complete_copy_on_a_full_or_read_only_disk_is_used(answers, store, proxy, monkeypatch):
    url = f"{store.url}/train.bin"
    store.put("train.bin", b"content")
    copy(url)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    if not answers:
        proxy.judge = lambda method, path: 503
    assert copy(url).read_bytes() == b"content"
    proxy.judge = lambda method, path: None
    store.put("train.bin", b"changed")
    with pytest.raises(StoreError, match="No space left on device"):
        copy(url)


def test_a_copy_made_while_the_clock_was_ahead_still_follows_the_store(store):
    url = f"{store.url}/train.bin"
    store.put("train.bin", b"old")
    record = copy(url).parent.parent / "copy.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"asked": time.time() + 3600}))
    store.put("train.bin", b"new")
    assert copy(url).read_bytes() == b"new"


def test_an_object_that_changes_while_it_is_read_is_rejected(store):
    store.put("big", os.urandom(6 * PIECE))
    other = os.urandom(6 * PIECE)
    with pytest.raises(StoreError, match="big: it changed while it was read"):
        copy(f"{store.url}/big", report=lambda done, total: store.put("big", other))
    assert copy(f"{store.url}/big").read_bytes() == other


def test_processes_of_a_machine_fetch_once(store, proxy):
    store.put("a.txt", b"1" * 1000)
    asked = []
    proxy.judge = lambda method, path: asked.append(path) if (method, path[-5:]) == ("GET", "a.txt") else None
    paths = at_once(4, lambda: copy(f"{store.url}/a.txt"))
    assert len(paths) == 4 and len(asked) == 1 and paths[0].read_bytes() == b"1" * 1000


def test_only_one_process_of_a_machine_waits_for_a_silent_store_and_all_take_the_copy(store, proxy, capfd):
    store.put("a.txt", b"1")
    copy(f"{store.url}/a.txt")
    proxy.judge = lambda method, path: 503
    began = time.monotonic()
    assert [path.read_bytes() for path in at_once(4, lambda: copy(f"{store.url}/a.txt"))] == [b"1"] * 4
    assert capfd.readouterr().err.count("; using the copy in") == 1, time.monotonic() - began
    copy(f"{store.url}/a.txt")  # a later start asks again
    assert capfd.readouterr().err.count("; using the copy in") == 1


def test_small_objects_are_copied_without_the_large_ones_and_only_a_complete_copy_replaces_a_silent_store(
    store, proxy, monkeypatch, capfd
):
    monkeypatch.setattr("recycle_pp.storage.local_copy.SMALL", 10)
    store.put("m/config.json", b"{}")
    store.put("m/model.safetensors", b"1" * 100)
    url = f"{store.url}/m"
    assert files(copy(url, small=True)) == {"config.json": b"{}"}
    assert is_copied(url, small=True) and not is_copied(url)
    proxy.judge = lambda method, path: 503
    copy(url, small=True)
    with pytest.raises(StoreError, match="the server answered 503"):
        copy(url)
    proxy.judge = lambda method, path: None
    assert files(copy(url)).keys() == {"config.json", "model.safetensors"}
    proxy.judge = lambda method, path: 503
    assert files(copy(url)).keys() == {"config.json", "model.safetensors"}
    assert f"; using the copy in {place(url)}" in capfd.readouterr().err
