"""Distributes the coordinator's address to the processes that a launcher has started.

    launch = Launch.from_environment()            # from torchrun's RANK, WORLD_SIZE, ...; without them: one process
    publish(launch, address); withdraw(launch)    # on one node, rank 0: writes and removes a private file
    address = find(launch)                        # on one node, the other ranks
    address = Address.of_cluster(launch, settings.control.address)   # on several nodes, all ranks
    path = keep_token(run_dir, token); token_of(run_dir); remove_token(path)     # on one node, for commands

- On one node, the coordinator's address and the job's token are in a file that only this user can read, until all ranks
  have joined. The file name contains the launcher's process id.
- On several nodes, the address is control.address (default: torchrun's MASTER_ADDR and the port MASTER_PORT + 1), and
  the token is the value of the environment variable RECYCLE_TOKEN.
- One node with control.address uses both: rank 0 listens at control.address, with the token in RECYCLE_TOKEN, and the
  other ranks read the private file.

A job on one node also keeps its token in a private file while it runs, so that `recycle_pp.ctl` can prove that it may
send requests. The name of this file is a hash of the run folder's path.

This project uses nothing else from the launcher, in particular not torchrun's store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from recycle_pp.linux.processes import process_stat

TOKEN_VARIABLE = "RECYCLE_TOKEN"
HOST_AND_PORT = re.compile(r"(?:\[([^\]\s]+)\]|([^:\s\[\]]+)):([0-9]+)")
MOST_PORT = 65535


@dataclass(frozen=True)
class Launch:
    """The launcher's variables for this process."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    restart: int = 0  # number of restarts by torchrun so far (--max-restarts)
    agent: int = 0  # index of the torchrun agent that started this process
    agents: int = 1

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """The launch of this process. Raises ValueError if the launcher's variables are incomplete, are not numbers or
        contradict each other."""
        if "RANK" not in environment:
            return cls()
        try:
            rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            launch = cls(
                rank=rank,
                world=world,
                local_rank=int(environment.get("LOCAL_RANK", rank)),
                local_world=int(environment.get("LOCAL_WORLD_SIZE", world)),
                master_address=environment.get("MASTER_ADDR", "127.0.0.1"),
                master_port=int(environment.get("MASTER_PORT", 0)),
                restart=int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
                agent=int(environment.get("GROUP_RANK", 0)),
                agents=int(environment.get("GROUP_WORLD_SIZE", 1)),
            )
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"RANK is set, but one of torchrun's variables is missing or not a number: {error}"
            ) from error
        if not (0 <= rank < world and 0 <= launch.local_rank < launch.local_world <= world):
            raise ValueError(
                f"RANK={rank} LOCAL_RANK={launch.local_rank} LOCAL_WORLD_SIZE={launch.local_world} cannot be in a job "
                f"of WORLD_SIZE={world}: ranks start at 0. torchrun sets these variables; unset them to start by hand"
            )
        return launch

    @property
    def one_node(self) -> bool:
        return self.local_world == self.world


@dataclass(frozen=True)
class Address:
    """The address at which the coordinator listens, and the token that proves that a process belongs to the job."""

    host: str
    port: int
    token: str

    def __str__(self) -> str:
        return joined(self.host, self.port)

    @classmethod
    def of_cluster(cls, launch: Launch, address: str | None, environment: Mapping[str, str] = os.environ) -> Address:
        """The coordinator's address, for a job on several nodes or with control.address.

        address: control.address, or None

        Raises ValueError if `address` is not HOST:PORT, if there is no port after MASTER_PORT, or if RECYCLE_TOKEN has
        fewer than 16 characters."""
        host, port = launch.master_address, launch.master_port + 1
        if address is not None:
            host, port = host_and_port(address, "control.address", " or null")
            if host in ("0.0.0.0", "::"):
                raise ValueError(f"control.address must be an address where others can reach rank 0's node, not {host}")
        elif port > MOST_PORT:
            raise ValueError(
                f"MASTER_PORT must be below {MOST_PORT}, not {launch.master_port}: the coordinator listens at the port "
                "after it; or set control.address=HOST:PORT"
            )
        token = environment.get(TOKEN_VARIABLE, "")
        if len(token) < 16:
            raise ValueError(
                "a job on several nodes, or with control.address, needs its secret in the environment: set "
                f"{TOKEN_VARIABLE} on every node to the same text of at least 16 characters, for instance from "
                "`openssl rand -hex 32`"
            )
        return cls(host, port, token)


def host_and_port(text: str, name: str, other: str = "") -> tuple[str, int]:
    """(host, port) of HOST:PORT. An IPv6 address is in brackets: [::1]:29501. Raises ValueError if `text` is anything
    else, or the port is not from 1 to 65535.

    name   of the setting or option, for the error message
    other  further allowed values, for instance " or null"
    """
    match = HOST_AND_PORT.fullmatch(text)
    port = int(match[3]) if match and len(match[3]) <= len(str(MOST_PORT)) else 0
    if not match or not 1 <= port <= MOST_PORT:
        raise ValueError(f"{name} must be HOST:PORT{other}, with a port from 1 to {MOST_PORT}, not {text!r}")
    return match[1] or match[2], port


def joined(host: str, port: int) -> str:
    """The inverse of `host_and_port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def new_token() -> str:
    return secrets.token_hex(32)


def publish(launch: Launch, address: Address) -> None:
    """Writes the private file from which `find` reads the address in the other ranks of this node."""
    _write(lambda: _path(launch), json.dumps([address.host, address.port, address.token]))


def withdraw(launch: Launch) -> None:
    """Removes the file that `publish` wrote. Call it after all ranks have joined."""
    with suppress(ValueError):  # another user's folder, in which `publish` wrote nothing
        remove_token(_path(launch))


def find(launch: Launch) -> Address | None:
    """The coordinator's address; None until rank 0 has published it."""
    with suppress(FileNotFoundError):
        return Address(*json.loads(_path(launch).read_text()))
    return None


def keep_token(run_dir: str | Path, token: str) -> Path:
    """Writes the token of a job on one node into a private file, and returns its path. May block, because it reads the
    path of the run folder."""
    path = _token_path(run_dir)
    _write(lambda: _private_folder() / path.name, token)
    return path


def remove_token(path: Path) -> None:
    """Removes the file that `keep_token` wrote. Call it when the job ends."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()  # fails while another job uses the folder


def token_of(run_dir: str | Path) -> str | None:
    """The token of the job that runs in this run folder, on this machine; None if there is no such job."""
    with suppress(FileNotFoundError):
        return _token_path(run_dir).read_text()
    return None


def _token_path(run_dir: str | Path) -> Path:
    return _private_folder() / f"run-{hashlib.sha256(os.fsencode(os.path.realpath(run_dir))).hexdigest()[:32]}"


def _path(launch: Launch) -> Path:
    """A file name that only the ranks of one launch share. It contains the launcher's process id, and also the
    launcher's start time if that can be read, because process ids are reused."""
    launcher, started = os.getppid(), ""
    with suppress(OSError):
        if (stat := process_stat(launcher)) is not None:
            started = f"-{stat.started}"
    return _private_folder() / f"{launch.master_port}-{launcher}{started}-{launch.restart}"


def _write(path: Callable[[], Path], text: str) -> None:
    """Writes a private file atomically. path: returns the path of the file, and makes its folder if necessary."""
    while True:
        to = path()
        with suppress(FileNotFoundError):  # another job has just removed the empty folder
            with open(os.open(to.with_suffix(".new"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            to.with_suffix(".new").replace(to)
            return


def _private_folder() -> Path:
    """A folder that only this user can enter. Raises ValueError if its name is taken by anything else."""
    folder = Path(tempfile.gettempdir()) / f"recycle_pp-{os.getuid()}"
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # another job has just removed the empty folder
            info = folder.lstat()
            break
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ValueError(f"{folder} must be a folder that only this user can enter (mode 0700); remove it")
    return folder
