"""A server to talk to.

async with echo_server() as (host, port, hellos): ...
"""

from contextlib import asynccontextmanager

from recycle_pp.wire.connection import serve
from recycle_pp.wire.messages.handshake import WorkerHello
from recycle_pp.wire.messages.workers import FROM_WORKER

TOKEN = "a token of the job"
HELLO = WorkerHello(rank=3, incarnation=0, moved=False)


@asynccontextmanager
async def echo_server(**options):
    """Answers every message of a worker with itself; yields (host, port, the hellos of those who were let in)."""
    hellos = []

    async def handler(peer):
        hellos.append(peer.hello)
        async for message in peer.listen(FROM_WORKER):
            peer.send(message)

    server = await serve(handler, "127.0.0.1", 0, TOKEN, **options)
    try:
        yield (*server.sockets[0].getsockname()[:2], hellos)
    finally:
        server.close()
