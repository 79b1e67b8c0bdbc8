"""All undocumented behaviour of torch.distributed on which this package depends, one fact per function.

    backend = gloo_backend(store, rank, size, "127.0.0.1", 1800.0)          # does not wait for other members
    listener = listening_address(store.get(address_key(rank)))
    kept = start_connections(backend)                                       # to all members, without waiting
    shutdown_connections(listener, peers); answer_for_missing(listener, ranks)   # any thread: blocked operations raise
    process_group(store, rank, size, {"cpu": gloo_backend(...), "cuda": nccl_backend(...)})

Each fact holds in torch 2.11 to 2.13, according to the source file named with it. If a fact no longer holds, a test
in tests/recycle_pp/comm/test_{torch,gloo}_internals.py fails and states the fact. `python tests/torch_versions.py` runs
these tests with every torch version in pyproject's range.

Sockets are shut down because Gloo has no abort. `abort()`, `shutdown()` and dropping a group do not end a blocked
operation (test_an_abort_does_not_end_a_blocked_operation). An operation raises within milliseconds after a shutdown of
its socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

Address = tuple[str, int]  # (ip, port), numeric

# ---------------------------------------------------------------------------------------------------------------- Gloo

MAX_TAG = 2**31 - 1  # torch's tags use 31 of the 64 bits of a Gloo slot (ProcessGroupGloo.cpp, checkTag)


def gloo_backend(store: dist.Store, rank: int, size: int, host: str, timeout: float) -> Any:
    """A Gloo back end whose constructor does not wait. With `lazy_init` it only listens and publishes its address.

    host: numeric address. timeout: seconds after which Gloo fails an operation. The back end has one thread, so its
    collectives run in order. ProcessGroupGloo.Options has no public name in Python (init.cpp: `_Options`, `_devices`,
    `_timeout`, `_threads`).
    """
    from torch._C._distributed_c10d import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=True)]
    return ProcessGroupGloo(store, rank, size, options)


def address_key(rank: int) -> str:
    """The store's key for the listening address of a rank: "<device>/<rank>". The back end has one device, number 0.

    Source: gloo/rendezvous/context.cc writes the rank; ProcessGroupGloo.cpp prefixes the number of the device.
    """
    return f"0/{rank}"


def listening_address(value: bytes) -> Address:
    """The listening address, from the value that Gloo stores at `address_key`.

    Raises ValueError if the value has another format.

    Format, from gloo/transport/tcp/context.cc and address.h: size_t length, host name; size_t length,
    {sockaddr_storage, ssize_t}. If connections are not lazy, one ssize_t per pair follows.
    """
    try:
        (hostname,) = struct.unpack_from("=Q", value)
        (length,) = struct.unpack_from("=Q", value, 8 + hostname)
        sockaddr = value[16 + hostname :]
        (family,) = struct.unpack_from("=H", sockaddr)
        (port,) = struct.unpack_from("!H", sockaddr, 2)
    except struct.error as error:
        raise ValueError(f"not the address of a Gloo group: {len(value)} bytes") from error
    if length == 136 and family == socket.AF_INET:
        return socket.inet_ntop(family, sockaddr[4:8]), port
    if length == 136 and family == socket.AF_INET6:
        return socket.inet_ntop(family, sockaddr[8:24]), port
    raise ValueError(f"not the address of a Gloo group: address family {family}, {length} bytes")


def start_connections(backend: Any) -> Any:
    """Starts all connections of a lazy back end without waiting. Keep the result for as long as the back end is used.

    A lazy pair connects at its first use, and *posting* a receive then blocks until the peer uses the same pair. A
    schedule that posts receives early can therefore deadlock. A receive from any source touches all pairs and does not
    block (gloo/transport/tcp/context.cc and unbound_buffer.cc).
    """
    import torch

    return backend.recv_anysource([torch.empty(1, dtype=torch.uint8)], MAX_TAG)  # no message uses this tag


def shutdown_connections(listener: Address, peers: Collection[Address]) -> int:
    """Shuts down all of the group's connections and returns their number. Operations that block on one of them raise
    RuntimeError within milliseconds.

    listener: this process's listening address. peers: the listening addresses of the other members.

    Call it from any thread, and repeat it while new connections may appear. Takes tens of microseconds per open
    descriptor. Listening sockets stay open, because shutting one down ends the process (an uncaught exception in Gloo's
    event thread).
    """
    found = 0
    for sock in _sockets():
        with sock:
            if _connects(sock, listener, peers):
                found += 1
                with contextlib.suppress(OSError):  # the other end has already closed the connection
                    sock.shutdown(socket.SHUT_RDWR)
    return found


def answer_for_missing(listener: Address, ranks: Collection[int]) -> None:
    """Ends every wait of this process for a connection from one of `ranks`. The waiting operation raises. To do this,
    the function connects to this process's own listener in the name of each rank, and disconnects.

    In each pair the member with the higher address connects (gloo/transport/tcp/pair.cc compares sockaddrs by bytes).
    The other member waits, and has no socket that could be shut down to end the wait. Gloo's handshake consists of the
    connecting member's rank in eight bytes (ssize_t). If a connection closes after the handshake, the waiting operation
    fails as if that member had died.
    """
    family = socket.AF_INET6 if ":" in listener[0] else socket.AF_INET
    for rank in ranks:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(1.0)
            try:
                sock.connect(listener)
                sock.sendall(struct.pack("=q", rank))
            except OSError:  # the listener is closed, so nothing waits for a connection any more
                return


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of every socket of this process, because another thread may close the original meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:
            continue
        try:
            sock = socket.socket(fileno=fd) if stat.S_ISSOCK(os.fstat(fd).st_mode) else None
        except OSError:
            sock = None
        if sock is None:
            os.close(fd)
        else:
            yield sock


def _connects(sock: socket.socket, listener: Address, peers: Collection[Address]) -> bool:
    """Whether the socket is a connection of the group.

    Each connection has the listening address of a member at exactly one end. This is the remote end if this process
    connected, and the local end if it accepted."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return False
    if sock.getsockname()[:2] == listener:
        return True
    try:
        return sock.getpeername()[:2] in peers
    except OSError:  # not connected
        return False


# ---------------------------------------------------------------------------------------------------------------- NCCL


def nccl_backend(store: dist.Store, rank: int, size: int, timeout: float) -> Any:
    """An NCCL back end whose communicator can be aborted while a member is missing: `config.blocking` is 0.

    Only `torch_backend` uses it. A call holds a lock while it waits for a communicator, and an abort needs this lock.

    timeout: seconds

    Raises RuntimeError or AttributeError if there is no CUDA, or if torch was built without NCCL.
    """
    import torch.distributed as dist

    # By default torch's watchdog ends the process when an operation of an aborted communicator fails or times out. Here
    # a survivor abandons such operations and continues in the next generation.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    options.config.blocking = 0
    return dist.ProcessGroupNCCL(store, rank, size, options)


# ------------------------------------------------------------------------------------------------------- ProcessGroup

# Operations that a subclass of ProcessGroup must forward. `Backend` cannot be subclassed in Python. ProcessGroup can,
# and C++ calls these methods of the subclass (PyProcessGroup.hpp). An older torch does not call the newer methods.
OPERATIONS = (
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
    "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send", "_start_coalescing", "_end_coalescing", "_get_backend",
    "_get_sequence_number_for_group", "_set_sequence_number_for_group",
)  # fmt: skip


def process_group(store: dist.Store, rank: int, size: int, backends: Mapping[str, Any]) -> Any:
    """A C++ ProcessGroup over these back ends. The last one is its default. torch ignores a second back end for the
    same device, so each generation needs a new process group.

    backends: device type -> back end ("cpu" -> Gloo, "cuda" -> NCCL)

    Source: distributed_c10d.py, _new_process_group_helper.
    """
    import torch
    import torch.distributed as dist

    kinds = {"cpu": dist.ProcessGroup.BackendType.GLOO, "cuda": dist.ProcessGroup.BackendType.NCCL}
    group: Any = dist.ProcessGroup(store, rank, size)
    for device, backend in backends.items():
        group._register_backend(torch.device(device), kinds[device], backend)
        group._set_default_backend(kinds[device])
    return group
