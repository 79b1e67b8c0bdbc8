"""A file system that can stop answering reads, like one on a lost NFS server. A small FUSE server in its own process.

    with FileServer(source, tmp_path / "data") as server:
        ...                              # server.path shows the files of the folder `source`, read-only
        with server.silent():            # stops the server: readers block; SIGKILL ends them
            ...
        with server.silent_for(pid):     # blocks only this process
            ...

Needs root and /dev/fuse; `FileServer.missing()` names what is missing. A guardian process ends the server and unmounts
its file system, even if this process is killed. The kernel's include/uapi/linux/fuse.h defines the protocol.
"""

import contextlib
import ctypes
import errno
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from recycle_pp.linux.processes import die_with_parent

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT, _INTERRUPT, _BATCH_FORGET = (
    1, 2, 3, 14, 15, 18, 25, 26, 36, 42,
)  # fmt: skip
_IN, _OUT, _ATTRIBUTES = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ"), struct.Struct("<6Q10I")
_VALID = 1  # seconds for which the kernel may keep names and attributes
_ROOT = 1
_HELD = ".held"  # a file in `source` that contains the id of the process whose reads are not answered


class FileServer(contextlib.AbstractContextManager):
    def __init__(self, source: Path, path: Path) -> None:
        self.path, self._source = path, source
        path.mkdir()
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", __name__, source, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        said = self._guardian.stdout.readline()
        if not said:
            raise OSError(self._guardian.communicate()[1].decode().strip().splitlines()[-1])
        self._server = int(said)

    @staticmethod
    def missing() -> str | None:
        """Why a server cannot be started here; None if it can."""
        if os.geteuid() != 0:
            return "only root may mount a file system"
        with tempfile.TemporaryDirectory() as folder:
            try:
                with FileServer(Path(folder), Path(folder) / "mounted") as server:
                    os.stat(server.path)
            except OSError as error:
                return f"no FUSE file system can be mounted here: {error}"
        return None

    @contextlib.contextmanager
    def silent(self):
        os.kill(self._server, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self._server, signal.SIGCONT)

    @contextlib.contextmanager
    def silent_for(self, pid: int):
        held = self._source / _HELD
        held.write_text(str(pid))
        try:
            yield
        finally:
            held.unlink()

    def __exit__(self, *exception: object) -> None:
        self._guardian.communicate(timeout=30)


def _guard(source: Path, path: Path) -> None:
    """Serves in a child process. Kills the child when standard input ends, which also ends all pending reads."""
    here = os.getpid()
    mounted, tell = os.pipe()
    server = os.fork()
    if server == 0:
        die_with_parent(here)
        os.close(0)
        _Server(source, _mount(path)).serve(lambda: os.write(tell, b"."))
        os._exit(0)
    os.close(tell)
    if os.read(mounted, 1):
        print(server, flush=True)
        sys.stdin.read()
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    subprocess.run(["umount", "-l", path], check=False, stderr=subprocess.DEVNULL)


def _mount(path: Path) -> int:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    read_only = 1
    if ctypes.CDLL(None, use_errno=True).mount(b"recycle", os.fsencode(path), b"fuse", read_only, options):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return device


class _Server:
    def __init__(self, source: Path, device: int) -> None:
        self._source, self._device = source, device
        self._names: list[str] = []  # entry n is the path of node n + 2
        self._files: list[int] = []  # file descriptors by handle
        self._held: list[bytes] = []  # pending requests

    def serve(self, ready) -> None:
        ready()
        while True:
            if select.select([self._device], [], [], 0.05)[0]:
                try:
                    self._held.append(os.read(self._device, 1 << 18))
                except OSError:  # unmounted
                    return
            silent = self._silent_for()
            for request in self._held[:]:
                if not silent or not self._is_of(silent, request):
                    self._held.remove(request)
                    self._serve(request)

    def _silent_for(self) -> str:
        try:
            return (self._source / _HELD).read_text()
        except OSError:
            return ""

    def _is_of(self, pid: str, request: bytes) -> bool:
        """Whether a request is a read by this process. A request contains the id of the reading thread."""
        _, opcode, _, _, _, _, thread, *_ = _IN.unpack_from(request)
        return opcode == _READ and Path(f"/proc/{pid}/task/{thread}").exists()

    def _serve(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        if opcode in (_FORGET, _INTERRUPT, _BATCH_FORGET):
            return
        try:
            error, body = 0, self._answer(opcode, node, request[_IN.size :])
        except OSError as failed:
            error, body = -failed.errno, b""
        with contextlib.suppress(OSError):  # the reader was killed meanwhile
            os.write(self._device, _OUT.pack(_OUT.size + len(body), error, unique) + body)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == _INIT:
            return struct.pack("<4I2H2I2HI7I", 7, 31, 1 << 17, 0, 16, 12, 1 << 17, 1, 32, 0, 0, *[0] * 7)
        if opcode == _LOOKUP:
            name = os.fsdecode(body.rstrip(b"\0"))
            attributes = self._attributes(self._source / name)
            if name not in self._names:
                self._names.append(name)
            node = self._names.index(name) + _ROOT + 1
            return struct.pack("<4Q2I", node, 0, _VALID, _VALID, 0, 0) + attributes
        if opcode == _GETATTR:
            return struct.pack("<Q2I", _VALID, 0, 0) + self._attributes(self._path(node))
        if opcode == _OPEN:
            self._files.append(os.open(self._path(node), os.O_RDONLY))
            return struct.pack("<Q2I", len(self._files) - 1, 0, 0)
        if opcode == _READ:
            handle, offset, size = struct.unpack_from("<QQI", body)
            return os.pread(self._files[handle], size, offset)
        if opcode in (_RELEASE, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "")

    def _path(self, node: int) -> Path:
        return self._source if node == _ROOT else self._source / self._names[node - _ROOT - 1]

    def _attributes(self, path: Path) -> bytes:
        s = os.stat(path)
        mode = s.st_mode if stat.S_ISDIR(s.st_mode) else stat.S_IFREG | 0o444
        seconds, nanoseconds = divmod(s.st_mtime_ns, 10**9)
        return _ATTRIBUTES.pack(
            s.st_ino, s.st_size, s.st_blocks, seconds, seconds, seconds,
            nanoseconds, nanoseconds, nanoseconds, mode, 1, 0, 0, 0, 4096, 0,
        )  # fmt: skip


if __name__ == "__main__":
    _guard(Path(sys.argv[1]), Path(sys.argv[2]))
