"""Waiting nodes repeatedly print which node they wait for, and why."""

import socketserver
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from recycle_pp.supervisor.joining import explain
from recycle_pp.telemetry.run_folder import RunFolder
from recycle_pp.testing.local_cluster import Part, Zygote
from recycle_pp.testing.ports import free_ports

from .launched import TOKEN, Launched

pytestmark = pytest.mark.timeout(300)
OURS, THEIRS = {"RECYCLE_TOKEN": "t" * 32}, {"RECYCLE_TOKEN": "u" * 32}


@pytest.fixture(scope="module")
def hasty(tmp_path_factory):
    """A zygote whose jobs print status lines every half second instead of every ten seconds."""
    preload = tmp_path_factory.mktemp("hasty") / "hasty.py"
    preload.write_text(
        "from recycle_pp.coordinator import arrivals\n"
        "from recycle_pp.supervisor import joining\n"
        "from recycle_pp.wire import connection\n"
        "joining.REPORT_SECONDS = arrivals.SECONDS = connection.REPEAT_SECONDS = 0.5\n"
    )
    with Zygote(preload) as zygote:
        yield zygote


@pytest.fixture
def port():
    return free_ports()


def node(zygote, tmp_path, number, address, token):
    """Starts one of two nodes with two ranks each."""
    arguments = ["parallel=2x2", "model=tiny", "run.steps=3", f"control.address={address}"]
    arguments += ["control.interface=127.0.0.1", f"run.dir={tmp_path / 'run'}"]
    return zygote.start(arguments, RunFolder(tmp_path / "run"), Part(2 * number, 2, 4), token)


@contextmanager
def said(job, sentence, times=2):
    """Waits until the job has printed the sentence `times` times. After the block, waits shortly for the job's end."""
    deadline = time.monotonic() + 60
    while job.output.count(sentence) < times:
        assert time.monotonic() < deadline, job.output
        time.sleep(0.05)
    yield
    with suppress(TimeoutError):
        job.wait(0.1)


@pytest.mark.slow
def test_a_node_without_a_coordinator_reports_it_and_continues_when_it_appears(hasty, tmp_path, port):
    with node(hasty, tmp_path, 1, f"127.0.0.1:{port}", OURS) as late:
        with said(late, f"s for rank 0's node at 127.0.0.1:{port}: nothing listens there"):
            assert late.output.startswith("recycle_pp: node ")
        with node(hasty, tmp_path, 0, f"127.0.0.1:{port}", OURS) as first:
            assert first.wait(60) == 0, first.output
            assert late.wait(60) == 0, late.output


@pytest.mark.slow
def test_different_tokens_are_reported_on_both_nodes(hasty, tmp_path, port):
    with node(hasty, tmp_path, 0, f"127.0.0.1:{port}", OURS) as first:
        with node(hasty, tmp_path, 1, f"127.0.0.1:{port}", THEIRS) as other:
            with said(other, "the job there has a different RECYCLE_TOKEN; it must be the same on every node"):
                pass
            with said(first, "refused a connection from 127.0.0.1: its RECYCLE_TOKEN differs from this job's"):
                pass
            with said(first, ": ranks 2 to 3; see the output of their nodes"):
                pass


@pytest.mark.slow
def test_a_foreign_program_on_the_port_is_distinguished_from_a_job(hasty, tmp_path):
    class Greets(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Greets) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with node(hasty, tmp_path, 1, f"127.0.0.1:{server.server_address[1]}", OURS) as waits:
            with said(waits, "the process that listens there is not a recycle_pp job"):
                pass
        server.shutdown()


@pytest.mark.slow
def test_a_wrong_address_is_named(hasty, tmp_path):
    with node(hasty, tmp_path, 1, "no-such-host.invalid:29501", OURS) as waits:
        with said(waits, "s for rank 0's node at no-such-host.invalid:29501: this host name cannot be resolved"):
            pass


def test_connection_errors_are_explained():
    assert explain(TimeoutError()).startswith("no answer: the address is wrong, a firewall")
    assert explain(OSError(113, "No route to host")) == "No route to host"


@pytest.mark.slow
@pytest.mark.torchrun
def test_under_torchrun_a_missing_token_is_the_last_line_and_the_other_node_prints_why_it_waits(tmp_path, monkeypatch):
    class Forgetful(Launched):
        def _start(self, number, nodes, workers):
            monkeypatch.setattr("tests.failures.launched.TOKEN", TOKEN if number == 0 else "")
            return super()._start(number, nodes, workers)

    with Forgetful(tmp_path, nodes=2, workers=2, arguments=["run.steps=3"]) as job:
        assert job.wait([1], 120) == [1], job.explain()
        sentence = "a job on several nodes, or with control.address, needs its secret in the environment"
        assert job.output(1).count(f"recycle_pp: {sentence}") == 1, "only one rank may print it"
        assert f"traceback : {sentence}" in job.output(1)
        job.wait_until(lambda: "not connected after 4 s: ranks 2 to 3" in job.output(0), "report of missing ranks", 60)
        assert isinstance(job.agents[0], subprocess.Popen) and job.agents[0].poll() is None
