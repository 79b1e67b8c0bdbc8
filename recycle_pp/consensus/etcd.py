"""A small asyncio client of etcd 3.4 and later, over its JSON gateway: keys, leases, transactions.

    etcd = Etcd(["10.0.0.5:2379", "http://10.0.0.6:2379", "https://etcd.example:2379"])
    lease = await etcd.grant(seconds=10)
    wrote = await etcd.write([Put("/job/leader", "me", lease)], provided=[Created("/job/leader", 0)])
    found = await etcd.read("/job/")                     # {"/job/leader": Entry(value="me", created=7, modified=7)}

Every call goes to the endpoints in turn and raises Unreachable (an OSError) when none of them has answered. A write
that ends so may have been done all the same: read before it is repeated. Values are text. No gRPC and no threads: a
supervisor that forks must not have them.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ANSWER_SECONDS = 2.0  # for one endpoint; a member without a quorum accepts connections and says nothing

Json = dict[str, Any]


class Unreachable(ConnectionError):
    """No endpoint has answered in time."""


class Refusal(RuntimeError):
    """etcd has answered, with an error that another try would not change: a lease that is over, no permission."""


class Entry(NamedTuple):
    """What stands under a key. The two revisions count all changes of the store: equal ones are the same change."""

    value: str
    created: int
    modified: int


class Put(NamedTuple):
    key: str
    value: str
    lease: int = 0  # the key goes with it; 0: it stays

    def operation(self) -> Json:
        return {"request_put": {"key": _code(self.key), "value": _code(self.value), "lease": str(self.lease)}}


class Delete(NamedTuple):
    key: str

    def operation(self) -> Json:
        return {"request_delete_range": {"key": _code(self.key)}}


class Created(NamedTuple):
    """A condition: the key was created by this change; 0: it does not exist."""

    key: str
    revision: int

    def comparison(self) -> Json:
        return {"target": "CREATE", "key": _code(self.key), "result": "EQUAL", "create_revision": str(self.revision)}


class Modified(NamedTuple):
    """A condition: the key was last changed by this change; 0: it does not exist."""

    key: str
    revision: int

    def comparison(self) -> Json:
        return {"target": "MOD", "key": _code(self.key), "result": "EQUAL", "mod_revision": str(self.revision)}


class Etcd:
    """endpoints: HOST:PORT or a URL with http or https (checked by the system's certificates)."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = [each if "://" in each else f"http://{each}" for each in endpoints]

    async def read(self, prefix: str) -> dict[str, Entry]:
        """All keys that begin with `prefix`, as of one moment that is not before the call."""
        last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        answer = await self._ask("kv/range", {"key": _code(prefix), "range_end": _code(last)})
        return {
            _text(each["key"]): Entry(
                _text(each.get("value", "")), int(each["create_revision"]), int(each["mod_revision"])
            )
            for each in answer.get("kvs", [])
        }

    async def write(self, changes: Sequence[Put | Delete], provided: Sequence[Created | Modified] = ()) -> bool:
        """Makes all changes at once if all conditions hold, else none: whether it did."""
        transaction = {
            "compare": [each.comparison() for each in provided],
            "success": [each.operation() for each in changes],
        }
        return bool((await self._ask("kv/txn", transaction)).get("succeeded", False))

    async def grant(self, seconds: float) -> int:
        """A new lease: its keys vanish `seconds` (at least etcd's minimum, about 2) after it was kept alive last."""
        return int((await self._ask("lease/grant", {"TTL": str(max(1, round(seconds)))}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """False where the lease is over."""
        answer = await self._ask("lease/keepalive", {"ID": str(lease)})
        return int(answer["result"].get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        await self._ask("lease/revoke", {"ID": str(lease)})

    # -- the wire ----------------------------------------------------------------------------------------------

    async def _ask(self, path: str, question: Json) -> Json:
        problems = []
        for endpoint in list(self._endpoints):
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await _post(f"{endpoint.rstrip('/')}/v3/{path}", json.dumps(question).encode())
            except OSError as error:  # TimeoutError is one, too
                problems.append(f"{endpoint}: {str(error) or 'no answer'}")
                self._endpoints.append(self._endpoints.pop(0))  # ask another one first from now on
        raise Unreachable(f"etcd does not answer ({'; '.join(problems)})")


async def _post(url: str, body: bytes) -> Json:
    """One request, one connection. HTTP/1.0: the answer is not chunked, and ends with the connection."""
    where = urlsplit(url)
    secure = ssl.create_default_context() if where.scheme == "https" else None
    reader, writer = await asyncio.open_connection(where.hostname, where.port or 2379, ssl=secure)
    try:
        head = f"POST {where.path} HTTP/1.0\r\nHost: {where.netloc}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
    finally:
        writer.transport.abort()
    try:
        status, content = int(answer.split(maxsplit=2)[1]), json.loads(answer.partition(b"\r\n\r\n")[2])
    except (IndexError, ValueError) as error:
        raise ConnectionError("no whole answer of an etcd") from error
    if status == 200:
        return content
    reason = str(content.get("message") or content.get("error"))
    if status in (500, 503, 504):  # no quorum, no leader, too busy
        raise ConnectionError(reason)
    raise Refusal(f"{url}: {reason}")


def _code(text: str) -> str:
    return b64encode(text.encode()).decode()


def _text(code: str) -> str:
    return b64decode(code).decode()
