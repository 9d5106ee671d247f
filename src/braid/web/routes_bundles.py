"""REST: the bundles of a namespace: list, unload, hand over, split."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from braid.broker.namespaces import BundlesData, bundles_json
from braid.errors import NotFound
from braid.model.bundles import Bundle, boundary, hash_of
from braid.model.names import NamespaceName, TopicName
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query
from braid.web.owners import Owners
from braid.web.routes_namespaces import NAMESPACE

Json = dict[str, Any]
BUNDLE = f"{NAMESPACE}/{{bundle}}"
DESTINATION = Query("destinationBroker", "The broker that shall own the bundle next (host and HTTP port)")
ALGORITHM = "range_equally_divide"


def bundle_calls(admin: Admin) -> Calls:
    """Calls about bundles."""
    calls = Calls("bundles")
    _namespace(admin, calls)
    _bundle(admin, calls)
    return calls


async def _known(admin: Admin, ask: Ask) -> tuple[NamespaceName, Bundle]:
    """The bundle the path names, which must be one of the namespace's."""
    name = ask.namespace
    bundle = Bundle.parse(ask.text("bundle"))
    await admin.service.namespaces.policies(name)
    if bundle not in await admin.ownership.bundles(name):
        raise NotFound(f"The namespace {name} has no bundle {bundle}; its bundles are listed at .../bundles.")
    return name, bundle


def _namespace(admin: Admin, calls: Calls) -> None:
    @calls.get(f"{NAMESPACE}/bundles", BundlesData)
    async def list_bundles(ask: Ask) -> Any:
        """The bundles of a namespace: their boundaries and their number."""
        name = ask.namespace
        await admin.service.namespaces.policies(name)
        return bundles_json(await admin.ownership.bundles(name))

    @calls.put(f"{NAMESPACE}/unload")
    async def unload_namespace(ask: Ask) -> None:
        """Close all topics of a namespace and give its bundles up, so that they find owners anew."""
        name = ask.namespace
        await admin.service.namespaces.policies(name)
        for bundle in await admin.ownership.bundles(name):
            owner = await admin.ownership.owner(name, bundle, fresh=True)
            if owner is None:
                continue
            if owner.broker_id == admin.ownership.broker_id:
                await admin.ownership.unload(name, bundle)
            else:
                path = f"/admin/v2/namespaces/{quote(name.tenant)}/{quote(name.local_name)}/{bundle}/unload"
                await Owners(ask).relay(owner, path)


def _bundle(admin: Admin, calls: Calls) -> None:
    @calls.put(f"{BUNDLE}/unload", query=(DESTINATION,), owner=True)
    async def unload(ask: Ask) -> None:
        """Close the topics of a bundle and give it up; with `destinationBroker`, to that broker."""
        name, bundle = await _known(admin, ask)
        await admin.ownership.unload(name, bundle, destination=ask.query["destinationBroker"])

    splitting = (
        Query("unload", "Give the halves up as well", bool, False),
        Query("splitAlgorithmName", "How to split", str, ALGORITHM, (ALGORITHM,)),
    )
    positions = Annotated[list[int], msgspec.Meta(max_length=0)] | None

    @calls.put(f"{BUNDLE}/split", query=splitting, body=positions, body_default=None, owner=True)
    async def split(ask: Ask) -> None:
        """Split a bundle into two halves."""
        name, bundle = await _known(admin, ask)
        await admin.ownership.split(name, bundle)
        if ask.query["unload"]:
            for half in bundle.halves():
                await admin.ownership.unload(name, half)

    topics = Query("topics", "Names of topics, separated by commas; all topics of the bundle if empty")

    @calls.get(f"{BUNDLE}/topicHashPositions", Json, query=(topics,))
    async def positions_of(ask: Ask) -> Any:
        """Where the topics of a bundle lie in the hash space."""
        name, bundle = await _known(admin, ask)
        wanted = [text for text in (ask.query["topics"] or "").split(",") if text]
        names = [TopicName.parse(text) for text in wanted or await admin.service.list_topics(name)]
        found = {}
        for number, topic in enumerate(names):
            if number % 1000 == 999:
                await asyncio.sleep(0)
            if topic.namespace == name and bundle.contains(hash_of(topic)):
                found[str(topic)] = hash_of(topic)
        return {
            "namespace": str(name),
            "bundle": str(bundle),
            "hashPositions": found,
            "boundaries": [boundary(bundle.start), boundary(bundle.end)],
        }
