"""How the processes of a job find each other."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from recycle_pp.wire.launch import (
    Address,
    Launch,
    find,
    host_and_port,
    joined,
    keep_token,
    publish,
    remove_token,
    token_of,
    withdraw,
)


@pytest.fixture
def private(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"recycle_pp-{os.getuid()}"


def test_the_launch_is_read_from_torchruns_variables_and_defaults_to_one_process():
    assert Launch.from_environment({}) == Launch(rank=0, world=1)
    torchrun = {
        "RANK": "5", "WORLD_SIZE": "12", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RESTART_COUNT": "2",
    }  # fmt: skip
    launch = Launch.from_environment(torchrun)
    assert launch == Launch(5, 12, 1, 4, "node0", 29500, 2)
    assert not launch.one_node
    with pytest.raises(ValueError, match="WORLD_SIZE"):
        Launch.from_environment({"RANK": "5"})
    with pytest.raises(ValueError, match="is missing or not a number"):
        Launch.from_environment(torchrun | {"RANK": "five"})


def test_other_ranks_find_the_address_of_rank_0_until_it_is_withdrawn(private):
    launch, other_port = Launch(0, 4, 0, 4, master_port=29500), Launch(0, 4, 0, 4, master_port=29501)
    assert find(launch) is None
    publish(launch, Address("127.0.0.1", 4711, "secret"))
    assert find(launch) == Address("127.0.0.1", 4711, "secret")
    assert find(other_port) is None
    withdraw(launch)
    assert find(launch) is None
    withdraw(launch)
    assert list(private.parent.rglob("*")) in ([], [private])


def test_only_this_user_can_read_the_token(private):
    launch = Launch(0, 4, 0, 4)
    publish(launch, Address("127.0.0.1", 4711, "secret"))
    (file,) = private.iterdir()
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_commands_find_the_token_of_a_run_until_the_job_ends(private, monkeypatch):
    run, other = private.parent / "runs" / "mine", private.parent / "runs" / "other"
    run.mkdir(parents=True)
    assert token_of(run) is None
    kept = keep_token(run, "secret")
    (file,) = private.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    monkeypatch.chdir(run.parent)
    assert token_of("mine") == token_of(run) == "secret" and token_of(other) is None
    remove_token(kept)
    assert not private.exists() and token_of(run) is None
    remove_token(kept)


def test_a_folder_that_other_users_can_enter_is_not_trusted(private):
    private.mkdir(mode=0o755)
    with pytest.raises(ValueError, match="only this user can enter"):
        find(Launch(0, 4, 0, 4))


def test_a_job_that_does_not_use_the_folder_is_not_disturbed_by_it(private):
    private.mkdir(mode=0o755)
    withdraw(Launch(0, 4, 0, 2))


def test_a_folder_that_another_job_has_just_removed_is_made_again(private, monkeypatch):
    look, removals = Path.lstat, iter([Path.rmdir])

    def removed(path):
        next(removals, lambda path: None)(path)
        return look(path)

    monkeypatch.setattr(Path, "lstat", removed)
    publish(Launch(0, 4, 0, 4), Address("127.0.0.1", 4711, "secret"))
    assert find(Launch(0, 4, 0, 4)) == Address("127.0.0.1", 4711, "secret")


def test_launchers_with_the_same_port_start_different_jobs(private):
    publish(Launch(0, 4, 0, 4), Address("127.0.0.1", 4711, "secret"))
    script = "from recycle_pp.wire.launch import *; print(find(Launch(0, 4, 0, 4)))"
    environment = {**os.environ, "TMPDIR": str(private.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "None\n"


def test_several_nodes_need_the_jobs_secret_from_their_user():
    launch = Launch(5, 12, 1, 4, "node0", 29500)
    secret = {"RECYCLE_TOKEN": "x" * 32}
    assert Address.of_cluster(launch, None, secret) == Address("node0", 29501, "x" * 32)
    assert Address.of_cluster(launch, "10.0.0.7:4711", secret) == Address("10.0.0.7", 4711, "x" * 32)
    for wrong in ({}, {"RECYCLE_TOKEN": "short"}):
        with pytest.raises(ValueError, match="set RECYCLE_TOKEN on every node"):
            Address.of_cluster(launch, None, wrong)


@pytest.mark.parametrize("port", ["0", "65536", "99999", "1" * 5000, "-1", "x", ""])
def test_a_port_outside_1_to_65535_is_rejected(port):
    with pytest.raises(ValueError, match="must be HOST:PORT or null, with a port from 1 to 65535, not"):
        Address.of_cluster(Launch(), f"node0:{port}", {"RECYCLE_TOKEN": "x" * 32})


@pytest.mark.parametrize(("host", "text"), [("::1", "[::1]:29501"), ("node0", "node0:29501")])
def test_an_ipv6_address_is_in_brackets(host, text):
    assert joined(host, 29501) == text and host_and_port(text, "join") == (host, 29501)
    with pytest.raises(ValueError, match="join must be HOST:PORT"):
        host_and_port("::1:29501", "join")


def test_the_port_after_the_master_port_must_exist():
    secret, address = {"RECYCLE_TOKEN": "x" * 32}, "node0:65535"
    assert Address.of_cluster(Launch(master_port=65534), None, secret).port == 65535
    with pytest.raises(ValueError, match="MASTER_PORT must be below 65535, not 65535: the coordinator listens at"):
        Address.of_cluster(Launch(master_port=65535), None, secret)
    assert Address.of_cluster(Launch(master_port=65535), address, secret).port == 65535
