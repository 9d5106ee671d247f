"""`AdminClient.namespaces`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from braid.client import operations_namespaces as ops
from braid.client.admin_calls import Calls, Names, given, namespace_parts
from braid.client.admin_types import AutoSubscriptionCreation, AutoTopicCreation, Json, Retention


class Namespaces(Calls):
    """Namespaces (`tenant/namespace`) and their policies."""

    async def list(self, tenant: str = "public") -> Names:
        """Names of a tenant's namespaces."""
        return await self._call(ops.NAMESPACES_LIST, {"tenant": given("tenant", tenant)})

    async def create(self, namespace: str, *, bundles: int | None = None) -> None:
        """Create a namespace, with so many bundles or as many as the broker likes."""
        policies: Json = {} if bundles is None else {"bundles": {"numBundles": bundles}}
        await self._call(ops.NAMESPACES_CREATE, namespace_parts(namespace), body=policies)

    async def delete(self, namespace: str, *, force: bool = False) -> None:
        """Delete a namespace without topics; with `force` also its topics, even if they are in use."""
        await self._call(ops.NAMESPACES_DELETE, namespace_parts(namespace), {"force": force})

    async def policies(self, namespace: str) -> Json:
        """All policies, by Pulsar's names."""
        return await self._call(ops.NAMESPACES_POLICIES, namespace_parts(namespace))

    async def unload(self, namespace: str) -> None:
        """Give all its bundles away: clients look their topics up again."""
        await self._call(ops.NAMESPACES_UNLOAD, namespace_parts(namespace))

    async def topics(self, namespace: str) -> Names:
        """Topics of a namespace, partitions one by one."""
        return await self._call(ops.NAMESPACES_TOPICS, namespace_parts(namespace), {"mode": "ALL"})

    async def permissions(self, namespace: str) -> dict[str, Names]:
        """What each role may do."""
        return await self._call(ops.NAMESPACES_PERMISSIONS, namespace_parts(namespace))

    async def grant(self, namespace: str, role: str, *, actions: Sequence[str]) -> None:
        """Let a role do something: produce, consume, functions, sources, sinks, packages."""
        await self._call(ops.NAMESPACES_GRANT, {**namespace_parts(namespace), "role": role}, body=tuple(actions))

    async def revoke(self, namespace: str, role: str) -> None:
        """Take all permissions in the namespace from a role."""
        await self._call(ops.NAMESPACES_REVOKE, {**namespace_parts(namespace), "role": role})

    async def retention(self, namespace: str) -> Retention | None:
        """How long acknowledged messages are kept; None = the broker's setting."""
        return await self._call_or_none(ops.NAMESPACES_RETENTION, namespace_parts(namespace))

    async def set_retention(self, namespace: str, *, minutes: int, megabytes: int) -> None:
        """Keep acknowledged messages for a time and up to a size; -1 is no limit."""
        body = Retention(retention_time_in_minutes=minutes, retention_size_in_mb=megabytes)
        await self._call(ops.NAMESPACES_SET_RETENTION, namespace_parts(namespace), body=body)

    async def remove_retention(self, namespace: str) -> None:
        """Let the broker's setting apply."""
        await self._call(ops.NAMESPACES_REMOVE_RETENTION, namespace_parts(namespace))

    async def deduplication(self, namespace: str) -> bool | None:
        """Whether deduplication is on; None = the broker's setting."""
        return await self._call_or_none(ops.NAMESPACES_DEDUPLICATION, namespace_parts(namespace))

    async def set_deduplication(self, namespace: str, *, disable: bool = False) -> None:
        """Switch deduplication on, or off with `disable`."""
        await self._call(ops.NAMESPACES_SET_DEDUPLICATION, namespace_parts(namespace), body=not disable)

    async def remove_deduplication(self, namespace: str) -> None:
        """Let the broker's setting apply."""
        await self._call(ops.NAMESPACES_REMOVE_DEDUPLICATION, namespace_parts(namespace))

    async def auto_topics(self, namespace: str) -> AutoTopicCreation | None:
        """Whether and how topics come to be on first use; None = the broker's setting."""
        return await self._call_or_none(ops.NAMESPACES_AUTO_TOPICS, namespace_parts(namespace))

    async def set_auto_topics(self, namespace: str, *, partitions: int = 0, disable: bool = False) -> None:
        """Let topics come to be on first use, plain or with partitions; or not, with `disable`."""
        body = AutoTopicCreation(
            allow_auto_topic_creation=not disable,
            topic_type="partitioned" if partitions else "non-partitioned",
            default_num_partitions=partitions or 1,
        )
        await self._call(ops.NAMESPACES_SET_AUTO_TOPICS, namespace_parts(namespace), body=body)

    async def remove_auto_topics(self, namespace: str) -> None:
        """Let the broker's setting apply."""
        await self._call(ops.NAMESPACES_REMOVE_AUTO_TOPICS, namespace_parts(namespace))

    async def auto_subscriptions(self, namespace: str) -> bool | None:
        """Whether subscriptions come to be on first use; None = the broker's setting."""
        found = await self._call_or_none(ops.NAMESPACES_AUTO_SUBSCRIPTIONS, namespace_parts(namespace))
        return None if found is None else found.allow_auto_subscription_creation

    async def set_auto_subscriptions(self, namespace: str, *, disable: bool = False) -> None:
        """Let subscriptions come to be on first use, or not with `disable`."""
        body = AutoSubscriptionCreation(allow_auto_subscription_creation=not disable)
        await self._call(ops.NAMESPACES_SET_AUTO_SUBSCRIPTIONS, namespace_parts(namespace), body=body)

    async def remove_auto_subscriptions(self, namespace: str) -> None:
        """Let the broker's setting apply."""
        await self._call(ops.NAMESPACES_REMOVE_AUTO_SUBSCRIPTIONS, namespace_parts(namespace))

    async def schema_strategy(self, namespace: str) -> str | None:
        """Which changes of a schema are compatible; None = the broker's setting."""
        return await self._call_or_none(ops.NAMESPACES_SCHEMA_STRATEGY, namespace_parts(namespace))

    async def set_schema_strategy(self, namespace: str, strategy: str) -> None:
        """Say which changes of a schema are compatible: BACKWARD, FORWARD, FULL, ..."""
        await self._call(ops.NAMESPACES_SET_SCHEMA_STRATEGY, namespace_parts(namespace), body=strategy)

    async def properties(self, namespace: str) -> dict[str, str]:
        """The properties of a namespace."""
        return await self._call(ops.NAMESPACES_PROPERTIES, namespace_parts(namespace))

    async def set_properties(self, namespace: str, properties: Mapping[str, str]) -> None:
        """Set properties; others stay."""
        await self._call(ops.NAMESPACES_SET_PROPERTIES, namespace_parts(namespace), body=dict(properties))

    async def remove_properties(self, namespace: str) -> None:
        """Remove all properties."""
        await self._call(ops.NAMESPACES_REMOVE_PROPERTIES, namespace_parts(namespace))

    async def clear_backlog(self, namespace: str, *, subscription: str | None = None) -> None:
        """Skip the backlog of all subscriptions, or of those with one name."""
        if subscription is None:
            await self._call(ops.NAMESPACES_CLEAR_BACKLOG, namespace_parts(namespace))
        else:
            names = {**namespace_parts(namespace), "subscription": given("subscription", subscription)}
            await self._call(ops.NAMESPACES_CLEAR_BACKLOG_OF, names)

    async def unsubscribe(self, namespace: str, subscription: str) -> None:
        """Delete a subscription from every topic of the namespace."""
        names = {**namespace_parts(namespace), "subscription": given("subscription", subscription)}
        await self._call(ops.NAMESPACES_UNSUBSCRIBE, names)
