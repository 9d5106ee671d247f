"""`BrokerServer`: a broker with its listening socket.

Owns the listener and the connections; stopping closes the listener first, then the topics (clients are told to look
elsewhere), then the connections.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from braid.broker.connection import BrokerConnection
from braid.broker.service import BrokerService
from braid.runtime.network import Listener, public_name, url_host


class BrokerServer:
    """Serves the binary protocol on one port."""

    def __init__(self, service: BrokerService) -> None:
        self.service = service
        self.connections: set[BrokerConnection] = set()
        self._listener: Listener | None = None

    @property
    def port(self) -> int:
        """The port listened on."""
        if self._listener is None:
            raise RuntimeError("the broker is not started")
        return self._listener.port

    async def __aenter__(self) -> BrokerServer:
        config = self.service.config
        await self.service.start()
        self._listener = await self.service.runtime.network.listen(
            config.bind_address, config.port, lambda: BrokerConnection(self.service, self.connections)
        )
        host = config.advertised_address or public_name(config.bind_address)
        self.service.service_url = f"pulsar://{url_host(host)}:{self.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        await self.service.close()
        for _turn in range(10):  # a connection accepted just before shows up a few turns of the loop later
            for connection in list(self.connections):
                await connection.close()
            await asyncio.sleep(0)
