"""Small worlds around faults that seeds have found, so that each stays found whatever becomes of its seed."""

from __future__ import annotations

import asyncio

from braid.client import Client, ClientConfig
from braid.errors import BraidError
from braid.runtime.env import Random, Runtime
from braid.testing.sim.loop import Node, SimLoop, on, run
from braid.testing.sim.network import Fabric
from braid.testing.sim.ports import SimClock


def test_a_connection_given_up_during_its_handshake_is_closed() -> None:
    """W1, seeds 191 and 213: a client that was closed while it connected left the socket open for ever."""

    async def main(loop: SimLoop) -> int:
        fabric = Fabric(Random(1))
        server, client = Node("server"), Node("client")
        await fabric.port(server).listen("server", 6650, asyncio.Protocol)  # accepts and says nothing

        async def use() -> None:
            runtime = Runtime(clock=SimClock(), random=Random(2), network=fabric.port(client))
            sdk = Client("pulsar://server:6650", config=ClientConfig(connect_timeout=60), runtime=runtime)
            try:
                async with asyncio.timeout(1):
                    await sdk.partitions("persistent://public/default/t")
            except (TimeoutError, BraidError):
                await sdk.close()

        with on(client):
            task = loop.create_task(use())
        await task
        await asyncio.sleep(1)
        return len(fabric.ends())

    assert run(0, main) == 0
