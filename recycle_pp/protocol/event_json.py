"""Encodes events of a job as JSON, and computes fingerprints of outcomes.

text = encode(WorkerDied(6))                 # b'{"type":"WorkerDied","member":6}'
event = decode(json.loads(text))
fingerprint(job.handle(event))               # the same for equal outcomes, in any process
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, Union

import msgspec

from .events import Event, Outcome

_EVENTS: Any = Union[tuple(Event.__subclasses__())]  # noqa: UP007  # a variable number of types


def encode(event: Event) -> bytes:
    """The event as JSON, with bytes in base64. Any thread may call this."""
    text = msgspec.json.encode(event)
    # msgspec writes NaN and infinity as null. Python's encoder is slower, but keeps them.
    return json.dumps(msgspec.to_builtins(event), separators=(",", ":")).encode() if b"null" in text else text


def decode(data: Any) -> Event:
    """The event in parsed JSON. Raises ValueError with a one-sentence message if `data` is not an event."""
    event: Event = msgspec.convert(data, _EVENTS, str_keys=True)  # msgspec's errors are ValueErrors
    return event


def fingerprint(outcome: Outcome) -> str:
    """A hash of the outcome, as 16 hexadecimal digits. Any thread may call this."""
    everything = [outcome.sends, outcome.notes, outcome.expiry]
    return blake2b(msgspec.msgpack.encode(everything), digest_size=8).hexdigest()
