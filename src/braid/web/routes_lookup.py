"""REST: `/lookup/v2`: which broker serves a topic, for clients that look up over HTTP (protocol sheet 6.4)."""

from __future__ import annotations

from typing import Any

import msgspec

from braid.errors import InvalidArgument, NotAllowed
from braid.model.bundles import find, hash_of
from braid.model.names import Domain, TopicName
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query
from braid.web.owners import Owners

LISTENER = Query("listenerName", "Name of an advertised listener; there are none in this version")


class LookupData(msgspec.Struct, frozen=True, rename="camel"):
    """The addresses of the broker that serves a topic."""

    broker_id: str
    broker_url: str
    broker_url_tls: str
    http_url: str
    http_url_tls: str
    native_url: str
    broker_url_ssl: str


def lookup_calls(admin: Admin) -> Calls:
    """Calls below `/lookup/v2`."""
    calls = Calls("lookup", "/lookup/v2")

    async def named(ask: Ask) -> TopicName:
        domain = ask.text("domain")
        if domain not in tuple(Domain):
            raise InvalidArgument(f"{domain[:40]!r} is no kind of topic; it is {', '.join(Domain)}.")
        name = TopicName.parse(f"{domain}://{ask.namespace}/{ask.text('topic')}")
        admin.service.check_lookup(name)
        if admin.service.transactions.find(name) is None:
            await admin.service.namespaces.policies(name.namespace)
        return name

    async def check_usable(name: TopicName) -> None:
        """404 unless there is such a topic or its first use would make it."""
        service = admin.service
        policies = await service.namespaces.policies(name.namespace)
        if name.domain is Domain.SEGMENT:
            await service.records.listed(name)
        elif name.domain is Domain.TOPIC:
            await service.scalable.metadata(name)
        elif not policies.auto_topic_creation.allow_auto_topic_creation:
            await admin.check_exists(name)

    path = "/topic/{domain}/{tenant}/{namespace}/{topic}"

    @calls.get(path, LookupData, query=(LISTENER,), owner=True)
    async def lookup(ask: Ask) -> Any:
        """The broker that serves a topic; 404 if the topic does not exist and would not be created on first use."""
        name = await named(ask)
        if listener := ask.query["listenerName"] or ask.request.headers.get("x-pulsar-listenername"):
            raise NotAllowed(f"The broker has no listener {listener[:100]!r}.")
        if (coordinator := admin.service.transactions.find(name)) is not None:
            admin.service.lookups += 1
            url = coordinator.service_url
            return LookupData(coordinator.broker_id, url, "", coordinator.http_url, "", url, "")
        await check_usable(name)
        found = await admin.ownership.find(name, authoritative=ask.query["authoritative"])
        broker = found.broker
        admin.service.lookups += 1
        admin.service.lookup_redirects += not found.is_mine
        if found.authoritative and not found.is_mine:  # it does not have the topic yet, and takes it when it is asked
            Owners(ask).redirect(broker)
        return LookupData(broker.broker_id, broker.service_url, "", broker.http_url, "", broker.service_url, "")

    @calls.get(f"{path}/bundle", str, is_text=True)
    async def bundle(ask: Ask) -> Any:
        """The bundle a topic belongs to."""
        name = await named(ask)
        return str(find(await admin.ownership.bundles(name.namespace), hash_of(name)))

    return calls
