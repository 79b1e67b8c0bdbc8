"""Sends requests to another supervisor's voter over one connection.

client = VoterClient(place, token)
answer = await client.ask(encode(Who()))       # raises OSError if no answer comes; tasks may send requests concurrently
client.close()
"""

from __future__ import annotations

import asyncio
from collections import deque

from recycle_pp.wire.connection import Peer, connect
from recycle_pp.wire.messages.agreement import TO_CANDIDATE, Answer, OtherJob, Place
from recycle_pp.wire.messages.handshake import CandidateHello

from .refusal import REFUSED, Refusal

ANSWER_SECONDS = 6.0  # time limit for an answer; the other supervisor may be cut off
CONNECT_SECONDS = 10.0  # time limit for a connection to the other supervisor


class VoterClient:
    """A client of one other supervisor's `Voter`. Connects at the first request, and reconnects after a loss.

    refused: seconds of refused connections after which the other supervisor counts as dead.
    job_id: of the job to which this supervisor belongs
    """

    def __init__(self, place: Place, token: str, refused: float = REFUSED, job_id: str = "") -> None:
        self._place = place
        self._token = token
        self._hello = CandidateHello(job_id)
        self._refusal = Refusal(refused)
        self._connecting: asyncio.Task[_Connection] | None = None

    async def ask(self, question: bytes) -> Answer:
        """The answer to an encoded request. Raises OSError if no answer comes within `ANSWER_SECONDS`, and
        ConnectionRefusedError if the other supervisor counts as dead (`Refusal`) or another job has its address."""
        if self._connecting is None or (self._connecting.done() and self._is_lost(self._connecting)):
            self._connecting = asyncio.create_task(self._connect())
        connection = await asyncio.shield(self._connecting)  # shared by concurrent requests
        return await connection.ask(question)

    async def _connect(self) -> _Connection:
        place = self._place
        try:
            peer = await connect(place.host, place.port, self._token, self._hello, CONNECT_SECONDS)
        except ConnectionRefusedError as error:
            if self._refusal.lasts(place.process):
                raise
            raise ConnectionAbortedError(f"{place} refused the connection; its process may still live") from error
        except OSError:
            self._refusal.reset()
            raise
        self._refusal.reset()
        return _Connection(peer)

    def _is_lost(self, connecting: asyncio.Task[_Connection]) -> bool:
        return connecting.exception() is not None or connecting.result().reading.done()

    def close(self) -> None:
        if self._connecting is not None and not self._connecting.cancel() and not self._is_lost(self._connecting):
            self._connecting.result().reading.cancel()


class _Connection:
    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._asked: deque[asyncio.Future[Answer]] = deque()
        self.reading = asyncio.create_task(self._read())

    async def ask(self, question: bytes) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._peer.send_frame(question)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            self.reading.cancel()
            raise

    async def _read(self) -> None:
        """Assigns answers to requests, in order, until the connection is lost."""
        try:
            async for message in self._peer.listen(TO_CANDIDATE):
                assert isinstance(message, Answer | OtherJob)  # the only messages to a candidate
                answer = self._asked.popleft()
                if answer.done():  # timed out
                    continue
                if isinstance(message, Answer):
                    answer.set_result(message)
                else:
                    answer.set_exception(ConnectionRefusedError("another job has the address of the supervisor"))
        finally:
            self._peer.abort()
            for answer in self._asked:
                if not answer.done():
                    answer.set_exception(ConnectionResetError("the connection was closed"))
