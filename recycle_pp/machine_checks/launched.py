"""The machines on which a launcher has started the checks.

    launched()      # Launched(number=1, machines=3, speaks=True, address="HOST0", port=29501), or None

Reads environment variables that torchrun or SLURM's srun has set. If a launcher starts several processes on a machine,
only the first one checks the machine, and the others end at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from recycle_pp.wire.launch import Launch

PORT = 29501  # the port after torchrun's default, 29500


class Launched(NamedTuple):
    """This machine's part in checks that a launcher has started on several machines.

    number    number of this machine, from 0
    machines  number of machines
    speaks    whether this process checks the machine; true for its first process
    address   host of machine 0
    port      port at which machine 0 listens, as the coordinator of a job would
    """

    number: int
    machines: int
    speaks: bool
    address: str
    port: int


def launched(environment: Mapping[str, str] = os.environ) -> Launched | None:
    """This machine's part in the checks; None without a launcher. RANK alone, as some clusters set it, does not say how
    many machines there are. Raises ValueError if the launcher's variables are incomplete or not numbers."""
    if {"RANK", "LOCAL_RANK", "GROUP_WORLD_SIZE"} <= environment.keys():
        launch = Launch.from_environment(environment)
        at = launch.master_address, launch.master_port + 1
        return Launched(launch.agent, launch.agents, launch.local_rank == 0, *at)
    if "SLURM_STEP_NUM_NODES" not in environment:  # set by srun only: the batch script itself runs on one node
        return None
    try:
        count, number, local = (int(environment[f"SLURM_{name}"]) for name in ("STEP_NUM_NODES", "NODEID", "LOCALID"))
        return Launched(number, count, local == 0, _first(environment["SLURM_STEP_NODELIST"]), PORT)
    except (KeyError, ValueError) as error:
        raise ValueError(f"SLURM_STEP_NUM_NODES is set, but some of srun's variables are missing: {error}") from error


def _first(nodes: str) -> str:
    """The first host in SLURM's notation: "node[007-009,12],login" -> "node007"."""
    parts = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in parts.groups()) if parts else nodes
