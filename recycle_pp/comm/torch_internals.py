"""All that this package takes for granted of torch.distributed beyond its documentation, one fact a function.

    backend = gloo_backend(store, rank, size, "127.0.0.1", 1800.0)          # waits for nobody
    listener = listening_address(store.get(address_key(rank)))
    kept = start_connections(backend)                                       # to all members, waits for none
    shutdown_connections(listener, peers); answer_for_missing(listener, ranks)   # from any thread: who blocks raises
    process_group(store, rank, size, {"cpu": gloo_backend(...), "cuda": nccl_backend(...)})

Each fact was seen in torch 2.11 to 2.13, in the source named with it, and has a test in
tests/recycle_pp/comm/test_{torch,gloo}_internals.py that fails with the sentence that no longer holds;
`python tests/torch_versions.py` runs them on every torch of pyproject's range.

Why sockets are shut: Gloo has no abort. `abort()`, `shutdown()` and dropping a group leave a blocked operation blocked
(test: an_abort_of_gloo_leaves_who_blocks_blocked), while an operation whose socket is shut raises within milliseconds.
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

MAX_TAG = 2**31 - 1  # Gloo's slots are 64 bits wide, torch's tags 31 of them (ProcessGroupGloo.cpp, checkTag)


def gloo_backend(store: dist.Store, rank: int, size: int, host: str, timeout: float) -> Any:
    """A Gloo back end whose constructor waits for nobody: with `lazy_init` it only listens, and publishes where.

    host: numeric address. timeout: seconds until Gloo gives an operation up. One thread: its collectives run in order.
    ProcessGroupGloo.Options has no public name in Python (init.cpp: `_Options`, `_devices`, `_timeout`, `_threads`).
    """
    from torch._C._distributed_c10d import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1
    options._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=True)]
    return ProcessGroupGloo(store, rank, size, options)


def address_key(rank: int) -> str:
    """The store's key under which the back end of a rank says where it listens: "<device>/<rank>", one device.

    gloo/rendezvous/context.cc by ProcessGroupGloo.cpp, which prefixes the number of the device.
    """
    return f"0/{rank}"


def listening_address(value: bytes) -> Address:
    """The listening address in the value of `address_key`. ValueError if it reads otherwise.

    gloo/transport/tcp/context.cc and address.h: size_t length, host name; size_t length, {sockaddr_storage, ssize_t};
    then, without lazy connections, one ssize_t a pair.
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
    """Starts every connection of a lazy back end and waits for none. Keep what it returns as long as the back end.

    A lazy pair connects at its first use, where *posting* a receive blocks until the peer has used the same pair: a
    schedule that posts receives ahead can then deadlock. A receive from any source touches all pairs and blocks for
    none (gloo/transport/tcp/context.cc and unbound_buffer.cc).
    """
    import torch

    return backend.recv_anysource([torch.empty(1, dtype=torch.uint8)], MAX_TAG)  # a tag that nobody sends


def shutdown_connections(listener: Address, peers: Collection[Address]) -> int:
    """Shuts every connection between `listener` (our end) and its peers' listening addresses, and returns how many
    there were: who blocks in an operation over one of them raises RuntimeError within milliseconds.

    Any thread, as often as connections may still appear; tens of microseconds per open descriptor. Listening sockets
    are left alone: shutting one ends the process (an exception in Gloo's event thread that nothing catches).
    """
    found = 0
    for sock in _sockets():
        with sock:
            if _connects(sock, listener, peers):
                found += 1
                with contextlib.suppress(OSError):  # the other end was faster
                    sock.shutdown(socket.SHUT_RDWR)
    return found


def answer_for_missing(listener: Address, ranks: Collection[int]) -> None:
    """Connects to our own listener in the name of `ranks` and hangs up: who waits for one of them to connect raises.

    Of two members the one with the higher address connects (gloo/transport/tcp/pair.cc compares sockaddrs byte by byte)
    and the other waits, without a socket that could be shut. Gloo's handshake is the peer's rank as eight bytes
    (ssize_t); a connection that closes after it fails the waiting operation as a dead peer's would.
    """
    family = socket.AF_INET6 if ":" in listener[0] else socket.AF_INET
    for rank in ranks:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(1.0)
            try:
                sock.connect(listener)
                sock.sendall(struct.pack("=q", rank))
            except OSError:  # the listener is gone, and with it those who wait
                return


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of every socket of this process: an original may be closed, and its number reused, meanwhile."""
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
    """Each connection of a group has the listening address of one member at exactly one end: who connects has the
    peer's as its remote end, who accepts has its own as its local end."""
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

    timeout: seconds. Without CUDA, or in a torch that was built without NCCL: RuntimeError or AttributeError.
    """
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    options.config.blocking = 0
    return dist.ProcessGroupNCCL(store, rank, size, options)


def connect_nccl(backend: Any, device: torch.device) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Builds one communicator for all operations, instead of one for each pair at its first message. Blocks until every
    member calls it, NONBLOCKING_SECONDS at most (ProcessGroupNCCL.cpp, eagerConnectSingleDevice)."""
    backend.eager_connect_single_device(device)


# ------------------------------------------------------------------------------------------------------- ProcessGroup

# What a subclass of ProcessGroup has to hand on: `Backend` cannot be subclassed in Python, ProcessGroup can, and C++
# calls these back (PyProcessGroup.hpp). A torch that lacks some of the newer names lacks those who would call them.
OPERATIONS = (
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
    "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send", "_start_coalescing", "_end_coalescing", "_get_backend",
    "_get_sequence_number_for_group", "_set_sequence_number_for_group",
)  # fmt: skip


def process_group(store: dist.Store, rank: int, size: int, backends: Mapping[str, Any]) -> Any:
    """A C++ ProcessGroup over these back ends, by kind of device: "cpu" for Gloo, "cuda" for NCCL; the last is its
    default. A back end that is registered twice for a device is ignored, so each generation makes a new one.

    distributed_c10d.py, _new_process_group_helper.
    """
    import torch
    import torch.distributed as dist

    kinds = {"cpu": dist.ProcessGroup.BackendType.GLOO, "cuda": dist.ProcessGroup.BackendType.NCCL}
    group: Any = dist.ProcessGroup(store, rank, size)
    for device, backend in backends.items():
        group._register_backend(torch.device(device), kinds[device], backend)
        group._set_default_backend(kinds[device])
    return group
