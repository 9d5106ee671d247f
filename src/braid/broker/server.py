"""`BrokerServer`: a broker with its listening socket.

Owns the listener and the connections; stopping closes the listener first, then the topics (clients are told to look
elsewhere), then the connections. A broker's id is its host and HTTP port, so whoever starts an HTTP server announces the broker
(`BrokerService.announce`); without one the binary port serves as well and the broker announces itself.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from braid.broker.connection import BrokerConnection
from braid.broker.service import BrokerService
from braid.runtime.network import Listener, public_name, url_host


class BrokerServer:
    """Serves the binary protocol on one port."""

    def __init__(self, service: BrokerService, *, with_http: bool = False) -> None:
        self.service = service
        self.host = url_host(service.config.advertised_address or public_name(service.config.bind_address))
        self._with_http = with_http
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
        self.service.service_url = f"pulsar://{self.host}:{self.port}"
        if not self._with_http:
            try:
                await self.service.announce(f"{self.host}:{self.port}")
            except BaseException as error:
                await self.__aexit__(type(error), error, None)
                raise
        return self

    async def kill(self) -> None:
        """End at once, as a crash would."""
        if self._listener is not None:
            self._listener.close()
        for _turn in range(10):  # a connection accepted just before shows up a few turns of the loop later
            for connection in list(self.connections):
                connection.link.abort()
            await asyncio.sleep(0)
        await self.service.kill()

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
