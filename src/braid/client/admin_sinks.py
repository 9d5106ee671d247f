"""`AdminClient.sinks`."""

from __future__ import annotations

from braid.client import operations_transactions as ops
from braid.client.admin_calls import Calls, given
from braid.client.admin_transaction_types import SinkInfo
from braid.errors import InvalidArgument

Infos = list[SinkInfo]
DEFAULT_LIMIT = 1000
MAX_LIMIT = 10_000


class Sinks(Calls):
    """Sinks of the whole cluster; any broker can be asked. One is named as the job names it."""

    async def list(self, *, limit: int = DEFAULT_LIMIT) -> Infos:
        """Sinks by name, each with the batches it has and the run that writes to it."""
        if type(limit) is not int or not 1 <= limit <= MAX_LIMIT:
            raise InvalidArgument(f"From 1 to {MAX_LIMIT} sinks can be listed, not {limit!r:.100}.")
        return await self._call(ops.SINKS_LIST, {}, {"limit": limit})

    async def describe(self, sink: str) -> SinkInfo:
        """One sink."""
        return await self._call(ops.SINKS_DESCRIBE, {"sink": given("sink", sink)})

    async def delete(self, sink: str) -> None:
        """Forget a sink and abort what is being written to it. A job that goes on writes again what it wrote before."""
        await self._call(ops.SINKS_DELETE, {"sink": given("sink", sink)})
