"""A connection breaks without a death. Within seconds, the worker that was cut off is killed and restarted."""

import socket
import time

import psutil
import pytest

from recycle_pp.supervisor.foreign_sockets import connections_to

from .harness import Case, explain, pid_of


def break_connection(pid, port):
    """Shuts down the sending side of that process's connection to that port. The peer then reads an end of file.

    The receiving side stays open. If it were closed too, a later message would reset the connection, and a reset is no
    proof of a death.
    """
    try:
        (connection,) = connections_to(pid, port)
    except PermissionError:
        pytest.skip("needs permission to trace processes")
    with connection:
        connection.shutdown(socket.SHUT_WR)


def coordinator_port(job):
    """The port on which rank 0's supervisor listens."""
    listens = psutil.Process(job.supervisors()[0]).net_connections("tcp")
    return next(c.laddr.port for c in listens if c.status == psutil.CONN_LISTEN)


def test_a_worker_whose_control_connection_breaks_is_restarted(runs):
    case = Case("a control connection breaks", "2x2", steps=60, bound=120.0)

    def meanwhile(job):
        job.wait_for_event("started", 60)
        time.sleep(0.3)
        break_connection(pid_of("1.1", job.run.lines(job.run.events)), coordinator_port(job))

    outcome = runs.of(case, "a broken connection", meanwhile=meanwhile)
    runs.check_exact(outcome)
    (death,) = outcome.all("death_detected")
    assert death["worker"] == "1.1" and "because its connection broke" in death["detail"], explain(outcome)
    assert [e["worker"] for e in outcome.all("respawned")] == ["1.1"], explain(outcome)
    assert [e["worker"] for e in outcome.all("rejoined")] == ["1.1"], explain(outcome)


@pytest.mark.slow
def test_a_supervisor_whose_connection_breaks_returns_with_its_worker(runs):
    case = Case("a supervisor's connection breaks", "2x2", steps=60, bound=120.0)

    def meanwhile(job):
        job.wait_for_event("started", 60)
        time.sleep(0.3)
        break_connection(job.supervisors()[3], coordinator_port(job))

    outcome = runs.of(case, "a broken connection", meanwhile=meanwhile)
    runs.check_exact(outcome)
    assert [e["worker"] for e in outcome.all("supervisor_back")] == ["1.1"], explain(outcome)
    assert [e["worker"] for e in outcome.all("rejoined")] == ["1.1"], explain(outcome)
