"""Frames, the mutual challenge, and that nobody who misbehaves disturbs anybody."""

import asyncio
import json
import logging
import socket
import struct
import threading
import time
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recycle_pp.wire import connection as messages
from recycle_pp.wire.connection import Channel, ChannelClosed, Peer, Refused, connect, decode, encode, serve

pytestmark = pytest.mark.timeout(60)

TOKEN = "a token of the job"
HELLO = {"type": "hello", "role": "worker", "rank": 3}
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


async def end_of(reader):
    """Everything until the other end closes, however rudely."""
    with suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(), 5)
    return b""


@asynccontextmanager
async def echo_server(**options):
    """Answers every message with itself; yields (host, port)."""
    hellos = []

    async def handler(peer):
        hellos.append(peer.hello)
        async for message in peer:
            peer.send(message)

    server = await serve(handler, "127.0.0.1", 0, TOKEN, **options)
    try:
        yield (*server.sockets[0].getsockname()[:2], hellos)
    finally:
        server.close()


@given(st.dictionaries(st.text(), plain, max_size=5))
def test_a_message_survives_its_frame(content):
    message = {**content, "type": "any"}
    frame = encode(message)
    assert struct.unpack(">I", frame[:4])[0] == len(frame) - 4
    assert decode(frame[4:]) == message


@given(st.binary(max_size=200) | plain.map(lambda value: json.dumps(value).encode()))
def test_a_body_that_is_no_message_is_refused(body):
    try:
        message = decode(body)
    except ChannelClosed:
        return
    assert isinstance(message["type"], str)


def test_nested_brackets_are_refused_not_a_crash():
    with pytest.raises(ChannelClosed):
        decode(b"[" * 100_000)


def test_a_message_above_the_limit_is_not_sent():
    with pytest.raises(ValueError, match="16777216 are allowed"):
        encode({"type": "large", "data": "x" * messages.MAX_FRAME})


def test_both_ends_talk_once_they_know_the_token():
    async def main():
        async with echo_server() as (host, port, hellos):
            peer = await connect(host, port, TOKEN, HELLO)
            peer.send({"type": "one"})
            assert await peer.recv() == {"type": "one"}
            channel = await asyncio.to_thread(Channel.connect, host, port, TOKEN, HELLO)
            try:
                large = {"type": "large", "data": "x" * (5 << 20)}
                await asyncio.to_thread(channel.send, large)
                assert await asyncio.to_thread(channel.recv, 10) == large
            finally:
                channel.close()
            assert hellos == [HELLO, HELLO]
            peer.close()

    asyncio.run(main())


def test_a_wrong_token_is_refused_and_said_once(caplog):
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
        "refused a connection from 127.0.0.1: a wrong job token (said once)"
    ]


def test_a_server_that_resets_the_connection_at_once_is_an_ordinary_error():
    """As one does that is killed just then; asyncio may know no address of such a peer."""

    async def main():
        def reset(reader, writer):
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        server = await asyncio.start_server(reset, "127.0.0.1", 0)
        for _ in range(20):
            with pytest.raises(OSError):
                await connect(*server.sockets[0].getsockname()[:2], TOKEN, {"type": "hello"}, 5.0)
        server.close()

        class Gone:
            def get_extra_info(self, name, default=None):
                return {"peername": None}.get(name, default)

        assert Peer(asyncio.StreamReader(), Gone()).address == "?:0"

    asyncio.run(main())


def test_a_client_leaves_a_server_that_does_not_know_the_token():
    def impostor(listener):
        """Accepts any answer, and has nothing to prove itself with."""
        connection, _ = listener.accept()
        with connection:
            connection.sendall(encode({"type": "challenge", "nonce": "00"}))
            connection.recv(1 << 16)
            connection.sendall(encode({"type": "accepted", "proof": "00"}))
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        with pytest.raises(Refused, match="does not know the job's token"):
            Channel.connect(*listener.getsockname(), TOKEN, HELLO)
        thread.join(5)


def test_an_answer_recorded_from_another_connection_proves_nothing():
    async def main():
        async with echo_server() as (host, port, hellos):
            client = messages._Client(TOKEN, HELLO)
            reader, writer = await asyncio.open_connection(host, port)
            recorded = client.answer(await messages.Peer(reader, writer).recv())
            writer.close()
            reader, writer = await asyncio.open_connection(host, port)
            peer = messages.Peer(reader, writer)
            await peer.recv()  # another challenge
            peer.send(recorded)
            with pytest.raises(ChannelClosed):
                await asyncio.wait_for(peer.recv(), 5)
            assert hellos == []
            peer.close()

    asyncio.run(main())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=5))
def test_garbage_before_the_proof_disturbs_nobody(chunks):
    async def main():
        async with echo_server(handshake_seconds=0.5) as (host, port, hellos):
            peer = await connect(host, port, TOKEN, HELLO)
            reader, writer = await asyncio.open_connection(host, port)
            for chunk in chunks:
                writer.write(chunk)
            writer.write_eof()
            assert len(await end_of(reader)) < 1000  # at most a challenge, then the end
            peer.send({"type": "still here"})
            assert await asyncio.wait_for(peer.recv(), 5) == {"type": "still here"}
            assert hellos == [HELLO]
            writer.close()
            peer.close()

    asyncio.run(main())


@pytest.mark.parametrize("length", [messages.MAX_HANDSHAKE_FRAME + 1, 2**32 - 1])
def test_an_oversize_frame_is_cut_off_at_its_length(length):
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


def test_an_oversize_frame_after_the_proof_ends_that_connection_only():
    async def main():
        async with echo_server() as (host, port, _):
            good = await connect(host, port, TOKEN, HELLO)
            bad = await connect(host, port, TOKEN, HELLO)
            bad._writer.write(struct.pack(">I", messages.MAX_FRAME + 1))
            with pytest.raises(ChannelClosed):
                await asyncio.wait_for(bad.recv(), 5)
            good.send({"type": "fine"})
            assert await good.recv() == {"type": "fine"}
            good.close()

    asyncio.run(main())


def test_a_client_that_says_nothing_is_cut_off_in_time():
    async def main():
        async with echo_server(handshake_seconds=0.2) as (host, port, _):
            slow = [await asyncio.open_connection(host, port) for _ in range(50)]
            peer = await connect(host, port, TOKEN, HELLO)  # while they hang
            for reader, writer in slow:
                writer.write(b"\0")
                await end_of(reader)
                writer.close()
            peer.send({"type": "fine"})
            assert await peer.recv() == {"type": "fine"}
            peer.close()

    asyncio.run(main())


def test_a_peer_that_does_not_read_is_cut_off_and_blocks_nobody(monkeypatch):
    monkeypatch.setattr(messages, "MAX_UNSENT", 1 << 20)

    async def main():
        accepted = asyncio.Queue()

        async def handler(peer):
            accepted.put_nowait(peer)
            async for _ in peer:
                pass

        server = await serve(handler, "127.0.0.1", 0, TOKEN)
        channel = await asyncio.to_thread(Channel.connect, *server.sockets[0].getsockname(), TOKEN, HELLO)
        peer = await accepted.get()
        for _ in range(100):
            peer.send({"type": "news", "data": "x" * (1 << 20)})
        assert peer._writer.is_closing()
        channel.close()
        server.close()

    asyncio.run(main())


def test_a_receive_that_times_out_loses_nothing_and_close_wakes_it():
    async def main():
        async with echo_server() as (host, port, _):
            await asyncio.to_thread(blocking, host, port)

    def blocking(host, port):
        channel = Channel.connect(host, port, TOKEN, HELLO)
        with pytest.raises(TimeoutError):
            channel.recv(0.05)
        channel.send({"type": "late"})
        assert channel.recv(5) == {"type": "late"}
        threading.Timer(0.1, channel.close).start()
        with pytest.raises(ChannelClosed):
            channel.recv()
        with pytest.raises(OSError):
            channel.send({"type": "too late"})

    asyncio.run(main())


def test_many_threads_may_send_through_one_channel():
    async def main():
        async with echo_server() as (host, port, _):
            await asyncio.to_thread(blocking, host, port)

    def blocking(host, port):
        channel = Channel.connect(host, port, TOKEN, HELLO)
        try:
            threads = [
                threading.Thread(target=lambda n=n: [channel.send({"type": "n", "n": n, "i": i}) for i in range(50)])
                for n in range(8)
            ]
            for thread in threads:
                thread.start()
            received = [channel.recv(10) for _ in range(400)]
            for thread in threads:
                thread.join()
        finally:
            channel.close()
        for n in range(8):
            assert [message["i"] for message in received if message["n"] == n] == list(range(50))

    asyncio.run(main())
