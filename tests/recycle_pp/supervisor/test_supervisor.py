"""A real supervisor process with a fake worker process; the test plays the coordinator."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from recycle_pp.config.settings import Data, Settings
from recycle_pp.consensus.agreement import LostMajority
from recycle_pp.consensus.election import Election
from recycle_pp.consensus.voter_client import VoterClient
from recycle_pp.supervisor.supervisor import Supervisor
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.ports import free_ports
from recycle_pp.wire.connection import ChannelClosed, connect, serve
from recycle_pp.wire.frames import encode
from recycle_pp.wire.launch import Launch
from recycle_pp.wire.messages.agreement import Leader, Membership, Place, Who
from recycle_pp.wire.messages.ctl import TO_OPERATOR, Another, Stop
from recycle_pp.wire.messages.handshake import OperatorHello, SupervisorHello
from recycle_pp.wire.messages.supervisors import (
    FROM_SUPERVISOR,
    Died,
    Evict,
    Finish,
    Kill,
    Registration,
    Spawn,
    Spawned,
    Stopping,
    SupervisorWelcome,
)

from .children import wait_for_log

HERE = Path(__file__).parent
TOKEN = "a token of the job"
pytestmark = pytest.mark.timeout(60)


class Rank:
    """A connected supervisor, as its coordinator sees it."""

    def __init__(self, peer, process, server):
        self.peer, self.process, self.server = peer, process, server

    async def receive(self, kind, seconds=20):
        """The next message of class `kind`. Drops the messages before it."""
        async with asyncio.timeout(seconds):
            while not isinstance(message := await self.peer.recv(FROM_SUPERVISOR), kind):
                pass
            return message

    async def spawn(self, incarnation=0):
        self.peer.send(Spawn(incarnation, worker=(0, 5), respawns=0))
        return psutil.Process((await self.receive(Spawned)).pid)

    async def end(self, seconds=20):
        """Waits for the end of the supervisor. Returns (exit code, standard error)."""
        _, errors = await asyncio.to_thread(self.process.communicate, timeout=seconds)
        return self.process.returncode, errors


@asynccontextmanager
async def joined(tmp_path, play, local_rank=0):
    arrived = asyncio.Queue()
    stay = asyncio.Event()

    async def handler(peer):
        arrived.put_nowait(peer)
        await stay.wait()

    server = await serve(handler, "127.0.0.1", 0, TOKEN)
    port = server.sockets[0].getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, HERE / "fake_rank.py", str(port), TOKEN, str(local_rank)],
        env={"PYTHONPATH": str(HERE), "PATH": "/usr/bin:/bin", "PYTHONFAULTHANDLER": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    started = []
    try:
        try:
            peer = await asyncio.wait_for(arrived.get(), 40)
        except TimeoutError:
            process.send_signal(signal.SIGABRT)  # prints where its threads stand
            raise AssertionError(f"no connection in 40 s:\n{process.communicate(timeout=10)[1]}") from None
        settings = Settings(data=Data(path=play))  # what the fake worker does
        peer.send(SupervisorWelcome(settings, str(tmp_path), Leader(0, 0, "127.0.0.1", port), rank=5))
        yield Rank(peer, process, server)
        started = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    finally:
        process.kill()
        process.wait(10)
        process.stderr.close()
        stay.set()
        server.close()
        assert psutil.wait_procs(started, 10)[1] == [], "a worker has outlived its supervisor"


def gone(process, seconds=10.0):
    return psutil.wait_procs([process], seconds)[1] == []


def run(coroutine):
    asyncio.run(coroutine)


def test_a_death_is_reported_and_the_worker_is_not_restarted_without_an_order(tmp_path):
    async def main():
        async with joined(tmp_path, "wait") as rank:
            hello = rank.peer.hello
            assert isinstance(hello, SupervisorHello) and (hello.rank, hello.pid) == (5, rank.process.pid)
            worker = await rank.spawn(0)
            killed = time.monotonic()
            worker.kill()
            died = await rank.receive(Died)
            assert (died.incarnation, died.death.cause, died.death.detail) == (0, "signal", "SIGKILL")
            assert (died.death.injected, died.asked) == (False, False)
            assert killed <= died.death.at <= time.monotonic()
            await asyncio.sleep(0.2)
            assert psutil.Process(rank.process.pid).children() == []
            again = await rank.spawn(1)
            assert again.is_running()

    run(main())


def test_the_exception_of_a_worker_is_reported_to_the_coordinator(tmp_path):
    async def main():
        async with joined(tmp_path, "raise") as rank:
            await rank.spawn()
            died = await rank.receive(Died)
            assert died.death.cause == "exception"
            assert "ValueError: no such token" in died.death.detail
            assert died.death.where == "F 1,2"

    run(main())


def test_a_kill_ends_only_the_incarnation_that_it_names(tmp_path):
    async def main():
        async with joined(tmp_path, "wait") as rank:
            worker = await rank.spawn(4)
            rank.peer.send(Kill(3))
            await asyncio.sleep(0.2)
            assert worker.is_running()
            rank.peer.send(Kill(4))
            died = await rank.receive(Died)
            assert (died.death.detail, died.asked, died.incarnation) == ("SIGKILL", True, 4)
            assert gone(worker)

    run(main())


def test_a_spawn_replaces_a_live_worker(tmp_path):
    async def main():
        async with joined(tmp_path, "wait") as rank:
            first = await rank.spawn(0)
            second = await rank.spawn(1)
            assert gone(first)
            assert second.is_running()

    run(main())


@pytest.mark.parametrize(("local_rank", "code"), [(0, 3), (1, 0)])
def test_a_stopped_job_kills_a_worker_that_ignores_sigterm_and_fails_once_per_node(local_rank, code, tmp_path):
    async def main():
        async with joined(tmp_path, "deaf", local_rank) as rank:
            worker = await rank.spawn()
            log = tmp_path / "logs" / "worker-0.5.log"
            while not log.exists() or "deaf\n" not in log.read_text():
                await asyncio.sleep(0.01)
            rank.peer.send(Finish(3, "all is lost"))
            assert await rank.end() == (code, "recycle_pp: the job has stopped: all is lost\n" if code else "")
            assert gone(worker)

    run(main())


def test_a_rank_that_was_given_up_exits_with_0(tmp_path):
    async def main():
        async with joined(tmp_path, "leave") as rank:
            await rank.spawn()
            await rank.receive(Died)
            rank.peer.send(Finish(0))
            assert await rank.end() == (0, "")

    run(main())


@pytest.mark.parametrize("local_rank", [0, 1])
def test_the_first_rank_of_a_drained_node_tells_that_the_job_continues(local_rank, tmp_path, capfd):
    async def main():
        async with joined(tmp_path, "wait", local_rank) as rank:
            await rank.spawn()
            await asyncio.to_thread(wait_for_log, RunFolder(tmp_path).log("0.5"), "plays wait")  # it hears a SIGTERM
            rank.process.send_signal(signal.SIGTERM)
            await rank.receive(Stopping)
            rank.peer.send(Evict())
            assert await rank.end() == (0, "")

    run(main())
    told = "recycle_pp: this node has left the job, which continues without it\n"
    assert capfd.readouterr().out == ("" if local_rank else told)


def test_after_ctrl_c_the_coordinator_ends_the_job(tmp_path):
    async def main():
        async with joined(tmp_path, "wait") as rank:
            worker = await rank.spawn()
            for _ in range(3):  # from the terminal, and again from torchrun
                rank.process.send_signal(signal.SIGINT)
            assert (await rank.receive(Stopping)).signal == "SIGINT"
            assert worker.is_running()
            rank.peer.send(Finish(130))
            assert await rank.end() == (130, "")
            assert gone(worker)

    run(main())


def test_a_supervisor_exits_by_itself_if_its_sigterm_report_gets_no_answer(tmp_path):
    async def main():
        async with joined(tmp_path, "wait") as rank:
            worker = await rank.spawn()
            rank.process.send_signal(signal.SIGTERM)
            assert await rank.end() == (143, "")
            assert gone(worker)

    run(main())


def test_a_supervisor_that_loses_its_coordinator_exits_with_the_reason(tmp_path):
    async def main():
        async with joined(tmp_path, "wait") as rank:
            worker = await rank.spawn()
            rank.server.close()
            rank.peer.abort()
            code, errors = await rank.end()
            assert code == 1
            assert errors.startswith("recycle_pp: rank 5 lost the coordinator at 127.0.0.1:")
            assert "no majority" in errors
            assert errors.count("\n") == 1
            assert gone(worker)

    run(main())


def test_a_killed_supervisor_leaves_no_worker_behind(tmp_path):
    async def main():
        async with joined(tmp_path, "wait") as rank:
            worker = await rank.spawn()
            rank.process.kill()
            assert gone(worker)
            with pytest.raises(ChannelClosed):
                while True:  # receives what the supervisor sent before it was killed
                    await asyncio.wait_for(rank.peer.recv(FROM_SUPERVISOR), 10)

    run(main())


def test_a_worker_that_cannot_be_started_counts_as_dead(tmp_path):
    async def main():
        async with joined(tmp_path, "wait") as rank:
            await rank.receive(Registration)  # from now on the supervisor opens no files for itself
            supervisor = psutil.Process(rank.process.pid)
            supervisor.rlimit(psutil.RLIMIT_NOFILE, (supervisor.num_fds() + 1,) * 2)
            rank.peer.send(Spawn(0, worker=(0, 5), respawns=0))
            died = await rank.receive(Died)
            assert died.death.cause == "exit"
            assert died.death.detail.startswith("could not be started")

    run(main())


def test_a_worker_runs_even_if_its_log_cannot_be_written(tmp_path):
    async def main():
        (tmp_path / "logs").write_text("in the way")
        async with joined(tmp_path, "wait") as rank:
            worker = await rank.spawn()
            assert "cannot be written: File exists" in await asyncio.to_thread(rank.process.stderr.readline)
            assert worker.is_running()
            rank.peer.send(Finish(3, "all is lost"))
            assert (await rank.end())[0] == 3

    run(main())


def test_a_supervisor_imports_no_heavy_modules():
    script = "import recycle_pp.train, sys; print([m for m in ('torch', 'numpy', 'hydra', 'yaml') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "[]\n"


def test_a_coordinator_whose_name_has_several_addresses_is_known_by_its_name(monkeypatch):
    resolve = socket.getaddrinfo

    def two(host, *arguments, **more):
        hosts = ("127.0.0.1", "::1") if host == "node0" else (host,)
        return [found for each in hosts for found in resolve(each, *arguments, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", two)

    async def main():
        supervisor = Supervisor(Launch())
        port = free_ports()
        await supervisor._listen("node0", port, TOKEN, Settings())
        assert supervisor._place[:2] == ("node0", port)
        supervisor.close()

    run(main())


def test_a_leader_of_an_earlier_job_cannot_depose_the_leader_at_the_same_address():
    async def main():
        supervisor = Supervisor(Launch())
        await supervisor._listen("127.0.0.1", 0, TOKEN, Settings())
        place, elsewhere = supervisor._place._replace(process=""), Place("127.0.0.1", free_ports())
        supervisor._job_id = "new"
        leader = Leader(0, 0, *place[:2])
        supervisor._leadership.agreement = new = Election(0, place, TOKEN, leader, job_id="new")
        old = Election(1, elsewhere, TOKEN, leader, job_id="old")
        old.voter.memberships = [Membership((1, 5), 1, {0: place, 1: elsewhere})]
        old.voter.follow(Leader(1, 1, *elsewhere[:2]))
        try:
            with pytest.raises(LostMajority, match="only 1 of supervisors 0, 1 can answer"):
                await asyncio.wait_for(old.confirm(held=False), 5)
            assert new.voter.leader == leader and new.voter.term == 0
            same = VoterClient(place, TOKEN, job_id="new")
            assert (await same.ask(encode(Who()))).leader == leader
            same.close()
        finally:
            for agreement in (old, new):
                agreement.close()
            supervisor.close()


def test_a_request_of_an_operator_for_an_earlier_job_at_the_same_address_is_refused():
    async def main():
        supervisor = Supervisor(Launch())
        await supervisor._listen("127.0.0.1", 0, TOKEN, Settings())
        supervisor._job_id = "b7"
        host, port, _ = supervisor._place
        peer = await connect(host, port, TOKEN, OperatorHello("a5"), 10)
        peer.send(Stop())
        answer = await asyncio.wait_for(peer.recv(TO_OPERATOR), 10)
        assert answer == Another()
        peer.close()
        supervisor.close()

    run(main())
