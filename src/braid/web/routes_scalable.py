"""REST: scalable topics: list, create, look at, split, merge and delete them, and their subscriptions (scalable.md 7.6).

Root `/admin/v2/scalable`; `/admin/v2/scalable-topics`, the design's name, is the same (`app.py`). Calls about names and layouts
are answered by any broker from the metadata store; what changes a topic or counts its clients is done by its leader.
"""

from __future__ import annotations

from typing import Any

import msgspec

from braid.errors import InvalidArgument, InvalidTopicName
from braid.model.names import TopicName
from braid.model.routing import Routing
from braid.scalable.controller import ScalableTopicController
from braid.scalable.records import ScalableTopicMetadata, SegmentRecord
from braid.web.admin import Admin
from braid.web.calls import MAX_INT64, Ask, Calls, Query
from braid.web.leaders import scalable_topic
from braid.web.policies import Properties, Retention, check_retention, checked_properties, policy_of
from braid.web.routes_clusters import FORCE
from braid.web.routes_policies import APPLIED

Json = dict[str, Any]
LIST = "/scalable/{tenant}/{namespace}"
TOPIC = LIST + "/{topic}"
SUBSCRIPTION = TOPIC + "/subscriptions/{subscription}"
INITIAL = Query("initial", "Where it begins: earliest or latest", str, "earliest", ("earliest", "latest"))
TIMESTAMP = Query("timestamp", "Milliseconds since 1970; 0 is the beginning", int)


def scalable_calls(admin: Admin) -> Calls:
    """Calls about scalable topics."""
    calls = Calls("scalable topics")
    _topics(admin, calls)
    _layout(calls)
    _subscriptions(calls)
    return calls


async def leader(ask: Ask) -> ScalableTopicController:
    """The controller of the topic the path names, if it leads here; else the call is sent to the broker where it does."""
    return await ask.admin.service.scalable.lead_scalable(scalable_topic(ask))


def time_of(ask: Ask) -> int:
    """The time a subscription shall go to."""
    found = ask.query["timestamp"]
    if found is None:
        raise InvalidArgument("Where to go is told by the query parameter timestamp: milliseconds since 1970.")
    return int(found)


def shown(record: ScalableTopicMetadata) -> Json:
    """A topic's record as Pulsar shows it, with the derived booleans (pulsar-reference.md 1)."""
    found: Json = msgspec.to_builtins(record, str_keys=True)
    found.pop("prunedEnds", None)  # for readers that come back; nothing an administrator could act upon
    found["segments"] = {str(number): _shown_segment(each) for number, each in sorted(record.segments.items())}
    return {"properties": {}, "routing": str(record.routing), "incarnation": record.incarnation, **found}


def _shown_segment(segment: SegmentRecord) -> Json:
    is_active = segment.state == "ACTIVE"
    return {
        **msgspec.to_builtins(segment),
        "sealed": not is_active,
        "active": is_active,
        "root": not segment.parent_ids,
        "leaf": not segment.child_ids,
        "legacy": segment.legacy_topic_name is not None,
    }


def _topics(admin: Admin, calls: Calls) -> None:
    service = admin.service
    having = Query("property", "Only topics with this property, as key=value; may be repeated: all of them", str, is_many=True)

    @calls.get(LIST, list[str], query=(having,))
    async def list_scalable(ask: Ask) -> Any:
        """Scalable topics of a namespace that are not being deleted; with properties, those that have all of them."""
        service.check_scalable()
        name = ask.namespace
        wanted: dict[str, str] = {}
        for text in ask.query["property"]:
            key, separator, value = text.partition("=")
            if not separator or not key or wanted.setdefault(key, value) != value:
                raise InvalidArgument(f"{text[:100]!r} is no filter; write property=key=value, each key once.")
        await service.namespaces.policies(name)
        return await service.scalable.topics(name, wanted, living=True)

    count = Query("numInitialSegments", "How many segments it begins with", int, 1, least=-MAX_INT64)
    routing = Query(
        "routing",
        "Half of a key's hash that chooses the segment; the broker's setting if not given",
        str,
        None,
        (Routing.HIGH16.value, Routing.LOW16.value),
    )

    @calls.put(TOPIC, body=Properties | None, body_default=None, query=(count, routing))
    async def create_scalable(ask: Ask) -> None:
        """Create a scalable topic, with properties if any are given; 412 for an impossible number of segments."""
        name = scalable_topic(ask)
        _check_no_segment(name)
        properties = checked_properties(ask.body or {})
        chosen = None if ask.query["routing"] is None else Routing(ask.query["routing"])
        await service.create_scalable_topic(name, ask.query["numInitialSegments"], properties=properties, routing=chosen)

    @calls.get(TOPIC, Json)
    async def get_metadata(ask: Ask) -> Any:
        """The layout of a scalable topic: its segments with their ranges, states, parents and children."""
        return shown(await service.scalable.metadata(scalable_topic(ask)))

    @calls.delete(TOPIC, query=(FORCE,), owner=True)
    async def delete_scalable(ask: Ask) -> None:
        """Delete a scalable topic with its segments and subscriptions; with `force=true` even if it is in use."""
        await service.scalable.delete_topic(scalable_topic(ask), force=ask.query["force"])

    retention = f"{TOPIC}/retention"

    @calls.get(retention, Retention, is_optional=True, query=(APPLIED,))
    async def get_scalable_retention(ask: Ask) -> Any:
        """How long a scalable topic keeps acknowledged messages, if it has a policy of its own; 204 if not. With
        `applied=true` what holds for it, whoever says so."""
        name = scalable_topic(ask)
        own = (await service.scalable.metadata(name)).retention_policies
        if own is None and ask.query["applied"]:
            return (await service.namespaces.policies(name.namespace)).retention
        return own

    @calls.post(retention, body=Retention, owner=True)
    async def set_scalable_retention(ask: Ask) -> None:
        """Set how long a scalable topic keeps acknowledged messages, whatever its namespace says."""
        check_retention(ask.body)
        await (await leader(ask)).set_retention(policy_of(ask.body))

    @calls.delete(retention, owner=True)
    async def remove_scalable_retention(ask: Ask) -> None:
        """Let the namespace say how long a scalable topic keeps acknowledged messages."""
        await (await leader(ask)).set_retention(None)

    @calls.get(f"{TOPIC}/stats", Json, owner=True)
    async def get_stats(ask: Ask) -> Any:
        """Segments with rates and backlog, subscriptions with their consumers and what holds them up (`blocked_by`)."""
        controller = await leader(ask)
        return await controller.stats()


def _check_no_segment(name: TopicName) -> None:
    try:
        TopicName.parse(f"segment://{name.namespace}/{name.local_name}")
    except InvalidTopicName:
        return
    raise InvalidTopicName(f"{name} ends like the name of a segment; choose another name.")


def _layout(calls: Calls) -> None:
    @calls.post(f"{TOPIC}/split/{{segment}}", owner=True)
    async def split(ask: Ask) -> None:
        """Split an active segment into two halves; 404 if there is none of the id, 412 if it is sealed or covers one hash."""
        number = ask.number("segment", "id of a segment")
        await (await leader(ask)).split_segment(number)

    @calls.post(f"{TOPIC}/merge/{{segment}}/{{other}}", owner=True)
    async def merge(ask: Ask) -> None:
        """Merge two active segments; 404 if there is none of an id, 412 if one is sealed or their ranges do not touch."""
        first, second = ask.number("segment", "id of a segment"), ask.number("other", "id of a segment")
        await (await leader(ask)).merge_segments(first, second)


def _subscriptions(calls: Calls) -> None:
    kind = Query("type", "Kind of its consumers", str, "STREAM", ("STREAM", "QUEUE", "CHECKPOINT"))

    @calls.put(SUBSCRIPTION, query=(kind, INITIAL), owner=True)
    async def create_subscription(ask: Ask) -> None:
        """Create a subscription on all segments; one that exists stays as it is."""
        name = ask.subscription
        controller = await leader(ask)
        await controller.create_subscription(name, ask.query["type"], ask.query["initial"])

    @calls.delete(SUBSCRIPTION, owner=True)
    async def delete_subscription(ask: Ask) -> None:
        """Delete a subscription from all segments, sealed ones included; its consumers are closed."""
        name = ask.subscription
        await (await leader(ask)).delete_subscription(name)

    @calls.post(f"{SUBSCRIPTION}/seek", query=(TIMESTAMP,), owner=True)
    async def seek(ask: Ask) -> None:
        """Put a subscription to a time on all segments; 0 is the beginning."""
        name, when = ask.subscription, time_of(ask)
        await (await leader(ask)).seek(name, when)

    @calls.post(f"{SUBSCRIPTION}/skip-all", owner=True)
    async def clear_backlog(ask: Ask) -> None:
        """Acknowledge everything for a subscription on all segments."""
        name = ask.subscription
        await (await leader(ask)).clear_backlog(name)

    @calls.delete(f"{SUBSCRIPTION}/consumers/{{consumer}}", owner=True)
    async def remove_consumer(ask: Ask) -> None:
        """Remove the registration of a consumer that is gone, also one whose record cannot be read; its segments are free at
        once. 412 if the consumer is connected."""
        name, consumer = ask.subscription, ask.text("consumer")
        await (await leader(ask)).remove_consumer(name, consumer)
