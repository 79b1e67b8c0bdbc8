"""Connections carry messages, and a misbehaving client does not disturb others."""

import asyncio
import logging
import socket
import struct
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.linux.descriptors import raise_limit
from recycle_pp.wire import connection
from recycle_pp.wire.authentication import Refused
from recycle_pp.wire.connection import Channel, Peer, connect, serve
from recycle_pp.wire.frames import MAX_FRAME, MAX_HANDSHAKE_FRAME, ChannelClosed, encode
from recycle_pp.wire.messages.handshake import (
    Accepted,
    Challenge,
)
from recycle_pp.wire.messages.lifecycle import StoreValue
from recycle_pp.wire.messages.saving import Saved
from recycle_pp.wire.messages.supervisors import Kill
from recycle_pp.wire.messages.workers import FROM_WORKER

from .echo import HELLO, TOKEN, echo_server

pytestmark = pytest.mark.timeout(60)


async def end_of(reader):
    """All data until the other end closes or resets the connection."""
    with suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), 5)
    return b""


def test_a_message_above_the_limit_is_not_sent():
    with pytest.raises(ValueError, match=r"a StoreValue message has .* bytes; 16777216 are allowed"):
        encode(StoreValue("large", bytes(MAX_FRAME)))


def test_two_ends_with_the_same_token_exchange_messages():
    async def main():
        async with echo_server() as (host, port, hellos):
            peer = await connect(host, port, TOKEN, HELLO)
            peer.send(Saved(1))
            assert await peer.recv(FROM_WORKER) == Saved(1)
            channel = await asyncio.to_thread(Channel.connect, host, port, TOKEN, HELLO)
            try:
                large = StoreValue("large", bytes(5 << 20))
                await asyncio.to_thread(channel.send, large)
                assert await asyncio.to_thread(channel.recv, FROM_WORKER, 10) == large
            finally:
                channel.close()
            assert hellos == [HELLO, HELLO]
            peer.close()

    asyncio.run(main())


def test_both_ends_break_if_the_other_machine_vanishes():
    async def main():
        accepted = asyncio.Queue()

        async def handle(peer):
            accepted.put_nowait(peer)
            await asyncio.sleep(30)

        server = await serve(handle, "127.0.0.1", 0, TOKEN)
        client = await connect(*server.sockets[0].getsockname(), TOKEN, HELLO)
        for peer in (client, await accepted.get()):
            end = peer._writer.get_extra_info("socket")
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * connection.SILENT_SECONDS
        client.abort()
        client.set_keepalive(1.0)
        server.close()

    asyncio.run(main())


def test_as_many_clients_as_announced_can_connect_at_the_same_moment():
    """As all workers and supervisors do after a take-over. All connections are open before the first is answered."""
    count = connection.UNPROVEN + 200

    async def main():
        async def handle(peer):
            await asyncio.sleep(30)

        server = await serve(handle, "127.0.0.1", 0, TOKEN, clients=count)
        port = server.sockets[0].getsockname()[1]
        peers = await asyncio.gather(*(connect("127.0.0.1", port, TOKEN, HELLO, 30) for _ in range(count)))
        for peer in peers:
            peer.abort()
        server.close()

    assert raise_limit() > 2 * count + 50
    asyncio.run(main())


def test_a_wrong_token_is_rejected_and_logged_at_most_every_ten_seconds(caplog):
    async def main():
        async with echo_server() as (host, port, hellos):
            for _ in range(3):
                with pytest.raises(Refused):
                    await connect(host, port, "another token", HELLO)
            with pytest.raises(Refused):
                await asyncio.to_thread(Channel.connect, host, port, "another token", HELLO)
            assert hellos == []

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert [record.message for record in caplog.records] == [
        "refused a connection from 127.0.0.1: its RECYCLE_TOKEN differs from this job's"
    ]


def test_a_connection_that_the_server_resets_at_once_raises_an_oserror():
    """For example a server killed at that moment. asyncio may not know the address of such a peer."""

    async def main():
        def reset(reader, writer):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        server = await asyncio.start_server(reset, "127.0.0.1", 0)
        for _ in range(20):
            with pytest.raises(OSError):
                await connect(*server.sockets[0].getsockname()[:2], TOKEN, HELLO, 5.0)
        server.close()

        class Gone:
            def get_extra_info(self, name, default=None):
                return {"peername": None}.get(name, default)

        assert Peer(asyncio.StreamReader(), Gone()).address == "?:0"

    asyncio.run(main())


def test_a_server_that_ends_during_the_handshake_has_not_refused_the_token():
    def ends(listener):
        for _ in range(2):
            sock, _ = listener.accept()
            with sock:
                sock.sendall(encode(Challenge(bytes(32))))
                sock.recv(1 << 16)

    async def main(address):
        for connecting in (connect(*address, TOKEN, HELLO), asyncio.to_thread(Channel.connect, *address, TOKEN, HELLO)):
            with pytest.raises(ChannelClosed) as caught:
                await connecting
            assert not isinstance(caught.value, Refused), "the client may try again"

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=ends, args=(listener,))
        thread.start()
        asyncio.run(main(listener.getsockname()))
        thread.join(5)


def test_a_client_rejects_a_server_that_does_not_know_the_token():
    def impostor(listener):
        """Accepts any response and cannot prove that it knows the token."""
        sock, _ = listener.accept()
        with sock:
            sock.sendall(encode(Challenge(bytes(32))))
            sock.recv(1 << 16)
            sock.sendall(encode(Accepted(bytes(32))))
            sock.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        with pytest.raises(Refused, match="does not know the job's token"):
            Channel.connect(*listener.getsockname(), TOKEN, HELLO)
        thread.join(5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=5))
def test_garbage_before_the_handshake_does_not_disturb_other_connections(chunks):
    async def main():
        async with echo_server(handshake_seconds=0.5) as (host, port, hellos):
            peer = await connect(host, port, TOKEN, HELLO)
            reader, writer = await asyncio.open_connection(host, port)
            for chunk in chunks:
                writer.write(chunk)
            writer.write_eof()
            assert len(await end_of(reader)) < 1000  # at most a challenge
            peer.send(Saved(2))
            assert await asyncio.wait_for(peer.recv(FROM_WORKER), 5) == Saved(2)
            assert hellos == [HELLO]
            writer.close()
            peer.close()

    asyncio.run(main())


@pytest.mark.parametrize("length", [MAX_HANDSHAKE_FRAME + 1, 2**32 - 1])
def test_an_oversize_frame_is_rejected_by_its_length(length):
    async def main():
        async with echo_server() as (host, port, _):
            reader, writer = await asyncio.open_connection(host, port)
            await reader.readexactly(4)
            writer.write(struct.pack(">I", length))
            begun = time.monotonic()
            await end_of(reader)
            assert time.monotonic() - begun < 1
            writer.close()

    asyncio.run(main())


def framed(body):
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    ("frame", "sentence"),
    [
        (struct.pack(">I", MAX_FRAME + 1), "a frame of 16777217 bytes; 16777216 are allowed"),
        (framed(b"\xc1\xff\x00"), "not a message of a worker to a coordinator: MessagePack data is malformed"),
        (framed(encode(Saved(7))[4:-1]), "not a message of a worker to a coordinator: Input data was truncated"),
        (framed(b"\x91" * 100_000), "not a message of a worker to a coordinator: Expected `object`, got `array`"),
        (framed(b"\x81\xa4type\xa2\xff\xfe"), "not a message of a worker to a coordinator: 'utf-8' codec can't decode"),
        (framed(b"\x81\xa4type\xa4none"), "not a message of a worker to a coordinator: Invalid value 'none'"),
        (framed(b"\x81\xa4type\xa5saved"), "not a message of a worker to a coordinator: Object missing required field"),
        (encode(Saved("7")), "not a message of a worker to a coordinator: Expected `int`, got `str` - at `$.step`"),
        # Only the coordinator sends Kill.
        (encode(Kill(3)), "not a message of a worker to a coordinator: Invalid value 'kill'"),
    ],
    ids=["huge", "garbage", "truncated", "deep", "no text", "unknown kind", "no field", "wrong type", "wrong role"],
)
def test_a_malformed_message_ends_only_its_connection_and_is_logged_once(frame, sentence, caplog):
    async def main():
        async with echo_server() as (host, port, _):
            good = await connect(host, port, TOKEN, HELLO)
            for _ in range(2):
                bad = await connect(host, port, TOKEN, HELLO)
                bad.send(Saved(1))
                bad.send_frame(frame)
                assert await bad.recv(FROM_WORKER) == Saved(1), "messages before it are delivered"
                with pytest.raises(ChannelClosed):
                    await asyncio.wait_for(bad.recv(FROM_WORKER), 5)
            good.send(Saved(2))
            assert await good.recv(FROM_WORKER) == Saved(2)
            good.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    (logged,) = [record.message for record in caplog.records]
    assert logged.startswith(f"refused a connection from 127.0.0.1: {sentence}")


def test_a_silent_client_is_disconnected():
    async def main():
        async with echo_server(handshake_seconds=0.2) as (host, port, _):
            slow = [await asyncio.open_connection(host, port) for _ in range(50)]
            peer = await connect(host, port, TOKEN, HELLO)  # while the silent clients are connected
            for reader, writer in slow:
                writer.write(b"\0")
                await end_of(reader)
                writer.close()
            peer.send(Saved(2))
            assert await peer.recv(FROM_WORKER) == Saved(2)
            peer.close()

    asyncio.run(main())


def test_a_peer_that_does_not_read_is_disconnected(monkeypatch):
    monkeypatch.setattr(connection, "MAX_UNSENT", 1 << 20)

    async def main():
        accepted = asyncio.Queue()

        async def handler(peer):
            accepted.put_nowait(peer)
            async for _ in peer.listen(FROM_WORKER):
                pass

        server = await serve(handler, "127.0.0.1", 0, TOKEN)
        channel = await asyncio.to_thread(Channel.connect, *server.sockets[0].getsockname(), TOKEN, HELLO)
        peer = await accepted.get()
        for _ in range(100):
            peer.send(StoreValue("news", bytes(1 << 20)))
        assert peer._writer.is_closing()
        channel.close()
        server.close()

    asyncio.run(main())
