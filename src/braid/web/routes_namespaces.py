"""REST: namespaces themselves: list, create, delete, their topics and properties, and what is done to all their topics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from braid.broker.held_up import passed_over
from braid.broker.registry import BrokerInfo
from braid.errors import InvalidArgument, TopicNotFound
from braid.model.names import NamespaceName, TopicName
from braid.model.positions import LATEST
from braid.web.admin import Admin
from braid.web.calls import Answered, Ask, Calls, Query
from braid.web.leaders import Leaders
from braid.web.owners import Owners
from braid.web.policies import POLICY_DEFAULTS, Properties, checked_policies, checked_properties, shown
from braid.web.routes_clusters import FORCE

Json = dict[str, Any]
NAMESPACE = "/namespaces/{tenant}/{namespace}"
MODES = ("PERSISTENT", "NON_PERSISTENT", "ALL")
Here = Callable[[TopicName], Awaitable[None]]
There = Callable[[BrokerInfo, str], Awaitable[None]]


def namespace_calls(admin: Admin) -> Calls:
    """Calls about namespaces."""
    calls = Calls("namespaces")
    _life(admin, calls)
    _properties(admin, calls)
    _everything(admin, calls)
    return calls


async def _over_topics(admin: Admin, name: NamespaceName, here: Here, there: There) -> None:
    """Something for each topic of a namespace: `here`, or with its owner and its path, `there`."""
    for text in await admin.service.list_topics(name):
        topic = TopicName.parse(text)
        found = await admin.ownership.find(topic)
        if found.is_mine:
            await here(topic)
            continue
        try:
            await there(found.broker, f"/admin/v2/persistent/{name}/{quote(topic.local_name, safe='')}")
        except Answered as answered:
            if answered.status != 404:  # gone meanwhile, or without such a subscription
                raise


def _life(admin: Admin, calls: Calls) -> None:
    service = admin.service
    names = service.namespaces

    @calls.get("/namespaces/{tenant}", list[str])
    async def list_namespaces(ask: Ask) -> Any:
        """Names of a tenant's namespaces."""
        return await names.namespaces(ask.tenant)

    @calls.get(NAMESPACE, Json)
    async def get_policies(ask: Ask) -> Any:
        """All policies of a namespace, with their defaults."""
        name = ask.namespace
        return shown(POLICY_DEFAULTS | (await names.policies(name)).values, await admin.ownership.bundles(name))

    @calls.put(NAMESPACE, body=dict[str, Any] | None, body_default=None)
    async def create_namespace(ask: Ask) -> None:
        """Create a namespace, with policies if any are given; one that this version does not apply is refused."""
        name = ask.namespace
        tenant = await names.tenant(name.tenant)
        policies = await checked_policies(admin, ask.body or {}, tenant.get("allowedClusters", []))
        await names.create_namespace(name, policies)

    @calls.delete(NAMESPACE, query=(FORCE,))
    async def delete_namespace(ask: Ask) -> None:
        """Delete a namespace without topics; with `force=true` its topics are deleted first, even if they are in use."""
        name = ask.namespace
        if ask.query["force"]:
            await names.policies(name)
            await names.begin_deletion(name)  # or clients that come back make their topics anew
            try:
                await delete_all(ask, name)
            except BaseException:
                await names.end_deletion(name)
                raise
        await service.delete_namespace(name)

    async def delete_all(ask: Ask, name: NamespaceName) -> None:
        async def delete(topic: TopicName) -> None:
            try:
                await service.delete_topic(topic, force=True)
            except TopicNotFound:
                return  # gone meanwhile, as wanted

        async def remotely(broker: BrokerInfo, path: str) -> None:
            await Owners(ask).relay(broker, path, method="DELETE", query={"force": "true"})

        await _over_topics(admin, name, delete, remotely)
        await Leaders(ask).delete_all(name)
        for parent in await names.partitioned_topics(name):
            try:
                await names.delete_partitioned(TopicName.parse(parent))
            except TopicNotFound:
                continue

    mode = Query("mode", "Which topics", str, "PERSISTENT", MODES)

    @calls.get(f"{NAMESPACE}/topics", list[str], query=(mode, Query("includeSystemTopic", "There are none", bool, False)))
    async def topics(ask: Ask) -> Any:
        """Topics of a namespace, partitions one by one."""
        found = await service.list_topics(ask.namespace)
        return found if ask.query["mode"] != "NON_PERSISTENT" else []


def _properties(admin: Admin, calls: Calls) -> None:
    names = admin.service.namespaces

    async def properties_of(name: NamespaceName) -> dict[str, str]:
        return dict((await names.policies(name)).values.get("properties") or {})

    async def set_properties(name: NamespaceName, given: dict[str, str]) -> None:
        def change(values: Json) -> None:
            values["properties"] = checked_properties({**(values.get("properties") or {}), **given})

        await names.policies(name)
        await names.change_policies(name, change)

    @calls.get(f"{NAMESPACE}/properties", dict[str, str])
    async def get_properties(ask: Ask) -> Any:
        """Properties that users have set on a namespace."""
        return await properties_of(ask.namespace)

    @calls.put(f"{NAMESPACE}/properties", body=Properties)
    async def put_properties(ask: Ask) -> None:
        """Set these properties; others stay."""
        await set_properties(ask.namespace, ask.body)

    @calls.delete(f"{NAMESPACE}/properties")
    async def clear_properties(ask: Ask) -> None:
        """Remove all properties."""
        await names.policies(ask.namespace)
        await names.set_policy(ask.namespace, "properties", None)

    @calls.get(f"{NAMESPACE}/property/{{key}}", str, is_text=True, is_optional=True)
    async def get_property(ask: Ask) -> Any:
        """One property as text; 204 if it is not set."""
        return (await properties_of(ask.namespace)).get(ask.text("key"))

    @calls.put(f"{NAMESPACE}/property/{{key}}/{{value}}")
    async def put_property(ask: Ask) -> None:
        """Set one property."""
        await set_properties(ask.namespace, {ask.text("key"): ask.text("value")})

    @calls.delete(f"{NAMESPACE}/property/{{key}}", str, is_text=True, is_optional=True, status=200)
    async def delete_property(ask: Ask) -> Any:
        """Remove one property; answers the value it had, 204 if it was not set."""
        name, key = ask.namespace, ask.text("key")
        old: list[str] = []

        def change(values: Json) -> None:
            properties = dict(values.get("properties") or {})
            old[:] = [properties.pop(key)] if key in properties else []
            values["properties"] = properties

        await names.policies(name)
        await names.change_policies(name, change)
        return old[0] if old else None


def _everything(admin: Admin, calls: Calls) -> None:
    service = admin.service
    names = service.namespaces

    async def clear(ask: Ask, wanted: str | None) -> None:
        name, owners = ask.namespace, Owners(ask)
        await names.policies(name)

        async def here(topic: TopicName) -> None:
            for each in list((await service.topic(topic, create=False)).subscriptions.values()):
                if wanted in (None, each.name):
                    await each.seek(LATEST)

        async def there(broker: BrokerInfo, path: str) -> None:
            found = [wanted] if wanted else await owners.relay(broker, f"{path}/subscriptions", method="GET", query={})
            for each in found:
                await owners.relay(broker, f"{path}/subscription/{quote(each, safe='')}/skip_all", method="POST", query={})

        await _over_topics(admin, name, here, there)
        await Leaders(ask).clear_all(name, wanted)

    @calls.post(f"{NAMESPACE}/clearBacklog")
    async def clear_all(ask: Ask) -> None:
        """Acknowledge everything for all subscriptions of all topics."""
        await clear(ask, None)

    @calls.post(f"{NAMESPACE}/clearBacklog/{{subscription}}")
    async def clear_one(ask: Ask) -> None:
        """Acknowledge everything for this subscription on all topics."""
        await clear(ask, ask.subscription)

    @calls.post(f"{NAMESPACE}/unsubscribe/{{subscription}}")
    async def unsubscribe(ask: Ask) -> None:
        """Delete this subscription from all topics; 412 if it has consumers."""
        name, subscription = ask.namespace, ask.subscription
        await names.policies(name)

        async def here(topic: TopicName) -> None:
            loaded = await service.topic(topic, create=False)
            found = loaded.subscriptions.get(subscription)
            if found is None and subscription not in passed_over(loaded):
                return
            if found is not None and found.consumers:
                raise InvalidArgument(f"The subscription {subscription} of {topic} has consumers; close them first.")
            await loaded.delete_subscription(subscription)

        async def there(broker: BrokerInfo, path: str) -> None:
            await Owners(ask).relay(broker, f"{path}/subscription/{quote(subscription, safe='')}", method="DELETE", query={})

        await _over_topics(admin, name, here, there)
        await Leaders(ask).unsubscribe(name, subscription)
