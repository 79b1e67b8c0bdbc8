"""A file system that can stop answering: while frozen (FIFREEZE, see fsfreeze(8)), all writes block.

    with Disk(tmp_path, megabytes=64) as disk:
        ...                              # disk.path: a new ext4 file system in a file behind a loop device
        with disk.frozen():              # writers sleep in the kernel, and not even SIGKILL ends them
            ...

Needs root, mkfs.ext4 and a loop device; `Disk.missing()` names what is missing. A guardian process thaws and unmounts
the file system, even if this process is killed.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h
_GUARDIAN = """
import fcntl, os, subprocess, sys
os.read(0, 1)                            # returns when the test's process has ended
root = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.ioctl(root, 0xC0045878, 0)
except OSError:
    pass
os.close(root)
subprocess.run(["umount", "-l", sys.argv[1]])
"""


class Disk(contextlib.AbstractContextManager):
    def __init__(self, folder: Path, megabytes: int = 64) -> None:
        self._image, self.path = folder / "disk.img", folder / "disk"
        self.path.mkdir()
        with self._image.open("wb") as file:
            file.truncate(megabytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", self._image], check=True)
        subprocess.run(["mount", "-o", "loop,errors=remount-ro", self._image, self.path], check=True)
        self._root = os.open(self.path, os.O_RDONLY)
        self._guardian = subprocess.Popen(
            [sys.executable, "-c", _GUARDIAN, self.path], stdin=subprocess.PIPE, start_new_session=True
        )

    @staticmethod
    def missing() -> str | None:
        """Why a disk cannot be made here; None if it can."""
        if os.geteuid() != 0:
            return "only root may mount and freeze a file system"
        if shutil.which("mkfs.ext4") is None:
            return "mkfs.ext4 is not installed"
        try:
            with tempfile.TemporaryDirectory() as folder, Disk(Path(folder), megabytes=8):
                return None
        except (OSError, subprocess.CalledProcessError) as error:
            return f"no file system can be mounted from a file here: {error}"

    @contextlib.contextmanager
    def frozen(self):
        fcntl.ioctl(self._root, FIFREEZE, 0)
        try:
            yield
        finally:
            fcntl.ioctl(self._root, FITHAW, 0)

    def break_down(self) -> None:
        """Makes the file system read-only, as ext4 does after a device error."""
        (device,) = [
            line.split()[0] for line in Path("/proc/mounts").read_text().splitlines() if str(self.path) in line
        ]
        Path("/sys/fs/ext4", Path(device).name, "trigger_fs_error").write_text("1")

    def __exit__(self, *exception: object) -> None:
        os.close(self._root)
        self._guardian.stdin.close()
        self._guardian.wait(30)
        self._image.unlink()
