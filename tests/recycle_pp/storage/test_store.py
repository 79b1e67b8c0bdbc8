"""An object store behaves in the same way on S3 and in a folder."""

import errno
import os
import re
from pathlib import Path

import pytest

from recycle_pp.storage.store import PIECE, Absent, Store, StoreError
from recycle_pp.testing.s3_server import Proxy


@pytest.fixture
def on(server, monkeypatch):
    """A function that sets the environment of clients, as users do. Argument: the port of a proxy, if any."""

    def set_environment(port=None):
        for name, value in server.environment(port).items():
            monkeypatch.setenv(name, value)

    return set_environment


@pytest.fixture(params=["s3", "folder"])
def store(request, on, tmp_path):
    on()
    return Store(f"s3://bucket/{os.urandom(4).hex()}/" if request.param == "s3" else f"{tmp_path}/store", patience=1)


def test_objects_are_listed_with_their_sizes_and_read_in_ranges(store):
    store.put("a/b/c", b"0123456789")
    store.put("a/d", b"")
    assert store.list() == {"a/b/c": 10, "a/d": 0} and store.list("a/b") == {"a/b/c": 10}
    assert store.folders() == {"a"} and store.folders("a") == {"b"} and store.folders("none") == set()
    assert (store.get("a/b/c"), store.get_range("a/b/c", 3, 4), store.size("a/b/c")) == (b"0123456789", b"3456", 10)


@pytest.mark.parametrize("first", ["put", "put_file", "put_if_absent", "probe"])
def test_a_folder_is_made_by_the_first_write_and_not_by_readers(first, tmp_path):
    reader, writer = (Store(f"{tmp_path}/a/store", patience=1) for _ in range(2))
    for store in (reader, writer):
        assert store.list() == {} and store.folders() == set()
        with pytest.raises(Absent, match="/a/store/b/c does not exist"):
            store.get("b/c")
        store.delete(["b/c", "d"])
    assert list(tmp_path.iterdir()) == []
    (file := tmp_path / "file").write_bytes(b"1")
    getattr(writer, first)(*{"probe": (), "put_file": ("b/c", file)}.get(first, ("b/c", b"1")))
    assert (tmp_path / "a" / "store").is_dir()
    assert reader.list() == ({} if first == "probe" else {"b/c": 1})
    assert first == "probe" or reader.get("b/c") == b"1"


def test_a_folder_that_does_not_answer_is_an_error_and_not_an_empty_store(tmp_path, monkeypatch):
    """Otherwise a resume would find no checkpoint and start from the beginning."""

    def fail(path):
        raise OSError(errno.ESTALE, "Stale file handle")

    store = Store(f"{tmp_path}/store")
    store.put("a", b"1")
    monkeypatch.setattr(Path, "exists", fail)
    for read in (store.list, store.folders, lambda: Store(f"{tmp_path}/store")):
        with pytest.raises(StoreError, match="Stale file handle"):
            read()


@pytest.mark.parametrize("url", ["s3://", "gs://", "az://", "file://"])
def test_a_url_without_a_bucket_or_folder_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=f"^{url} names no bucket or folder; allowed are "):
        Store(url)
    assert list(tmp_path.iterdir()) == []


def test_put_if_absent_keeps_the_first_content(store):
    assert [store.put_if_absent("seal", content) for content in (b"1", b"2", b"1")] == [True, False, True]
    assert store.get("seal") == b"1"


def test_a_missing_object_is_absent_and_may_be_deleted(store):
    store.put("there", b"1")
    for request in (store.get, store.size):
        with pytest.raises(Absent, match=f"{store.url}/none does not exist"):
            request("none")
    store.delete(["none", "there", "none either"])
    assert store.list() == {}


def test_a_file_of_several_pieces_is_read_back_unchanged(store, tmp_path):
    file, back = tmp_path / "file", tmp_path / "back"
    file.write_bytes(os.urandom(5 * PIECE + 1))
    store.put_file("file", file)
    pieces = []
    store.get_file("file", back, lambda: pieces.append(1))
    assert back.read_bytes() == file.read_bytes() and len(pieces) == 6


def test_a_probe_leaves_no_object_behind(store):
    store.probe()
    assert store.list() == {}


def test_a_request_is_repeated_while_the_server_fails_or_closes(server, on):
    verdicts = [500, "close", 503]
    with Proxy(server) as proxy:
        proxy.judge = lambda method, path: verdicts.pop() if verdicts else None
        on(proxy.port)
        Store("s3://bucket/repeated", patience=20).put("a", b"1")
    on()
    assert Store("s3://bucket/repeated").get("a") == b"1" and not verdicts


def test_a_lost_answer_to_a_conditional_put_does_not_hide_its_success(server, on):
    """The server has stored the object when the answer is lost, so it refuses the repeated put."""
    on()
    behind = Store("s3://bucket/lost", patience=1)

    def judge(method, path):
        if method == "PUT" and not behind.list():
            behind.put("seal", b"mine")
            return 500
        return None

    with Proxy(server) as proxy:
        proxy.judge = judge
        on(proxy.port)
        assert Store("s3://bucket/lost", patience=20).put_if_absent("seal", b"mine")


EXPIRED = (403, b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>")


@pytest.mark.parametrize(
    ("url", "verdict", "sentence"),
    [
        ("s3://no-bucket/x", None, r"NoSuchBucket \(The specified bucket does not exist\)"),
        ("s3://bucket/x", EXPIRED, r"ExpiredToken \(The provided token has expired\)"),
        ("s3://bucket/x", 403, "the server answered 403 Forbidden"),
        ("s3://bucket/x", 500, r"the server answered 500 Internal Server Error, tried for \d s"),
        ("ftp://x", None, 'URL error: Unable to recognise URL "ftp://x/"'),
        ("/proc/none", None, r"No such file or directory \(os error 2\)"),
    ],
)
def test_an_unusable_store_is_reported_in_one_sentence(url, verdict, sentence, server, on):
    with Proxy(server) as proxy:
        proxy.judge = lambda method, path: verdict
        on(proxy.port)
        with pytest.raises(StoreError) as error:
            Store(url, patience=1).probe()
    assert re.fullmatch(f"{url}: {sentence}", str(error.value)), error.value


def test_a_store_without_conditional_puts_is_refused(server, on):
    with Proxy(server) as proxy:
        proxy.without = {"if-none-match"}
        on(proxy.port)
        with pytest.raises(StoreError, match="it does not support conditional puts"):
            Store("s3://bucket/x", patience=1).probe()
