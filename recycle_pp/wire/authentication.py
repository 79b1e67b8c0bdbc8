"""The mutual authentication at the start of every connection: both ends prove that they know the job's token.

    prove(token, hello, send, receive)      # the client, blocking; raises Refused if the server does not know the token
    verifier = Verifier(token, HELLOS)      # the server, which sends verifier.challenge
    accepted = verifier.judge(response)     # the server's answer; raises Refused if the client's token is wrong
    verifier.hello                          # the client's hello, the message that introduces it

    server -> client   Challenge(nonce)
    client -> server   Response(nonce', hello, HMAC(token, "client", nonce, nonce', hello))
    server -> client   Accepted(HMAC(token, "server", nonce, nonce', hello)), or OtherToken()

HMAC is HMAC-SHA256. A proof is bound to one pair of nonces, one direction and one hello, so it can be neither reflected
nor replayed. `Prover` and `Verifier` do no input or output themselves. Control connections (`connection.py`, in threads
and in asyncio) and streams of tensors (`comm.transfer`) use them.

The standard library's `ssl` is not used. A shared secret requires TLS-PSK, which Python supports only since 3.13 (this
project supports 3.11), and TLS would also encrypt tensors, although the network is private anyway.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable

from .frames import ChannelClosed, encode_body
from .messages.handshake import TO_CLIENT, Accepted, Challenge, OtherToken, Response
from .messages.table import Message, Vocabulary

OTHER_TOKEN = "the job there has a different RECYCLE_TOKEN; it must be the same on every node"


class Refused(ChannelClosed):
    """The other end does not know the job's token, or rejected ours."""


Send = Callable[[Message], None]
Receive = Callable[[Vocabulary], Message]


def prove(token: str, hello: Message, send: Send, receive: Receive) -> None:
    """Runs the client's side of the handshake. Blocks in `receive`. Raises Refused if the other end does not know the
    token."""
    prover = Prover(token, hello)
    send(prover.respond(receive(TO_CLIENT)))
    prover.check(receive(TO_CLIENT))


class Prover:
    def __init__(self, token: str, hello: Message) -> None:
        self._token, self._hello, self._nonce = token, encode_body(hello), secrets.token_bytes(32)
        self._challenge = b""

    def respond(self, challenge: Message) -> Response:
        if not isinstance(challenge, Challenge):
            raise Refused("no challenge")
        self._challenge = challenge.nonce
        return Response(self._nonce, self._hello, self._proof(b"client"))

    def check(self, accepted: Message) -> None:
        if isinstance(accepted, OtherToken):
            raise Refused(OTHER_TOKEN)
        if not isinstance(accepted, Accepted) or not hmac.compare_digest(accepted.proof, self._proof(b"server")):
            raise Refused("the other end does not know the job's token")

    def _proof(self, role: bytes) -> bytes:
        return _proof(self._token, role, self._challenge, self._nonce, self._hello)


class Verifier:
    """The server's side of the handshake. hello: the client's hello, set when `judge` has verified it."""

    hello: Message

    def __init__(self, token: str, hellos: Vocabulary) -> None:
        self._token, self._hellos = token, hellos
        self.challenge = Challenge(secrets.token_bytes(32))

    def judge(self, response: Message) -> Accepted:
        """Verifies the client's response, and returns the answer to send. Raises Refused if the client's token is
        wrong, and Malformed if its hello is not in the vocabulary."""
        assert isinstance(response, Response)  # TO_SERVER contains no other message
        said = self.challenge.nonce, response.nonce, response.hello
        if not hmac.compare_digest(response.proof, _proof(self._token, b"client", *said)):
            raise Refused("its RECYCLE_TOKEN differs from this job's")
        self.hello = self._hellos.decode(response.hello)
        return Accepted(_proof(self._token, b"server", *said))


def _proof(token: str, *parts: bytes) -> bytes:
    # The lengths distinguish ("ab", "c") from ("a", "bc").
    return hmac.digest(token.encode(), b"".join(b"%d:%b" % (len(part), part) for part in parts), "sha256")
