"""A process's death, known 0.2 ms after SIGKILL: long before its parent can wait for it.

    line = Lifeline.create()            # the parent; the child inherits line.descriptor
    Lifeline(descriptor).hold()         # the child, in its main thread, once
    line.wait()                         # the parent, in a thread: True as soon as the child is dead

A killed process first gives back its memory and closes its devices, and only then becomes a zombie: its pidfd is
readable, and its sockets are closed, after 30 ms where it had imported torch and 300 MB (`bench/detection.py`), and
later where a GPU's driver has to clean up. But the kernel wakes those who wait for a robust mutex (robust_list(2)) at
the very beginning of its owner's exit. So the child holds such a mutex for life, in memory that it shares with its
parent.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time

_PROCESS_SHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST
_POLL_SECONDS = 0.02  # until the child holds its end
_libc = ctypes.CDLL(None)
_held: list[Lifeline] = []  # unmapped memory would tell nobody anything


class Lifeline:
    """descriptor: of the shared memory, to be inherited; both ends close their own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory: mmap.mmap | None = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._mutex = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)))

    @property
    def memory(self) -> mmap.mmap:
        """A page; what is behind its first quarter is free for others."""
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
        """By the thread whose end is the process's end; it never lets go."""
        _held.append(self)
        _libc.pthread_mutex_lock(self._mutex)

    def wait(self) -> bool:
        """Blocks until the holder is dead; False after `close`, if nobody has ever held it."""
        mapped = self._memory  # as long as this thread waits
        if mapped is None:
            return False
        while (code := _libc.pthread_mutex_trylock(self._mutex)) == 0:  # nobody holds it yet
            _libc.pthread_mutex_unlock(self._mutex)
            if self._memory is None:
                return False
            time.sleep(_POLL_SECONDS)
        if code == errno.EBUSY:
            code = _libc.pthread_mutex_lock(self._mutex)
        return code == errno.EOWNERDEAD

    def close(self) -> None:
        """Any thread."""
        self._memory = None
        os.close(self.descriptor)
