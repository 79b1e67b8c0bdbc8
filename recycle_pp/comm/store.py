"""Rendezvous over the control connections, without a TCPStore server and without torchrun's store.

    store = ControlStore(publish)          # publish(key, value): the coordinator forwards it to every worker
    store.deliver(key, value)              # called by the control thread for values of other workers
    ProcessGroupGloo(PrefixStore("7/world", store), rank, size, options)    # calls set, wait and get from C++
    store.abandon(7)                       # every wait for a key "7/..." ends with LinkBroken

Each key starts with a generation, and its value never changes after it is set. `add` and `compare_set` are missing,
because they would need a server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import msgspec
import torch.distributed as dist

from recycle_pp.comm.waiting import LinkBroken

BATCH = "*"  # published in place of a key if the value is an encoded dict of several keys and their values


class ControlStore(dist.Store):
    """Keys and values that all workers see, carried by `publish` and `deliver`.

    publish(key, value) must pass the value to `deliver` on every other worker, and may pass it back to the sender. The
    order does not matter. `publish` is called in the thread that sets the key, while no lock is held.
    """

    def __init__(self, publish: Callable[[str, bytes], None], timeout: float = 1800.0):
        super().__init__()
        self._publish = publish
        self._timeout = timeout  # seconds; a last resort, because the coordinator detects deaths
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._abandoned = -1  # highest abandoned generation
        self._closed = False
        self._batches: dict[int, dict[str, bytes]] = {}  # thread id -> values set in its `one_message`

    def deliver(self, key: str, value: bytes) -> None:
        """Stores a value published by another worker and wakes all waiters. Drops keys of abandoned generations.

        Does not block."""
        items = msgspec.msgpack.decode(value, type=dict[str, bytes]) if key == BATCH else {key: value}
        with self._changed:
            self._values.update((k, v) for k, v in items.items() if not self._is_over(k))
            self._changed.notify_all()

    def abandon(self, generation: int) -> None:
        """Ends all current and later waits for keys of this generation and older ones, and drops their values."""
        with self._changed:
            self._abandoned = max(self._abandoned, generation)
            self._values = {k: v for k, v in self._values.items() if not self._is_over(k)}
            self._changed.notify_all()

    def collect(self, keys: Sequence[str], cancelled: Callable[[], bool]) -> list[bytes]:
        """Blocks until all `keys` are present and returns their values.

        Raises LinkBroken when `cancelled` returns True, or when the generation of a key is abandoned. Raises
        TimeoutError after the store's timeout. The thread that changes the result of `cancelled` must call `wake`."""
        with self._changed:
            self._wait(keys, self._timeout, cancelled)
            return [self._values[key] for key in keys]

    def wake(self) -> None:
        """Makes every `collect` check again whether it is cancelled. Call it from any thread."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all current and later waits with LinkBroken. Call it from any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def one_message(self) -> Iterator[None]:
        """Publishes all values that this thread sets in the `with` block as one message at the end of the
        block."""
        batch = self._batches[threading.get_ident()] = {}
        try:
            yield
        finally:
            del self._batches[threading.get_ident()]
        if batch:
            self._publish(BATCH, msgspec.msgpack.encode(batch))

    # Called from C++ (torch/csrc/distributed/c10d/init.cpp, PythonStore).

    def set(self, key: str, value: bytes | str) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        self.deliver(key, value)
        batch = self._batches.get(threading.get_ident())
        if batch is None:
            self._publish(key, value)
        else:
            batch[key] = value

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._changed:
            self._wait(keys, self._timeout)
            return [self._values[key] for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            self._wait(keys, self._timeout if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Deletes the key in this process only. Returns whether the key was present. Other workers drop the key when
        its generation is abandoned."""
        with self._changed:
            return self._values.pop(key, None) is not None

    deleteKey = delete_key

    def num_keys(self) -> int:
        with self._changed:
            return len(self._values)

    getNumKeys = num_keys

    def clone(self) -> ControlStore:
        return self

    def _wait(self, keys: Sequence[str], seconds: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        while not all(key in self._values for key in keys):
            for key in keys:
                if self._closed or cancelled() or self._is_over(key):
                    raise LinkBroken(_generation(key), f"stopped waiting for {key}")
            if not self._changed.wait(deadline - time.monotonic()):
                missing = ", ".join(key for key in keys if key not in self._values)
                raise TimeoutError(f"timed out after {seconds:g} s waiting for {missing}")

    def _is_over(self, key: str) -> bool:
        return 0 <= _generation(key) <= self._abandoned


def _generation(key: str) -> int:
    """The generation at the start of a key; -1 if the key has none."""
    head = key.partition("/")[0]
    return int(head) if head.isdecimal() else -1
