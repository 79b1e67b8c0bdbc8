"""Facts about process groups and NCCL that `comm.torch_internals` relies on, one per test.

A failure names the fact that has changed. test_gloo_internals.py has the facts about Gloo.
"""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from recycle_pp.comm import torch_internals as internals
from recycle_pp.comm.torch_internals import (
    OPERATIONS,
    process_group,
)

from .torch_facts import connected_pair, fact

pytestmark = pytest.mark.timeout(60)
needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")


@pytest.fixture
def group():
    return connected_pair()


# -- ProcessGroup ------------------------------------------------------------------------------------------------------


NOT_OPERATIONS = {
    # implemented by the subclass
    "abort", "shutdown", "rank", "size", "name", "group_name", "group_desc", "_set_group_name", "_set_group_desc",
    # belongs to the C++ base class or to its own back ends
    "_id", "BackendType", *dist.ProcessGroup.BackendType.__members__, "boxed", "unbox", "bound_device_id",
    "get_group_store",
    "_backend_id", "_device_types", "_get_backend_name", "_register_backend", "_set_default_backend",
    # for uses by NCCL or symmetric memory; not supported
    "_enable_collectives_timing", "_has_hooks", "_register_on_completion_hook", "_wait_for_pending_works",
    "merge_remote_group", "set_timeout", "split_group", "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


@fact("the operations of ProcessGroup are those of OPERATIONS: a new one would not be forwarded to Gloo and NCCL")
def test_every_operation_of_a_process_group_is_known():
    there = {name for name in vars(dist.ProcessGroup) if not name.startswith("__") and "pybind11" not in name}
    assert there - set(OPERATIONS) - NOT_OPERATIONS == set()


@fact("a ProcessGroup made in Python runs collectives on its registered back ends")
def test_a_process_group_uses_its_registered_back_ends(group):
    store = dist.HashStore()
    whole = [process_group(store, member.rank, 2, {"cpu": member.backend}) for member in group]
    totals = [torch.ones(3) for _ in whole]
    for work in [each.allreduce([total], dist.AllreduceOptions()) for each, total in zip(whole, totals, strict=True)]:
        work.wait()
    assert all(total.tolist() == [2.0] * 3 for total in totals)


@fact("Backend cannot be implemented in Python, so the group has to own its back ends")
def test_a_back_end_cannot_be_written_in_python():
    class Ours(dist.Backend if hasattr(dist.Backend, "allreduce") else torch._C._distributed_c10d.Backend):
        pass

    with pytest.raises(TypeError, match="No constructor defined"):
        Ours(0, 1)


# -- NCCL --------------------------------------------------------------------------------------------------------------


@needs_nccl
@fact("NCCL's options have a timeout and config.blocking; its back end has abort")
def test_nccl_has_the_members_that_are_used():
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = internals.timedelta(seconds=5)
    options.config.blocking = 0
    assert options.config.blocking == 0
    assert callable(dist.ProcessGroupNCCL.abort)


@pytest.mark.parametrize("chosen", [None, "3"])
def test_torchs_watchdog_does_not_end_a_survivor_unless_the_user_wants_it(monkeypatch, chosen):
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, chosen or "")
    if chosen is None:
        monkeypatch.delenv(name)

    class Recorded:
        def Options():
            return SimpleNamespace(config=SimpleNamespace())

        def __init__(self, *_):
            self.handling = os.environ.get(name)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Recorded, raising=False)
    assert internals.nccl_backend(dist.HashStore(), 0, 2, 5.0).handling == (chosen or "0")
