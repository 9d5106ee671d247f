"""Which broker an admin call about a scalable topic belongs to: the leader of the topic's controller.

Owns the rule that a call which only the leader can do reaches it from any broker (R468-6): `LedElsewhere` becomes a 307 with
the leader's address, and what is done to all topics of a namespace is done topic by topic, here or by asking the leader. Calls
that any broker can answer from the metadata store do not come here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

from braid.broker.registry import BrokerInfo
from braid.errors import InvalidArgument, InvalidTopicName, LedElsewhere, NotFound, NotReady
from braid.model.names import Domain, NamespaceName, TopicName, encode
from braid.web.calls import Answered, Ask
from braid.web.owners import Owners

Json = dict[str, Any]


def scalable_topic(ask: Ask) -> TopicName:
    """The scalable topic the path names; 405 if the broker has none."""
    ask.admin.service.check_scalable()
    name = TopicName.parse(f"{Domain.TOPIC}://{ask.namespace}/{ask.text('topic')}")
    if name.is_partition:  # its record would be that of another name
        raise InvalidTopicName(f"{name} ends like the name of a partition; scalable topics have segments instead.")
    return name


class Leaders:
    """One broker's view of who leads what, for the calls it gets."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._service = ask.admin.service
        self._ownership = ask.admin.ownership

    async def redirect(self, elsewhere: LedElsewhere) -> NoReturn:
        """End the call: the caller is to ask the leader. 503 if there is none at the moment, 404 if the topic is gone."""
        try:
            broker = await self._leader(elsewhere)
        except NotReady:
            await self._service.scalable.metadata(scalable_topic(self._ask))
            raise
        Owners(self._ask).redirect(broker)

    async def delete_all(self, namespace: NamespaceName) -> None:
        """Delete every scalable topic of a namespace, in use or not."""
        scalable = self._service.scalable
        for topic in await self._topics(namespace):
            await self._do(topic, "DELETE", "", lambda each: scalable.delete_topic(each, force=True), {"force": "true"})

    async def clear_all(self, namespace: NamespaceName, wanted: str | None) -> None:
        """Acknowledge everything on every scalable topic of a namespace, for one subscription or all."""

        async def clear(name: str, topic: TopicName) -> None:
            await (await self._service.scalable.lead_scalable(topic)).clear_backlog(name)

        for topic, name, _stats in await self._subscriptions(namespace, wanted):
            await self._do(topic, "POST", f"/subscriptions/{encode(name)}/skip-all", partial(clear, name))

    async def unsubscribe(self, namespace: NamespaceName, wanted: str) -> None:
        """Delete a subscription from every scalable topic of a namespace; refused if it has consumers."""

        async def delete(topic: TopicName) -> None:
            await (await self._service.scalable.lead_scalable(topic)).delete_subscription(wanted)

        for topic, name, stats in await self._subscriptions(namespace, wanted):
            if stats.get("connectedConsumers"):
                raise InvalidArgument(f"The subscription {name} of {topic} has consumers; close them first.")
            await self._do(topic, "DELETE", f"/subscriptions/{encode(name)}", delete)

    async def _subscriptions(self, namespace: NamespaceName, wanted: str | None) -> list[tuple[TopicName, str, Json]]:
        """(topic, subscription, its stats) of a namespace."""

        async def stats(topic: TopicName) -> Json:
            return await (await self._service.scalable.lead_scalable(topic)).stats()

        found = []
        for topic in await self._topics(namespace):
            known: Json = (await self._do(topic, "GET", "/stats", stats) or {}).get("subscriptions", {})
            found += [(topic, name, each) for name, each in known.items() if wanted in (None, name)]
        return found

    async def _topics(self, namespace: NamespaceName) -> list[TopicName]:
        if not self._service.has_scalable:
            return []
        return [TopicName.parse(text) for text in await self._service.scalable.topics(namespace)]

    async def _do(
        self,
        topic: TopicName,
        method: str,
        below: str,
        work: Callable[[TopicName], Awaitable[Any]],
        query: dict[str, str] | None = None,
    ) -> Any:
        """`work` if this broker leads the topic, else the call below its path at the leader; None if it is gone meanwhile."""
        try:
            return await work(topic)
        except NotFound:
            return None
        except LedElsewhere as elsewhere:
            broker = await self._leader(elsewhere)
        path = f"/admin/v2/scalable/{topic.namespace}/{encode(topic.local_name)}{below}"
        try:
            return await Owners(self._ask).relay(broker, path, method=method, query=query or {})
        except Answered as answered:
            if answered.status == 404:
                return None
            raise

    async def _leader(self, elsewhere: LedElsewhere) -> BrokerInfo:
        for broker in await self._ownership.brokers():
            if broker.broker_id == elsewhere.broker_id and broker.broker_id != self._ownership.broker_id:
                return broker
        raise NotReady(elsewhere.message or "The topic has no leader at the moment; try again.")
