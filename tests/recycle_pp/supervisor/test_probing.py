"""A supervisor probes which nodes it can reach."""

import asyncio

from recycle_pp.supervisor import probing
from recycle_pp.testing.ports import free_ports
from recycle_pp.wire.connection import serve
from recycle_pp.wire.messages.supervisors import Target

TOKEN = "a token of the job"


def test_nodes_that_refuse_or_do_not_answer_are_named(monkeypatch):
    monkeypatch.setattr(probing, "SECONDS", 0.5)

    async def main():
        async def handle(peer):
            pass

        server = await serve(handle, "127.0.0.1", 0, TOKEN)
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        ports = [of.sockets[0].getsockname()[1] for of in (server, silent)] + [free_ports(1)]
        targets = [Target(f"node{k}", "127.0.0.1", port) for k, port in enumerate(ports)]
        found = await probing.unreachable(targets, TOKEN)
        assert found == [f"node1 (127.0.0.1:{ports[1]})", f"node2 (127.0.0.1:{ports[2]})"]
        server.close()
        silent.close()

    asyncio.run(main())
