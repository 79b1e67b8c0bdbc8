"""Tests the code that depends on torch's internals with every torch version that pyproject.toml allows.

    python tests/torch_versions.py                       # 2.11, 2.12 and 2.13, one after the other
    python tests/torch_versions.py 2.12 --keep           # only this version; keeps its environment

Each version gets a new virtual environment in --folder, with this checkout and its dev requirements. There it runs
tests/recycle_pp/comm, which checks recycle_pp/comm/torch_internals.py, and jobs whose workers die at every moment of a
step. Prints one line per version. The exit code is 1 if a version fails.

pip selects the build. With an index of CPU builds in PIP_EXTRA_INDEX_URL a version takes 1 GB; otherwise pip usually
selects a CUDA build, which takes 5 GB with its libraries. So each environment is removed before the next one is made.
A CUDA build also runs NCCL's tests, which need no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

VERSIONS = ("2.11", "2.12", "2.13")
ROOT = Path(__file__).parents[1]
TESTS = (
    ["tests/recycle_pp/comm"],
    ["tests/failures/test_exactness.py", "-k", "at_any_moment"],
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--folder", type=Path, default=ROOT / ".torch-versions")
    parser.add_argument("--keep", action="store_true", help="keep the environments for the next run")
    arguments = parser.parse_args()
    lines = []
    for version in arguments.versions:
        environment = arguments.folder / version
        start = time.monotonic()
        try:
            lines.append(f"torch {version}: {_try(version, environment)}, {time.monotonic() - start:.0f} s")
        finally:
            if not arguments.keep:
                shutil.rmtree(environment, ignore_errors=True)
    print("\n".join(lines))
    return int(any("FAILED" in line for line in lines))


def _try(version: str, environment: Path) -> str:
    """Installs a version and runs the tests. Returns a description of the result."""
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, f"torch=={version}.*", "-e", f"{ROOT}[dev]"]).returncode:
        return "FAILED to install"
    build = subprocess.check_output([python, "-c", "import torch; print(torch.__version__)"], text=True).strip()
    failed = []
    for tests in TESTS:
        words = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests]
        if subprocess.run([python, *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
            failed.append(tests[0])
    return f"{build}: " + (f"FAILED {', '.join(failed)}" if failed else "all pass")


if __name__ == "__main__":
    sys.exit(main())
