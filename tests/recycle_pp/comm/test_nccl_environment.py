"""Which versions of NCCL are rejected, and its environment variables in a worker."""

import subprocess
import sys

import pytest

from recycle_pp.comm.nccl.environment import ENVIRONMENT, describe, refuse


@pytest.mark.parametrize("version", [(2, 17, 1), (2, 18, 6), (2, 25, 1), (2, 28, 3), (2, 28, 8), (1, 0, 0)])
def test_versions_of_nccl_whose_aborts_hang_or_crash_are_rejected_and_named(version):
    with pytest.raises(
        ValueError, match=r"cannot use NCCL \d+\.\d+\.\d+: .* \(.*(#|NVIDIA).*\); .*parallel\.backend=tcp"
    ):
        refuse(version)


@pytest.mark.parametrize("version", [(2, 19, 3), (2, 25, 0), (2, 26, 2), (2, 28, 9), (2, 30, 7), (2, 31, 2)])
def test_other_versions_are_accepted(version):
    refuse(version)


def test_the_description_shows_only_variables_that_the_user_changed():
    text = describe({**ENVIRONMENT, "NCCL_NVLS_ENABLE": "1", "HOME": "/root", "NCCL_DEBUG": "INFO"}, (2, 30, 7))
    assert "NCCL_NVLS_ENABLE=1" in text and "NCCL_DEBUG=INFO" in text and "HOME" not in text


def test_the_module_is_imported_without_torch():
    script = "import sys; import recycle_pp.comm.nccl.environment; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=50)
