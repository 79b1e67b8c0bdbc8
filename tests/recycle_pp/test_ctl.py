"""The command line of `recycle_pp.ctl`, and how it finds the coordinator. tests/failures/test_ctl.py has real jobs."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from recycle_pp import ctl
from recycle_pp.config.loading import load
from recycle_pp.telemetry.heartbeat import Heartbeat
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.wire.connection import ChannelClosed, serve
from recycle_pp.wire.messages.agreement import Leader, Place
from recycle_pp.wire.messages.ctl import (
    FROM_OPERATOR,
    Another,
    Begun,
    ChangeSettings,
    Done,
    Drain,
    Elsewhere,
    Ended,
    NotDone,
    ReadStacks,
    RecordProfile,
    Stop,
    TakeCheckpoint,
)
from recycle_pp.wire.messages.handshake import OperatorHello

DOCUMENT = Path(__file__).parents[2] / "docs" / "ctl.md"
TOKEN = "a secret of sixteen"
REQUESTS = {
    "stop": Stop(),
    "checkpoint": TakeCheckpoint(),
    "drain 1.2": Drain((1, 2)),
    "drain 1.2 --force": Drain((1, 2), force=True),
    "stacks 0.10": ReadStacks((0, 10)),
    "profile 1.2": RecordProfile((1, 2), 3),
    "profile 1.2 --steps 5": RecordProfile((1, 2), 5),
    "set checkpoint.every=50 schedule.rebalance=auto": ChangeSettings(
        {"checkpoint.every": 50, "schedule.rebalance": "auto"}
    ),
    "set checkpoint.minutes=2.5": ChangeSettings({"checkpoint.minutes": 2.5}),
    "set a=true b=null c=[1] d= e=1e-3": ChangeSettings({"a": True, "b": None, "c": "[1]", "d": "", "e": 1e-3}),
}


@pytest.fixture
def supervisor(monkeypatch):
    """supervisor(*conversations): starts a listener that plays the next conversation on each new connection.

    A conversation is a list of answers, after which the connection ends. None: no answer until the client leaves.
    The listener records the requests in `heard`; `place` is its address.
    """
    monkeypatch.setenv("RECYCLE_TOKEN", TOKEN)
    monkeypatch.setattr(ctl, "AGAIN", 0.01)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def start(*conversations):
        left, found = list(conversations), SimpleNamespace(heard=[])

        async def handle(peer):
            found.hello = peer.hello
            found.heard.append(await peer.recv(FROM_OPERATOR))
            for answer in left.pop(0):
                if answer is None:
                    with pytest.raises(ChannelClosed):
                        await peer.recv(FROM_OPERATOR)
                else:
                    peer.send(answer)

        async def listen():
            return await serve(handle, "127.0.0.1", 0, TOKEN)

        found.server = asyncio.run_coroutine_threadsafe(listen(), loop).result(10)
        found.place = Place(*found.server.sockets[0].getsockname())
        found.close = lambda: loop.call_soon_threadsafe(found.server.close)
        return found

    yield start
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def at(found):
    return f"{found.place.host}:{found.place.port}"


@pytest.mark.parametrize("words", REQUESTS)
def test_a_command_line_is_sent_as_one_request(words, supervisor, capsys):
    found = supervisor([Begun("now"), Done("that was done")])
    assert ctl.main([at(found), *words.split()]) == 0
    assert found.heard == [REQUESTS[words]]
    out, err = capsys.readouterr()
    assert out == "that was done\n" and err == "recycle_pp: now\n"


def test_a_refused_request_prints_one_sentence_and_exits_with_2(supervisor, capsys):
    found = supervisor([NotDone("worker 1.2 is the last of stage 2")])
    assert ctl.main([at(found), "drain", "1.2"]) == 2
    assert capsys.readouterr() == ("", "recycle_pp: worker 1.2 is the last of stage 2\n")


def test_any_supervisor_names_the_coordinator(supervisor, capsys):
    coordinator = supervisor([Done("saved")])
    other = supervisor([Elsewhere(Leader(3, 1, *coordinator.place[:2]))])
    assert ctl.main([at(other), "checkpoint"]) == 0
    assert coordinator.heard == [TakeCheckpoint()]


def test_a_request_is_repeated_if_the_coordinator_is_lost_before_it_is_done(supervisor, capsys):
    found = supervisor([Begun("the next commit saves a checkpoint")], [Elsewhere(None)], [Done("saved")])
    assert ctl.main([at(found), "checkpoint"]) == 0
    assert found.heard == 3 * [TakeCheckpoint()]
    assert "waits for the coordinator; the job may be electing one" in capsys.readouterr().err


def test_a_request_is_repeated_if_another_coordinator_takes_over_from_a_suspended_one(
    supervisor, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(ctl, "SUCCESSOR_SECONDS", 0.05)
    suspended, successor = supervisor([Begun("now"), None]), supervisor([Done("saved")])
    run = RunFolder.create(load({"run": {"dir": str(tmp_path)}}))
    Heartbeat(run, lambda: 0, at(suspended)).write([])
    threading.Timer(0.5, Heartbeat(run, lambda: 1, at(successor)).write, [[]]).start()
    assert ctl.main([str(tmp_path), "checkpoint"]) == 0
    assert capsys.readouterr().out == "saved\n"
    assert suspended.heard == successor.heard == [TakeCheckpoint()]


def test_a_request_for_a_run_folder_names_its_job_because_another_one_may_listen_at_its_address(supervisor, tmp_path):
    found = supervisor([Done("saved")], [Done("saved")])
    run = RunFolder.create(load({"run": {"dir": str(tmp_path)}}))
    Heartbeat(run, lambda: 0, at(found), "a5").write([])
    assert ctl.main([str(tmp_path), "checkpoint"]) == 0
    assert found.hello == OperatorHello("a5")
    assert ctl.main([at(found), "checkpoint"]) == 0
    assert found.hello == OperatorHello()


def test_a_request_is_repeated_if_the_job_of_the_folder_has_just_been_started_again(supervisor, tmp_path):
    found = supervisor([Another()], [Done("saved")])
    run = RunFolder.create(load({"run": {"dir": str(tmp_path)}}))
    Heartbeat(run, lambda: 0, at(found), "a5").write([])
    assert ctl.main([str(tmp_path), "checkpoint"]) == 0


def test_without_an_answer_the_command_gives_up_with_one_sentence(supervisor, capsys, monkeypatch):
    monkeypatch.setattr(ctl, "FIND_SECONDS", 0.1)
    found = supervisor()
    found.close()
    assert ctl.main([at(found), "stop"]) == 2
    assert f"no job answers at {at(found)}: " in capsys.readouterr().err.splitlines()[-1]


def test_stop_waits_for_all_supervisors_and_names_those_that_have_not_ended(supervisor, capsys, monkeypatch):
    monkeypatch.setattr(ctl, "END_SECONDS", 0.5)
    stays, goes = supervisor(), supervisor()
    found = supervisor([Ended("ctl stop; there is no checkpoint yet", [stays.place, goes.place])])
    goes.close()
    monkeypatch.setattr(ctl.Refusal, "lasts", lambda self, process: True)
    assert ctl.main([at(found), "stop"]) == 1
    out, err = capsys.readouterr()
    assert out == "the job has ended: ctl stop; there is no checkpoint yet\n"
    assert err == f"recycle_pp: the supervisor at {at(stays)} has not ended\n"


def test_a_folder_without_a_running_job_is_refused_at_once(tmp_path, capsys):
    assert ctl.main([str(tmp_path), "stop"]) == 2
    assert "contains no run" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("run: {}\n")
    assert ctl.main([str(tmp_path), "stop"]) == 2
    assert capsys.readouterr().err == f"recycle_pp: no job runs in {tmp_path}: there is no heartbeat.json\n"


def test_a_port_that_cannot_exist_is_refused_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setenv("RECYCLE_TOKEN", TOKEN)
    for port in (0, 99999, 10**20):
        assert ctl.main([f"127.0.0.1:{port}", "stop"]) == 2
        sentence = f"RUN must be HOST:PORT or a run folder, with a port from 1 to 65535, not '127.0.0.1:{port}'"
        assert capsys.readouterr() == ("", f"recycle_pp: {sentence}\n")


def test_the_documentation_shows_every_verb():
    text = DOCUMENT.read_text()
    assert all(f"\nrecycle ctl runs/mine {words.split()[0]}" in text for words in REQUESTS)
