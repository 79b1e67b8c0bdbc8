"""Echo servers for the tests.

async with echo_server() as (host, port, hellos): ...
hello = admit(token, send, receive)         # the server's side of the mutual proof; may block in `receive`
"""

from contextlib import asynccontextmanager

from recycle_pp.wire.authentication import Verifier
from recycle_pp.wire.connection import serve
from recycle_pp.wire.messages.handshake import HELLOS, TO_SERVER, WorkerHello
from recycle_pp.wire.messages.workers import FROM_WORKER

TOKEN = "a token of the job"
HELLO = WorkerHello(rank=3, incarnation=0, moved=False)


@asynccontextmanager
async def echo_server(**options):
    """Sends each message back to its worker. Yields (host, port, hellos of the admitted workers)."""
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


def admit(token, send, receive):
    verifier = Verifier(token, HELLOS)
    send(verifier.challenge)
    send(verifier.judge(receive(TO_SERVER)))
    return verifier.hello
