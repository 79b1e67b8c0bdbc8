"""The etcd client, with a real etcd."""

import asyncio
import time

import pytest

from recycle_pp.consensus.etcd import Created, Delete, Etcd, Modified, Put, Refusal, Unreachable
from tests.etcd import EtcdServer, needs_etcd

pytestmark = [pytest.mark.timeout(60), needs_etcd]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


def run(coroutine):
    return asyncio.run(coroutine)


def test_a_read_returns_the_keys_written_under_the_prefix(server):
    async def main():
        etcd = Etcd([server.endpoint])
        assert await etcd.write([Put("/a/x", "1"), Put("/a/y", "zwei"), Put("/b/x", "3")])
        found = await etcd.read("/a/")
        assert {key: entry.value for key, entry in found.items()} == {"/a/x": "1", "/a/y": "zwei"}
        await etcd.write([Delete("/a/x"), Put("/a/y", "")])
        assert {key: entry.value for key, entry in (await etcd.read("/a/")).items()} == {"/a/y": ""}
        assert await etcd.read("/nothing/") == {}

    run(main())


def test_a_write_whose_conditions_do_not_hold_changes_nothing(server):
    async def main():
        etcd = Etcd([server.endpoint])
        assert await etcd.write([Put("/c/x", "first")], [Created("/c/x", 0)])
        assert not await etcd.write([Put("/c/x", "second"), Put("/c/y", "!")], [Created("/c/x", 0)])
        entry = (await etcd.read("/c/"))["/c/x"]
        assert not await etcd.write([Put("/c/x", "second")], [Modified("/c/x", entry.modified + 1)])
        assert await etcd.write([Put("/c/x", "second")], [Modified("/c/x", entry.modified)])
        (after,) = (await etcd.read("/c/")).values()
        assert (after.value, after.created) == ("second", entry.created)
        assert after.modified > entry.modified

    run(main())


def test_only_one_of_many_concurrent_writers_creates_a_key(server):
    async def main():
        etcd = Etcd([server.endpoint])
        tries = [etcd.write([Put("/d/leader", str(k))], [Created("/d/leader", 0)]) for k in range(20)]
        won = await asyncio.gather(*tries)
        assert sum(won) == 1
        assert (await etcd.read("/d/"))["/d/leader"].value == str(won.index(True))

    run(main())


def test_a_key_lives_as_long_as_its_lease_is_renewed(server):
    async def main():
        etcd = Etcd([server.endpoint])
        kept, let_go = await etcd.grant(2), await etcd.grant(2)
        await etcd.write([Put("/e/kept", "", kept), Put("/e/let go", "", let_go)])
        begun = time.monotonic()
        while "/e/let go" in await etcd.read("/e/"):
            assert await etcd.keep_alive(kept)
            assert time.monotonic() - begun < 15
            await asyncio.sleep(0.2)
        assert time.monotonic() - begun > 1
        assert not await etcd.keep_alive(let_go)
        assert list(await etcd.read("/e/")) == ["/e/kept"]
        await etcd.revoke(kept)
        assert await etcd.read("/e/") == {}
        with pytest.raises(Refusal, match="lease not found"):
            await etcd.write([Put("/e/late", "", let_go)])

    run(main())


def test_an_endpoint_that_is_down_or_not_etcd_is_skipped(server):
    async def main():
        async def babble(reader, writer):
            await reader.read(1000)
            writer.write(b"220 mail.example ESMTP\r\n")
            writer.close()

        stranger = await asyncio.start_server(babble, "127.0.0.1", 0)
        port = stranger.sockets[0].getsockname()[1]
        etcd = Etcd(["127.0.0.1:1", f"http://127.0.0.1:{port}", f"http://{server.endpoint}/"])
        assert await etcd.write([Put("/f/x", "")])
        with pytest.raises(Unreachable, match=r"127.0.0.1:1: .*; .*: not a complete answer"):
            await Etcd(["127.0.0.1:1", f"127.0.0.1:{port}"]).read("/f/")
        stranger.close()

    run(main())
