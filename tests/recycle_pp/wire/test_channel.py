"""A connection for threads: any thread may send, one receives, and `close` wakes it."""

import asyncio
import socket
import struct
import threading

import pytest

from recycle_pp.wire.connection import Channel
from recycle_pp.wire.frames import ChannelClosed, Malformed, encode
from recycle_pp.wire.messages.saving import Saved, SaveFailed
from recycle_pp.wire.messages.supervisors import Kill
from recycle_pp.wire.messages.workers import FROM_WORKER

from .echo import HELLO, TOKEN, admit, echo_server

pytestmark = pytest.mark.timeout(60)


def test_a_malformed_message_raises_in_the_receiving_thread():
    def wrong(listener):
        sock, _ = listener.accept()
        with sock:
            buffer = sock.makefile("rb")

            def receive(vocabulary):
                return vocabulary.decode(buffer.read(struct.unpack(">I", buffer.read(4))[0]))

            admit(TOKEN, lambda message: sock.sendall(encode(message)), receive)
            sock.sendall(encode(Kill(3)))
            buffer.read(1)
            buffer.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=wrong, args=(listener,))
        thread.start()
        channel = Channel.connect(*listener.getsockname(), TOKEN, HELLO)
        with pytest.raises(Malformed, match="Invalid value 'kill'"):
            channel.recv(FROM_WORKER, 5)
        channel.close()
        thread.join(5)


def test_a_timed_out_receive_loses_no_message_and_close_wakes_a_receiver():
    async def main():
        async with echo_server() as (host, port, _):
            await asyncio.to_thread(blocking, host, port)

    def blocking(host, port):
        channel = Channel.connect(host, port, TOKEN, HELLO)
        with pytest.raises(TimeoutError):
            channel.recv(FROM_WORKER, 0.05)
        channel.send(Saved(1))
        assert channel.recv(FROM_WORKER, 5) == Saved(1)
        threading.Timer(0.1, channel.close).start()
        with pytest.raises(ChannelClosed):
            channel.recv(FROM_WORKER)
        with pytest.raises(OSError):
            channel.send(Saved(2))

    asyncio.run(main())


def test_many_threads_may_send_through_one_channel():
    async def main():
        async with echo_server() as (host, port, _):
            await asyncio.to_thread(blocking, host, port)

    def blocking(host, port):
        channel = Channel.connect(host, port, TOKEN, HELLO)
        try:
            threads = [
                threading.Thread(target=lambda n=n: [channel.send(SaveFailed(i, str(n))) for i in range(50)])
                for n in range(8)
            ]
            for thread in threads:
                thread.start()
            received = [channel.recv(FROM_WORKER, 10) for _ in range(400)]
            for thread in threads:
                thread.join()
        finally:
            channel.close()
        for n in range(8):
            assert [message.step for message in received if message.detail == str(n)] == list(range(50))

    asyncio.run(main())
