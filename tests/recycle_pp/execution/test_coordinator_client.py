"""What a worker reports to a new coordinator before its session has started."""

import socket
import threading

from recycle_schedules import Worker

from recycle_pp.config.settings import Settings
from recycle_pp.execution import coordinator_client
from recycle_pp.execution.coordinator_client import CoordinatorClient
from recycle_pp.wire.connection import Channel
from recycle_pp.wire.messages.lifecycle import WorkerWelcome
from recycle_pp.wire.messages.workers import FROM_WORKER, State
from recycle_pp.wire.worker_spec import WorkerSpec


def test_a_worker_that_was_only_welcomed_reports_the_steps_of_the_checkpoint_that_it_will_load(monkeypatch):
    monkeypatch.setattr(coordinator_client, "later_addresses", lambda: [])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def work():
            client = CoordinatorClient(WorkerSpec("127.0.0.1", port, "token", "job", 2, 1, "", {}))
            client.recv()
            client.recv()  # reconnects

        threading.Thread(target=work, daemon=True).start()
        first, hello = Channel.accept(listener.accept()[0], "token")
        assert not hello.moved
        first.send(WorkerWelcome(Settings(), Worker(1, 0), "", resume=3, faults=[]))
        first.close()
        second, hello = Channel.accept(listener.accept()[0], "token")
        assert hello.moved and second.recv(FROM_WORKER, 20.0) == State(committed=2)
        second.close()
