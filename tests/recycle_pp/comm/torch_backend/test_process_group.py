"""The backend "recycle": torch.distributed works through it, and it survives the death of members."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from recycle_pp.comm.waiting import LinkBroken
from recycle_pp.testing.rehearsal import Node, Rehearsal, grid

pytestmark = pytest.mark.timeout(120)


def start(node: Node) -> tuple[int, int]:
    import recycle_pp.comm.torch_backend.process_group  # noqa: F401  (registers the backend)

    rank, size = node.me, len(node.members)
    dist.init_process_group("recycle", store=node.store, rank=rank, world_size=size)
    return rank, size


def everybody_reports(scenario, pipelines: int = 2, stages: int = 2) -> list:
    with Rehearsal(grid(pipelines, stages), scenario) as play:
        return [report for _, report in play.reports(pipelines * stages)]


def ordinary_collectives(node: Node) -> None:
    rank, size = start(node)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "recycle")
    mine = torch.full((2,), float(rank))
    everyone = [torch.full((2,), float(k)) for k in range(size)]

    total = mine.clone()
    dist.all_reduce(total)
    assert torch.equal(total, sum(everyone))
    gathered = [torch.empty(2) for _ in range(size)]
    dist.all_gather(gathered, mine)
    assert all(map(torch.equal, gathered, everyone))
    flat = torch.empty(2 * size)
    dist.all_gather_into_tensor(flat, mine)
    assert torch.equal(flat, torch.cat(everyone))
    copied = mine.clone()
    dist.broadcast(copied, src=2)
    assert torch.equal(copied, everyone[2])
    part = torch.empty(2)
    dist.reduce_scatter(part, [tensor.clone() for tensor in everyone])
    assert torch.equal(part, everyone[rank] * size)
    dist.reduce_scatter_tensor(part, torch.cat(everyone))
    assert torch.equal(part, everyone[rank] * size)
    swapped = torch.empty(size)
    dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
    assert swapped.tolist() == [float(k) for k in range(size)]
    at_root = [torch.empty(2) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, at_root, dst=0)
    assert rank or all(map(torch.equal, at_root, everyone))
    dist.scatter(part, everyone if rank == 1 else None, src=1)
    assert torch.equal(part, everyone[rank])
    summed = mine.clone()
    dist.reduce(summed, dst=3)
    assert rank != 3 or torch.equal(summed, sum(everyone))
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [entry["rank"] for entry in objects] == list(range(size))
    dist.barrier()

    after, before = (rank + 1) % size, (rank - 1) % size
    buffer = torch.empty(2)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, buffer, before)])
    for work in works:
        work.wait()
    assert torch.equal(buffer, everyone[before])

    half = dist.new_group([0, 2])
    if rank in (0, 2):
        total = mine.clone()
        dist.all_reduce(total, group=half)
        assert total.tolist() == [2.0, 2.0] and dist.get_world_size(half) == 2
    node.report("right")


def test_collectives_messages_and_sub_groups_work():
    assert everybody_reports(ordinary_collectives) == ["right"] * 4


def device_mesh_and_dtensor(node: Node) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    start(node)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    whole = torch.arange(32.0).reshape(8, 4)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert sharded.to_local().shape == (4, 2)
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(mesh, [Replicate(), Shard(0)]).full_tensor(), whole)
    weight = distribute_tensor(torch.eye(4) * 2, mesh, [Replicate(), Shard(0)])
    assert torch.equal((sharded @ weight).full_tensor(), whole * 2)
    assert torch.equal(sharded.sum().full_tensor(), whole.sum())
    node.report("right")


@pytest.mark.slow
def test_device_mesh_and_dtensor_work():
    assert everybody_reports(device_mesh_and_dtensor) == ["right"] * 4


def data_parallel(node: Node) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, size = start(node)

    def gradient_of(wrap):
        torch.manual_seed(0)
        model = wrap(torch.nn.Linear(6, 3))
        (model(torch.full((2, 6), float(rank))).sum() / size).backward()
        return next(iter(model.parameters())).grad

    expected = gradient_of(lambda model: model)
    dist.all_reduce(expected)
    ddp = gradient_of(DistributedDataParallel)
    fsdp = gradient_of(lambda model: fully_shard(model) or model).full_tensor()
    assert torch.allclose(ddp * size, expected) and torch.allclose(fsdp * size, expected)
    node.report("right")


@pytest.mark.slow
def test_ddp_and_fsdp_compute_correct_gradients():
    assert everybody_reports(data_parallel, 2, 1) == ["right"] * 2


def checkpoints(node: Node) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    _, size = start(node)
    _, path = node.receive()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(24.0).reshape(8, 3)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}, checkpoint_id=path)
    state = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Shard(1)]), "step": 0}
    dcp.load(state, checkpoint_id=path)
    assert torch.equal(state["w"].full_tensor(), whole) and state["step"] == 7
    replicated = {"w": distribute_tensor(torch.zeros(8, 3), mesh, [Replicate()])}
    dcp.load(replicated, checkpoint_id=path)
    assert torch.equal(replicated["w"].to_local(), whole)
    node.report("right")


@pytest.mark.slow
def test_distributed_checkpoints_are_saved_and_loaded_with_another_sharding(tmp_path):
    with Rehearsal(grid(3, 1), checkpoints) as play:
        play.send("path", str(tmp_path / "checkpoint"))
        assert [report for _, report in play.reports(3)] == ["right"] * 3


def torch_pipelining(node: Node) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = start(node)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4) for _ in range(size)]
    inputs, targets = torch.randn(8, 4), torch.randn(8, 4)

    def loss_of(y, t):
        return ((y - t) ** 2).sum()

    whole = torch.nn.Sequential(*layers)
    expected = torch.autograd.grad(loss_of(whole(inputs), targets), list(layers[rank].parameters()))
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of, scale_grads=False)
    if rank == 0:
        schedule.step(inputs)
    elif rank == size - 1:
        schedule.step(target=targets)
    else:
        schedule.step()
    for parameter, gradient in zip(layers[rank].parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-5)
    node.report("right")


@pytest.mark.slow
def test_torchs_own_pipelining_runs_on_it():
    assert everybody_reports(torch_pipelining, 1, 3) == ["right"] * 3


def abort_and_rebuild(node: Node) -> None:
    """The first two members block, and the third dies. The others abort, and continue in a group without it."""
    rank, _ = start(node)
    dist.barrier()
    node.report("ready")
    if rank == 2:
        node.receive()

    def block() -> None:
        if rank == 0:
            dist.recv(torch.empty(4), src=1)  # its source is alive and silent
        else:
            dist.all_reduce(torch.ones(4))

    group = dist.group.WORLD
    abort = threading.Thread(target=lambda: (node.receive(), group.abort()), daemon=True)
    abort.start()
    try:
        block()
        node.report("went through")
    except RuntimeError:
        node.report("raised")
    abort.join()  # the death may have broken the all-reduce already; a late abort would end the next generation
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        assert "not yet rebuilt" in str(error)
    group.rebuild(1, rank, 2)
    total = torch.ones(4)
    dist.all_reduce(total)
    assert dist.get_world_size() == 2 and total.tolist() == [2.0] * 4
    node.report("goes on")


def test_a_group_can_be_aborted_and_rebuilt_without_its_dead_member():
    members = grid(3, 1)
    with Rehearsal(members, abort_and_rebuild) as play:
        play.reports(3)
        time.sleep(0.2)
        play.kill(2)
        play.send("abort the group", to=[0, 1])
        reports = [report for _, report in play.reports(4, timeout=20)]
        assert sorted(reports) == ["goes on", "goes on", "raised", "raised"]


@pytest.mark.parametrize("store", ["hash", "tcp"])
def test_an_abort_ends_a_rebuild_in_which_a_member_is_missing(store):
    from recycle_pp.comm.torch_backend.process_group import RecycleProcessGroup

    stores = {"hash": dist.HashStore, "tcp": lambda: dist.TCPStore("127.0.0.1", 0, 1, True)}
    group, ends = RecycleProcessGroup(stores[store](), 0, 1, timedelta(seconds=60), "127.0.0.1"), []

    def rebuild():
        try:
            group.rebuild(1, 0, 2)
        except LinkBroken as error:
            ends.append(str(error))

    thread = threading.Thread(target=rebuild, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    group.abort()
    thread.join(5)
    assert ends == ["generation 1: aborted"]
    group.rebuild(2, 0, 1)
