"""Checks the machine for the requirements of `gpu.py`, and builds NCCL.

python bench/gpu_needs.py                          # versions as JSON; exit code 1 if packages are missing
python bench/gpu_needs.py --build SOURCE LIBRARY   # a source tree of NCCL, or a built library, to LIBRARY
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "triton", "numpy", "networkx", "hydra-core", "omegaconf", "rich", "numba", "msgspec")
TESTING = ("pytest", "pytest-xdist", "pytest-timeout", "psutil", "hypothesis")
SHARING = 23000  # ncclGetVersion of the first NCCL with which two ranks may use one GPU


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", nargs=2, metavar=("SOURCE", "LIBRARY"))
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    if options.build:
        return build(options.build[0], Path(options.build[1]), options.cpu)
    return check(options.cpu)


def check(cpu: bool) -> int:
    versions, missing = {}, []
    for name in (*PACKAGES, *TESTING):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        print(f"missing packages; install them from wheels: {', '.join(missing)}")
        return 1
    import torch

    found = {"python": platform.python_version(), **{name: versions[name] for name in ("torch", "triton")}}
    if torch.cuda.is_available():
        from recycle_pp.comm.nccl.environment import installed
        from recycle_pp.execution.device import platform as describe

        found["platform"] = describe(torch.device("cuda", 0), "tcp")
        found["nccl"] = ".".join(map(str, installed() or ()))
    elif not cpu:
        print("torch finds no GPU; --cpu runs every item at a tiny size without one")
        return 1
    print(json.dumps(found))
    return 0


def build(source: str, library: Path, cpu: bool) -> int:
    if cpu:
        print(json.dumps({"nccl": "gloo in its place"}))
        return 0
    library.parent.mkdir(parents=True, exist_ok=True)
    if not library.exists():
        if not source:
            print("--nccl must name a source tree of NCCL 2.30 or newer (its Makefile), or a built libnccl.so.2")
            return 1
        if Path(source).is_file():
            shutil.copy(source, library)
        else:
            import torch

            major, minor = torch.cuda.get_device_capability()
            code = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
            command = [
                "make",
                f"-j{os.cpu_count()}",
                "src.build",
                f"NVCC_GENCODE={code}",
                f"BUILDDIR={library.parent}/b",
            ]
            done = subprocess.run(command, cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode:
                print(done.stdout[-2500:])
                return 1
            shutil.copy(library.parent / "b" / "lib" / "libnccl.so.2", library)
    code_of = ctypes.c_int()
    ctypes.CDLL(str(library)).ncclGetVersion(ctypes.byref(code_of))
    print(json.dumps({"nccl": code_of.value}))
    return 0 if code_of.value >= SHARING else 1


if __name__ == "__main__":
    sys.exit(main())
