"""Bindings for the NCCL functions in use. Communicators are non-blocking, so no call waits for another member.

    nccl = library()                               # raises OSError if there is no libnccl.so.2
    communicator = nccl.open(size, nccl.identity(), rank)
    nccl.ready(communicator)                       # whether the last call on this communicator has taken effect
    nccl.all_reduce(communicator, tensor, stream)  # only if it is ready
    nccl.abort(communicator)

Failed calls raise RuntimeError with NCCL's error text. torch's NCCL back end is not used, because its calls hold a lock
while they wait for a communicator, and an abort needs this lock. nccl4py would bind the same functions, but it is a
dependency that must match the NCCL version.

After a death the stage builds a new communicator and does not use ncclCommShrink or ncclCommRevoke. With
NCCL_SHRINK_ABORT, or after a revoke, the new communicator shares nothing with the old one (NCCL 2.30,
ncclCommInitChildComm in init.cc). A shrink would therefore save only the exchange of the identity. A shrink also waits
for the GPU inside the call, and writes the new handle from another thread.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
UNDEFINED = -(2**31)  # NCCL_CONFIG_UNDEF_INT
SUM = 0  # ncclRedOp_t
BYTES = 1  # ncclUint8, for messages and broadcasts, which do no arithmetic
TYPES = {  # ncclDataType_t of summed tensors
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}


class Identity(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.19. Newer versions add the defaults of later fields, according to `size` and
    `version`."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


NON_BLOCKING = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21900, 0, UNDEFINED, UNDEFINED, UNDEFINED, None, UNDEFINED)

_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
ARGUMENTS: dict[str, list[Any]] = {
    "ncclGetUniqueId": [ctypes.POINTER(Identity)],
    "ncclCommInitRankConfig": [ctypes.POINTER(_POINTER), _INT, Identity, _INT, ctypes.POINTER(Config)],
    "ncclCommGetAsyncError": [_POINTER, ctypes.POINTER(_INT)],
    "ncclCommAbort": [_POINTER],
    "ncclSend": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclRecv": [_POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclAllReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclReduce": [_POINTER, _POINTER, _SIZE, _INT, _INT, _INT, _POINTER, _POINTER],
    "ncclBroadcast": [_POINTER, _POINTER, _SIZE, _INT, _INT, _POINTER, _POINTER],
    "ncclGetErrorString": [_INT],
    "ncclGetLastError": [_POINTER],
}


@cache
def library() -> Library:
    """The NCCL library of this process, from LD_PRELOAD or else from torch. Raises OSError if there is none."""
    return Library(ctypes.CDLL("libnccl.so.2"))


class Library:
    """The functions of the loaded NCCL library. Calls return at once.

    communicator  handle from `open`
    stream        a cudaStream_t
    tensor        a contiguous tensor on the GPU
    """

    def __init__(self, functions: Any):
        self._nccl = functions
        for name, arguments in ARGUMENTS.items():
            getattr(functions, name).argtypes = arguments
        functions.ncclGetErrorString.restype = functions.ncclGetLastError.restype = ctypes.c_char_p

    def identity(self) -> bytes:
        """A new identity, by which the members of a communicator find each other."""
        identity = Identity()
        self._check("ncclGetUniqueId", ctypes.byref(identity))
        return bytes(identity)

    def open(self, size: int, identity: bytes, rank: int) -> int:
        """Starts to build a communicator on the current device."""
        made = _POINTER()
        name = Identity.from_buffer_copy(identity)
        self._check("ncclCommInitRankConfig", ctypes.byref(made), size, name, rank, ctypes.byref(NON_BLOCKING))
        assert made.value is not None
        return made.value

    def ready(self, communicator: int) -> bool:
        """Whether the last call on this communicator has taken effect. Raises RuntimeError if the communicator has
        failed."""
        state = _INT()
        self._check("ncclCommGetAsyncError", communicator, ctypes.byref(state))
        if state.value not in (SUCCESS, IN_PROGRESS):
            self._fail("communicator", state.value)
        return state.value == SUCCESS

    def send(self, communicator: int, tensor: Tensor, peer: int, stream: int) -> None:
        self._check("ncclSend", tensor.data_ptr(), tensor.nbytes, BYTES, peer, communicator, stream)

    def receive(self, communicator: int, tensor: Tensor, peer: int, stream: int) -> None:
        self._check("ncclRecv", tensor.data_ptr(), tensor.nbytes, BYTES, peer, communicator, stream)

    def all_reduce(self, communicator: int, tensor: Tensor, stream: int) -> None:
        place, kind = tensor.data_ptr(), TYPES[tensor.dtype]
        self._check("ncclAllReduce", place, place, tensor.numel(), kind, SUM, communicator, stream)

    def reduce(self, communicator: int, tensor: Tensor, root: int, stream: int) -> None:
        place, kind = tensor.data_ptr(), TYPES[tensor.dtype]
        self._check("ncclReduce", place, place, tensor.numel(), kind, SUM, root, communicator, stream)

    def broadcast(self, communicator: int, tensor: Tensor, root: int, stream: int) -> None:
        place = tensor.data_ptr()
        self._check("ncclBroadcast", place, place, tensor.nbytes, BYTES, root, communicator, stream)

    def abort(self, communicator: int) -> None:
        """Ends the communicator's kernels and frees it in the background. No other call may be running or follow."""
        self._check("ncclCommAbort", communicator)

    def _check(self, function: str, *arguments: Any) -> None:
        code = getattr(self._nccl, function)(*arguments)
        if code not in (SUCCESS, IN_PROGRESS):
            self._fail(function, code)

    def _fail(self, what: str, code: int) -> None:
        text, last = self._nccl.ncclGetErrorString(code), self._nccl.ncclGetLastError(None)
        raise RuntimeError(f"NCCL {what}: {_text(text)}; {_text(last)}")


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace").strip().replace("\n", " ")
