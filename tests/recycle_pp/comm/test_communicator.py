"""Communicators over a fake NCCL library break none of NCCL's rules, and no lock delays an abort."""

import ctypes
import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from recycle_pp.comm.device_errors import is_gpu_failure
from recycle_pp.comm.groups import GroupTransport
from recycle_pp.comm.links import Links
from recycle_pp.comm.nccl import communicator as module
from recycle_pp.comm.nccl import group as group_module
from recycle_pp.comm.nccl.group import NcclGroup
from recycle_pp.comm.nccl.library import ARGUMENTS, Config, Identity, Library
from recycle_pp.comm.store import ControlStore
from recycle_pp.comm.waiting import Generation, LinkBroken

from .fake_library import fake_library
from .fake_nccl import CPU, ME, PEER, among, in_thread

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def nccl(monkeypatch):
    nccl = fake_library(monkeypatch)
    yield nccl
    assert nccl.mistakes == []


def group_of(store, rank, size=2, prefix="0/pair"):
    return NcclGroup(store, prefix, rank, size, CPU, 60.0)


def connected(store, prefix="0/pair", pair=True):
    """Two members of a group, in this process."""
    groups = [group_of(store, rank, prefix=prefix) for rank in (0, 1)]
    other = in_thread(lambda: groups[1].connect(Generation(0), pair))
    groups[0].connect(Generation(0), pair)
    other.thread.join(10)
    assert other.outcome is None
    return groups


@pytest.fixture
def store():
    return ControlStore(lambda key, value: None)


def test_no_operation_starts_before_all_members_have_connected(nccl, store):
    first, second = (group_of(store, rank) for rank in (0, 1))
    run = in_thread(lambda: first.connect(Generation(0), pair=True))
    run.thread.join(0.1)
    assert run.thread.is_alive() and nccl.operations == []
    second.connect(Generation(0), pair=True)
    run.thread.join(10)
    assert run.outcome is None and len(nccl.operations) == 4


def test_a_second_death_while_communicators_are_built_causes_no_long_wait(nccl):
    """With torch's own process group, the abort would wait 30 s for a lock."""
    stores = [ControlStore(lambda key, value: [each.deliver(key, value) for each in stores]) for _ in range(2)]
    links, peers = (Links(GroupTransport(store, CPU, 60.0, NcclGroup)) for store in stores)
    build = in_thread(lambda: links.rebuild(1, among(ME, PEER), ME))  # the peer dies before it builds its own end
    time.sleep(0.1)
    begin = time.monotonic()
    links.abort()
    build.thread.join(10)
    assert isinstance(build.outcome, LinkBroken) and build.outcome.aborted and nccl.aborted == [1]
    again = in_thread(lambda: peers.rebuild(2, among(ME, PEER), PEER))
    links.rebuild(2, among(ME, PEER), ME)
    again.thread.join(10)
    assert again.outcome is None and time.monotonic() - begin < 1


def test_operations_of_several_threads_are_never_in_parallel(nccl, store):
    groups = [connected(store, f"0/{k}")[0] for k in range(4)]
    runs = [in_thread(lambda g=g: [g.backend.allreduce([torch.zeros(1)]) for _ in range(20)]) for g in groups]
    for run in runs:
        run.thread.join(20)
        assert len(run.outcome) == 20


def test_an_abort_does_not_wait_for_an_operation_that_hangs_in_the_driver(nccl, store, monkeypatch):
    """The driver's queue is full, behind a kernel that only the abort can end."""
    monkeypatch.setattr(module, "ENTER_SECONDS", 0.05)
    (hangs, _), (other, _) = connected(store, "0/a"), connected(store, "0/b")
    nccl.hanging.add(hangs.backend._handle)
    run = in_thread(lambda: hangs.backend.allreduce([torch.zeros(1)]))
    assert nccl.hangs.wait(10)
    waits = in_thread(lambda: other.backend.allreduce([torch.zeros(1)]))
    time.sleep(0.05)
    begin = time.monotonic()
    other.backend.abort()
    hangs.backend.abort()
    for each in (run, waits):
        each.thread.join(10)
        assert isinstance(each.outcome, module.Aborted)
    assert time.monotonic() - begin < 1


def test_no_call_enters_a_communicator_that_is_aborted(nccl, store):
    for k in range(20):
        group, _ = connected(store, f"0/{k}")
        runs = [in_thread(lambda g=group: [g.backend.send([torch.zeros(1)], 1, 0) for _ in range(1000)])]
        runs.append(in_thread(lambda g=group: [g.backend.ready() for _ in range(100_000)]))
        time.sleep(0.002)
        NcclGroup.abort([group])
        for run in runs:
            run.thread.join(10)
            assert isinstance(run.outcome, module.Aborted)


def test_an_abort_returns_only_after_the_gpu_has_finished_the_operations(nccl, store):
    group, _ = connected(store)
    nccl.unfinished = True
    nccl.abort = lambda handle: None
    run = in_thread(group.backend.abort)
    run.thread.join(0.1)
    assert run.thread.is_alive()
    nccl.unfinished = False
    run.thread.join(10)
    assert run.outcome is None


@pytest.mark.parametrize("computing", [True, False])
def test_the_time_limit_of_an_abort_begins_when_the_compute_before_the_operations_is_done(
    computing, nccl, store, monkeypatch
):
    monkeypatch.setattr(group_module, "ABORT_SECONDS", 0.1)
    group, _ = connected(store)
    nccl.computing, nccl.unfinished = computing, True
    nccl.abort = lambda handle: None
    run = in_thread(lambda: NcclGroup.abort([group]))
    run.thread.join(0.5 if computing else 10)
    assert run.thread.is_alive() == computing
    nccl.unfinished = False
    run.thread.join(10)
    assert run.outcome is None if computing else isinstance(run.outcome, TimeoutError)


@pytest.mark.parametrize(
    ("pair", "ways"), [(True, {"send", "receive"}), (False, {"all_reduce", "reduce", "broadcast"})]
)
def test_a_new_group_runs_every_operation_once_with_short_and_long_tensors(pair, ways, nccl, store):
    """NCCL chooses an algorithm by the size of a sum, and makes its connections at the algorithm's first use."""
    connected(store, pair=pair)
    assert {name for name, _ in nccl.operations} == ways
    if not pair:
        for way in ways:
            sizes = {elements for name, elements in nccl.operations if name == way}
            assert min(sizes) == 1 and max(sizes) >= 1 << 20


def test_a_library_that_cannot_sum_a_dtype_is_refused_when_a_group_connects(nccl, store):
    """Seen on an H200: NCCL built with ONLY_FUNCS returned success for a float64 sum and added nothing."""
    nccl.missing = {torch.float64}
    with pytest.raises(ArithmeticError, match="NCCL computes wrong sums of float64"):
        connected(store, pair=False)


def test_a_tensor_is_kept_until_the_gpu_has_sent_it(nccl, store):
    group, _ = connected(store)
    nccl.unfinished = True
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    group.backend.send([tensor], 1, 0)
    del tensor
    gc.collect()
    assert kept() is not None
    nccl.unfinished = False
    for _ in range(2):
        group.backend.send([torch.zeros(1)], 1, 0)
    gc.collect()
    assert kept() is None


def test_an_error_of_nccl_is_a_broken_link_and_one_of_cuda_is_not(nccl, store):
    group, _ = connected(store)
    nccl.unfinished = True
    work = group.backend.recv([torch.zeros(1)], 1, 0)
    nccl.failure = "NCCL communicator: remote process exited or there was a network error; "
    with pytest.raises(LinkBroken, match="remote process exited") as caught:
        NcclGroup.wait(Generation(3), work)
    assert not caught.value.aborted
    nccl.failure = "NCCL communicator: unhandled cuda error (run with NCCL_DEBUG=INFO for details); "
    with pytest.raises(RuntimeError, match="unhandled cuda error") as failed:
        NcclGroup.wait(Generation(3), work)
    assert is_gpu_failure(failed.value)


# -- the binding ---------------------------------------------------------------------------------------------------


def functions(**behaviours):
    """A fake C library. Its functions succeed, unless `behaviours` has a replacement."""

    class Function:
        def __init__(self, name):
            self.call = behaviours.get(name, lambda *_: 0)

        def __call__(self, *arguments):
            assert len(arguments) == len(self.argtypes)
            return self.call(*arguments)

    return SimpleNamespace(**{name: Function(name) for name in ARGUMENTS})


def test_a_failed_call_raises_with_ncclss_text():
    texts = {"ncclGetErrorString": lambda code: b"unhandled cuda error", "ncclGetLastError": lambda _: b"Cuda failure"}
    nccl = Library(functions(ncclCommAbort=lambda _: 1, **texts))
    with pytest.raises(RuntimeError, match=r"^NCCL ncclCommAbort: unhandled cuda error; Cuda failure$"):
        nccl.abort(1)


@pytest.mark.parametrize(("state", "ready"), [(0, True), (7, False)])
def test_a_communicator_is_ready_once_its_last_call_has_taken_effect(state, ready):
    def report(communicator, result):
        result._obj.value = state
        return 0

    assert Library(functions(ncclCommGetAsyncError=report)).ready(1) == ready


def test_communicators_are_non_blocking_and_the_structures_have_nccls_sizes():
    seen = []

    def init(made, size, identity, rank, config):
        seen.append((size, rank, config._obj.blocking, hex(config._obj.magic)))
        made._obj.value = 17
        return 7

    assert Library(functions(ncclCommInitRankConfig=init)).open(3, bytes(128), 2) == 17
    assert seen == [(3, 2, 0, "0xcafebeef")]
    assert ctypes.sizeof(Identity) == 128 and ctypes.sizeof(Config) == 48


def test_every_operation_passes_nccls_arguments():
    called = {}
    nccl = Library(functions(**{name: lambda *a, n=name: called.update({n: a}) or 0 for name in ARGUMENTS}))
    tensor = torch.zeros(6, dtype=torch.int64)
    at = tensor.data_ptr()
    nccl.send(1, tensor, 5, 9)
    nccl.receive(1, tensor, 5, 9)
    nccl.all_reduce(1, tensor, 9)
    nccl.reduce(1, tensor, 5, 9)
    nccl.broadcast(1, tensor, 5, 9)
    assert called == {
        "ncclSend": (at, 48, 1, 5, 1, 9),
        "ncclRecv": (at, 48, 1, 5, 1, 9),
        "ncclAllReduce": (at, at, 6, 4, 0, 1, 9),
        "ncclReduce": (at, at, 6, 4, 0, 5, 1, 9),
        "ncclBroadcast": (at, at, 48, 1, 5, 1, 9),
    }


def test_the_installed_nccl_has_the_functions():
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError:
        pytest.skip("no libnccl.so.2")
    nccl = Library(found)
    assert len(nccl.identity()) == 128


def test_no_threads_are_left_behind(nccl, store):
    before = threading.active_count()
    groups = connected(store)
    NcclGroup.abort(groups)
    assert threading.active_count() == before
