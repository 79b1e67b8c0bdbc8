"""A small asyncio client of etcd 3.4 and later, over its JSON gateway: keys, leases, transactions.

    etcd = Etcd(["10.0.0.5:2379", "http://10.0.0.6:2379", "https://etcd.example:2379"])
    lease = await etcd.grant(seconds=10)
    wrote = await etcd.write([Put("/job/leader", "me", lease)], conditions=[Created("/job/leader", 0)])
    found = await etcd.read("/job/")                     # {"/job/leader": Entry(value="me", created=7, modified=7)}

Each call tries the endpoints in turn and raises Unreachable (an OSError) if none answers. A write that fails this way
may still have been applied, so read before you repeat it. Values are text. The client uses neither gRPC nor
threads, because a supervisor that forks must not have threads.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ANSWER_SECONDS = 2.0  # limit per endpoint; an etcd server without a quorum accepts connections but never answers

Json = dict[str, Any]


class Unreachable(ConnectionError):
    """No endpoint answered in time."""


class Refusal(RuntimeError):
    """etcd answered with an error that a retry would not change, for instance an expired lease or no permission."""


class Entry(NamedTuple):
    """The value of a key.

    created, modified: the store's revisions in which the key was created and last changed
    """

    value: str
    created: int
    modified: int


class Put(NamedTuple):
    key: str
    value: str
    lease: int = 0  # the key is deleted when this lease ends; 0: the key is permanent

    def operation(self) -> Json:
        return {"request_put": {"key": _encode(self.key), "value": _encode(self.value), "lease": str(self.lease)}}


class Delete(NamedTuple):
    key: str

    def operation(self) -> Json:
        return {"request_delete_range": {"key": _encode(self.key)}}


class Created(NamedTuple):
    """A condition: the key was created in this revision; 0: the key does not exist."""

    key: str
    revision: int

    def comparison(self) -> Json:
        return {"target": "CREATE", "key": _encode(self.key), "result": "EQUAL", "create_revision": str(self.revision)}


class Modified(NamedTuple):
    """A condition: the key was last changed in this revision; 0: the key does not exist."""

    key: str
    revision: int

    def comparison(self) -> Json:
        return {"target": "MOD", "key": _encode(self.key), "result": "EQUAL", "mod_revision": str(self.revision)}


class Etcd:
    """A client of one etcd cluster.

    endpoints: each is HOST:PORT or an http or https URL; https is verified with the system's certificates
    """

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._endpoints = [each if "://" in each else f"http://{each}" for each in endpoints]

    async def read(self, prefix: str) -> dict[str, Entry]:
        """key -> its entry, for all keys that start with `prefix`. A consistent snapshot, not older than the call."""
        last = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        answer = await self._request("kv/range", {"key": _encode(prefix), "range_end": _encode(last)})
        return {
            _decode(each["key"]): Entry(
                _decode(each.get("value", "")), int(each["create_revision"]), int(each["mod_revision"])
            )
            for each in answer.get("kvs", [])
        }

    async def write(self, changes: Sequence[Put | Delete], conditions: Sequence[Created | Modified] = ()) -> bool:
        """Applies all changes atomically if all conditions hold. Returns whether they were applied."""
        transaction = {
            "compare": [each.comparison() for each in conditions],
            "success": [each.operation() for each in changes],
        }
        return bool((await self._request("kv/txn", transaction)).get("succeeded", False))

    async def grant(self, seconds: float) -> int:
        """The id of a new lease. Its keys are deleted `seconds` (etcd's minimum is about 2) after its last renewal."""
        return int((await self._request("lease/grant", {"TTL": str(max(1, round(seconds)))}))["ID"])

    async def keep_alive(self, lease: int) -> bool:
        """Renews the lease. Returns False if it has expired."""
        answer = await self._request("lease/keepalive", {"ID": str(lease)})
        return int(answer["result"].get("TTL", 0)) > 0

    async def revoke(self, lease: int) -> None:
        await self._request("lease/revoke", {"ID": str(lease)})

    # -- the wire ----------------------------------------------------------------------------------------------

    async def _request(self, path: str, body: Json) -> Json:
        problems = []
        for endpoint in list(self._endpoints):
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await _post(f"{endpoint.rstrip('/')}/v3/{path}", json.dumps(body).encode())
            except OSError as error:  # includes TimeoutError
                problems.append(f"{endpoint}: {str(error) or 'no answer'}")
                self._endpoints.append(self._endpoints.pop(0))  # try another endpoint first from now on
        raise Unreachable(f"etcd does not answer ({'; '.join(problems)})")


async def _post(url: str, body: bytes) -> Json:
    """Sends one request on its own connection. An HTTP/1.0 response is not chunked and ends with the connection."""
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
        status = int(answer.split(maxsplit=2)[1])
        content = json.loads(answer.partition(b"\r\n\r\n")[2])
    except (IndexError, ValueError) as error:
        raise ConnectionError("not a complete answer from etcd") from error
    if status == 200:
        return content
    reason = str(content.get("message") or content.get("error"))
    if status in (500, 503, 504):  # no quorum, no leader, too busy
        raise ConnectionError(reason)
    raise Refusal(f"{url}: {reason}")


def _encode(text: str) -> str:
    return b64encode(text.encode()).decode()


def _decode(code: str) -> str:
    return b64decode(code).decode()
