"""Which broker an admin call belongs to: redirects to the owner, and calls relayed to the owners of partitions and bundles.

Owns the rule of protocol sheet 9.1: a call about a topic or bundle that another broker owns is answered 307 with that broker's
address, the same path and query, and `authoritative=true`; the caller repeats it there. A call about something that is spread
over brokers (a partitioned topic, a namespace) is done part by part, here or by asking the part's owner. Chains of redirects
are bounded (INV17): while ownership moves, a caller is told to try again rather than sent round in circles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from braid.broker.registry import BrokerInfo
from braid.errors import NotReady, RequestError
from braid.model.names import TopicName
from braid.web.calls import Answered, Ask

if TYPE_CHECKING:
    from braid.client.admin_transport import Reply

T = TypeVar("T")
MAX_HOPS = 5
RELAY_SECONDS = 20.0
AT_ONCE = 16
"""Parts of one call that are worked on at the same time."""


class Owners:
    """One broker's view of who owns what, for the calls it gets."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._ownership = ask.admin.ownership

    async def here(self, topic: TopicName) -> None:
        """Return if this broker serves the topic; else end the call with a redirect."""
        found = await self._ownership.find(topic, authoritative=bool(self._ask.query.get("authoritative")))
        if not found.is_mine:
            self.redirect(found.broker)

    def redirect(self, broker: BrokerInfo) -> NoReturn:
        """End the call: the caller is to ask this broker."""
        hops = int(self._ask.query.get("hops") or 0) + 1
        if hops > MAX_HOPS:
            raise NotReady("The owner changes while brokers send this call on; try again in a moment.")
        if not broker.http_url:
            raise NotReady(f"The owner {broker.broker_id} has no admin API; ask it by other means.")
        given = self._ask.request.query_params
        query = [pair for pair in given.multi_items() if pair[0] not in ("authoritative", "hops")]
        query.append(("authoritative", "true"))
        if hops > 1:
            query.append(("hops", str(hops)))
        location = f"{broker.http_url}{self._ask.request.scope['path']}?{urlencode(query)}"
        raise Answered(307, f"{broker.broker_id} serves this; ask it.", {"location": location})

    async def each(
        self,
        names: Sequence[TopicName],
        work: Callable[[TopicName], Awaitable[T]],
        *,
        path: Callable[[TopicName], str] | None = None,
        method: str = "",
        query: dict[str, str] | None = None,
        tolerate: tuple[int, ...] = (),
    ) -> list[T | Any]:
        """Do `work` for each topic here, or ask its owner: for the same call, or the call told; results in order.

        An owner's answer without a body is the result True, its refusal with a status in `tolerate` is None. Any other refusal
        ends it; parts that were done stay done, so the work must be repeatable.
        """
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(name: TopicName) -> T | Any:
            async with gate:
                found = await self._ownership.find(name)
                if found.is_mine:
                    return await work(name)
                where = self._path_for(name) if path is None else f"/admin/v2{path(name)}"
                try:
                    answer = await self.relay(found.broker, where, method=method, query=query)
                except Answered as answered:
                    if answered.status in tolerate:
                        return None
                    raise
                return True if answer is None else answer

        if len(names) == 1:
            return [await one(names[0])]
        results = await asyncio.gather(*map(one, names), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def relay(self, broker: BrokerInfo, path: str, *, method: str = "", query: dict[str, str] | None = None) -> Any:
        """Ask another broker: the same call for another path, or the call told. Returns its JSON, None if there is none."""
        ask = self._ask
        asked = {key: value for key, value in ask.request.query_params.items() if key not in ("authoritative", "hops")}
        reply = await self._call(broker, method or ask.call.method, path, asked if query is None else query)
        is_json = "json" in reply.headers.get("content-type", "")
        return msgspec.json.decode(reply.body) if is_json and reply.body else None

    async def _call(self, broker: BrokerInfo, method: str, path: str, query: dict[str, str]) -> Reply:
        # Imported late: only a cluster of several brokers needs an HTTP client.
        from braid.client.admin_transport import AdminTransport
        from braid.client.operation import Operation

        body, links = self._ask.raw, self._ask.links
        if broker.http_url not in links:
            links[broker.http_url] = AdminTransport([broker.http_url], RELAY_SECONDS)
        pattern = path.replace("{", "{{").replace("}", "}}")
        kind = bytes if body else None
        operation: Operation[Any] = Operation("broker", "relay", method, pattern, object, "", body=kind)  # type: ignore[arg-type]
        try:
            return await links[broker.http_url].send(
                operation, {}, {**query, "authoritative": "true"}, msgspec.Raw(body) if body else None
            )
        except RequestError as error:
            if error.http_status is None:
                raise
            raise Answered(error.http_status, error.message) from error

    def _path_for(self, name: TopicName) -> str:
        """The path of this call with another topic in it; a topic is the part behind tenant and namespace."""
        parts = self._ask.request.scope["path"].split("/")
        parts[6] = quote(name.local_name, safe="")
        return "/".join(parts)
