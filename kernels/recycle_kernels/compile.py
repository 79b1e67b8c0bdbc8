"""Compiles every kernel launch of a stage for GPUs that are not present, and prints registers, spills, shared memory.

    python -m recycle_kernels.compile                   # sm_80, sm_90, sm_100; exit code 1 if a kernel does not fit
    python -m recycle_kernels.compile --arch 90

Runs the launches of `launches.py` on meta tensors, with a driver that reports the target architecture. So kernels get
the same specialisation (alignment, divisibility, constants) as in a real launch, and there is no separate list of
signatures to maintain. Registers and spills come from the cuobjdump in Triton's package.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from .launches import StageShape, launches

SHAPE = StageShape(
    batch=2, sequence=2048, width=4096, heads=32, kv_heads=8, ffn=14336, vocabulary=128256, parameters=1 << 24
)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # maximum bytes of shared memory per program


@dataclass(frozen=True)
class Binary:
    """One compiled specialisation."""

    kernel: str  # file and function, like weight_grad._kernel
    arch: int  # compute capability: 80, 90, 100
    registers: int  # per thread
    spills: int  # bytes of stack and local memory per thread
    shared: int  # bytes per program
    warps: int
    signature: str  # argument types
    ptx: str  # the assembler's input

    @property
    def fits(self) -> bool:
        """Whether no register spills and the shared memory is within the limit."""
        return self.spills == 0 and self.shared <= SHARED_LIMIT[self.arch]


def compile_stage(arch: int, shape: StageShape = SHAPE) -> list[Binary]:
    """Every distinct kernel of a stage of this shape, compiled for `arch` (80, 90, 100)."""
    with _pretend(arch) as kernels:
        for call in launches(shape, torch.device("meta")).values():
            call()
    return [_binary(name, arch, kernel) for name, kernel in kernels.values()]


@contextmanager
def _pretend(arch: int) -> Iterator[dict[str, tuple[str, Any]]]:
    """Within the context, launches compile for `arch` but do not run. Yields {hash: (name, compiled kernel)}."""
    kernels: dict[str, tuple[str, Any]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels[kernel.hash] = (f"{self.module.rpartition('.')[2]}.{self.fn.__name__}", kernel)
        return kernel

    before = driver._active
    driver.set_active(_AbsentGPU(arch))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver._active = before


class _AbsentGPU(DriverBase):
    """A driver with a target but no device. The architecture serves as device number, because Triton caches compiled
    kernels by device number."""

    def __init__(self, arch: int):
        self.arch = arch

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is launched")


def _binary(name: str, arch: int, kernel: Any) -> Binary:
    usage = _resource_usage(kernel.asm["cubin"])
    return Binary(
        kernel=name,
        arch=arch,
        registers=usage["REG"],
        spills=usage["STACK"] + usage["LOCAL"],
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        signature=" ".join(t for t in kernel.src.signature.values() if t != "constexpr"),
        ptx=kernel.asm["ptx"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, LOCAL and other resources, from the cuobjdump in Triton's package."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", text)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m recycle_kernels.compile", description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT), default=sorted(SHARED_LIMIT))
    arguments = parser.parse_args()
    print(f"{'kernel':32} {'sm':>4} {'regs':>5} {'spill':>6} {'shared':>7} {'warps':>6}  signature")
    misfits = 0
    for arch in arguments.arch:
        for b in compile_stage(arch):
            misfits += not b.fits
            row = f"{b.kernel:32} {b.arch:4} {b.registers:5} {b.spills:6} {b.shared:7} {b.warps:6}  {b.signature}"
            print(row)
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main())
