"""Detects the death of a process 0.2 ms after SIGKILL, long before its pidfd is readable.

    line = Lifeline.create()            # in the parent; the child inherits line.descriptor
    Lifeline(descriptor).hold()         # in the child, in its main thread, once
    line.wait()                         # in a thread of the parent: True as soon as the child is dead

A killed process frees its memory and closes its devices before it becomes a zombie. With torch and 300 MB imported,
its sockets close and its pidfd becomes readable after 30 ms (`bench/detection.py`), or later if a GPU driver has to
clean up. But at the very start of a process's exit, the kernel wakes the waiters of its robust mutexes
(robust_list(2)). So the child holds such a mutex for life, in memory shared with its parent.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time

_PROCESS_SHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_POLL_SECONDS = 0.02  # seconds between two checks for whether the child holds the mutex
_libc = ctypes.CDLL(None)
_held: list[Lifeline] = []  # keeps the memory mapped: an unmapped mutex wakes no waiter


class Lifeline:
    """A robust mutex in memory that parent and child share.

    descriptor: file descriptor of the shared memory. The child inherits a copy; each process closes its own.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._mutex = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    @property
    def memory(self) -> mmap.mmap:
        """One page. The mutex uses the first quarter; the rest is free."""
        assert self._memory is not None
        return self._memory

    @classmethod
    def create(cls) -> Lifeline:
        descriptor = os.memfd_create("recycle-lifeline")
        os.ftruncate(descriptor, mmap.PAGESIZE)
        line = cls(descriptor)
        attributes = ctypes.create_string_buffer(64)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        _libc.pthread_mutex_init(line._mutex, attributes)
        return line

    def hold(self) -> None:
        """Locks the mutex for good. Call it in the main thread, because this thread ends only with the process."""
        _held.append(self)
        _libc.pthread_mutex_lock(self._mutex)

    def wait(self) -> bool:
        """Blocks until the holder is dead. Returns False if the line was closed before any process held it."""
        mapped = self._memory  # keeps the memory mapped while this thread waits
        if mapped is None:
            return False
        while (code := _libc.pthread_mutex_trylock(self._mutex)) == 0:  # not held yet
            _libc.pthread_mutex_unlock(self._mutex)
            if self._memory is None:
                return False
            time.sleep(_POLL_SECONDS)
        if code == errno.EBUSY:
            code = _libc.pthread_mutex_lock(self._mutex)
        return code == errno.EOWNERDEAD

    def close(self) -> None:
        """Releases the memory and closes the descriptor. Any thread may call this."""
        self._memory = None
        os.close(self.descriptor)
