"""REST: single segments, at their owners: what the leader of a scalable topic asks other brokers to do (scalable.md 7.6).

A segment is named by its topic and its descriptor, `0000-7fff-3`; one that is stored in a regular topic by that topic's name
and the word `persistent`. The owner checks who asks: `epoch` is that of the leader, `incarnation` that of the topic. An
administrator who gives neither acts as the present leader would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from braid.broker.segments import LocalSegments
from braid.broker.service import StillInUse
from braid.errors import InvalidTopicName, TopicNotFound
from braid.model.names import Domain, TopicName, check_subscription_name
from braid.scalable.api import SegmentBacklog, SegmentStats
from braid.scalable.records import Initial
from braid.web.calls import MAX_INT64, Ask, Calls, Query
from braid.web.owners import Owners
from braid.web.remote_segments import STORED_AS_TOPIC
from braid.web.routes_clusters import FORCE
from braid.web.routes_scalable import INITIAL, TIMESTAMP, time_of

SEGMENT = "/segments/{tenant}/{namespace}/{topic}/{descriptor}"
SUBSCRIPTION = SEGMENT + "/subscription/{subscription}"
EPOCH = Query("epoch", "Of the leader that asks; the present one's if not given", int)
INCARNATION = Query("incarnation", "Of the topic; the present one if not given")
OPERATION = Query("operation", "Of the subscription's operation this is part of: refused when that is over", str, "")
Int64 = Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)]


class SegmentBeginning(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What a new segment begins with."""

    subscriptions: dict[str, Initial] | list[str] = msgspec.field(default_factory=list)
    producers: dict[str, Int64] = {}
    epoch: Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)] | None = None
    incarnation: Annotated[str, msgspec.Meta(max_length=1000)] | None = None


class End(msgspec.Struct, frozen=True, rename="camel"):
    """The last message of a sealed segment."""

    ledger_id: int
    entry_id: int


class SealedSegment(msgspec.Struct, frozen=True, rename="camel"):
    """Where a sealed segment ends, and the last sequence id of each producer."""

    position: End
    producers: dict[str, int]


def segment_calls() -> Calls:
    """Calls about segments."""
    calls = Calls("segments")
    _life(calls)
    _subscriptions(calls)
    return calls


async def _here(ask: Ask, *, serves_regular: bool = False) -> tuple[LocalSegments, TopicName]:
    """The segment the path names and what works on it, if this broker owns it; else the call ends with a redirect."""
    service = ask.admin.service
    if not (serves_regular and ask.text("descriptor") == STORED_AS_TOPIC):
        service.check_scalable()
    place, descriptor = f"{ask.namespace}/{ask.text('topic')}", ask.text("descriptor")
    if "/" in descriptor:  # or a part of it would be taken for one of the topic's name
        raise InvalidTopicName(f"{descriptor[:100]!r} is no descriptor of a segment, such as 0000-7fff-3.")
    if descriptor == STORED_AS_TOPIC:
        name = TopicName.parse(f"{Domain.PERSISTENT}://{place}")
    else:
        name = TopicName.parse(f"{Domain.SEGMENT}://{place}/{descriptor}")
    await Owners(ask).here(name)
    return service.local_segments, name


async def _authority(ask: Ask, name: TopicName, epoch: int | None, incarnation: str | None) -> tuple[int, str]:
    """In whose name the call is made."""
    if epoch is None or incarnation is None:
        record = await ask.admin.service.scalable.metadata(name.scalable)
        epoch = record.leader_epoch if epoch is None else epoch
        incarnation = record.incarnation if incarnation is None else incarnation
    return epoch, incarnation


async def _leader(ask: Ask, name: TopicName) -> dict[str, Any]:
    """The same for a call about a subscription, which may be one of a regular topic: that has no leader to compare with."""
    epoch, incarnation = ask.query["epoch"], ask.query["incarnation"]
    if name.domain is Domain.PERSISTENT and await ask.admin.service.records.read(name) is None:
        return {"epoch": epoch or 0, "incarnation": incarnation or ""}
    epoch, incarnation = await _authority(ask, name, epoch, incarnation)
    return {"epoch": epoch, "incarnation": incarnation, "operation": ask.query["operation"]}


def _initials(given: Mapping[str, Initial] | list[str]) -> dict[str, Initial]:
    wanted: dict[str, Initial] = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, "earliest")
    for name in wanted:
        check_subscription_name(name)
    return wanted


def _life(calls: Calls) -> None:
    @calls.put(SEGMENT, body=list[str] | SegmentBeginning | None, body_default=None, owner=True)
    async def create_segment(ask: Ask) -> None:
        """Make the topic of a segment that the layout lists, if it is missing. The body names subscriptions, or is an object
        with them and what deduplication must know."""
        body = ask.body if isinstance(ask.body, SegmentBeginning) else SegmentBeginning(ask.body or [])
        subscriptions = _initials(body.subscriptions)
        segments, name = await _here(ask)
        epoch, incarnation = await _authority(ask, name, body.epoch, body.incarnation)
        await segments.create(name, subscriptions=subscriptions, producers=body.producers, epoch=epoch, incarnation=incarnation)

    anyway = Query("force", "Even though no split or merge asks for it", bool, False)

    @calls.post(f"{SEGMENT}/terminate", SealedSegment, status=200, query=(anyway, EPOCH, INCARNATION), owner=True)
    async def terminate_segment(ask: Ask) -> Any:
        """Seal a segment: it takes no more messages. Answers where it ends and the last sequence id of each producer; 412 for
        an active segment that is not being split or merged, unless `force=true`."""
        segments, name = await _here(ask)
        epoch, incarnation = await _authority(ask, name, ask.query["epoch"], ask.query["incarnation"])
        sealed = await segments.terminate(name, epoch=epoch, incarnation=incarnation, force=ask.query["force"])
        return SealedSegment(End(sealed.position.ledger_id, sealed.position.entry_id), sealed.producers)

    @calls.delete(SEGMENT, query=(FORCE, EPOCH, INCARNATION), owner=True)
    async def delete_segment(ask: Ask) -> None:
        """Delete a segment's topic; a missing one is fine. 412 for one that the topic still needs or that is in use, unless
        `force=true`."""
        segments, name = await _here(ask)
        epoch, incarnation = await _authority(ask, name, ask.query["epoch"], ask.query["incarnation"])
        is_forced = ask.query["force"]
        if ask.query["epoch"] is None and not is_forced:  # a leader knows what it does
            await _check_unused(segments, name)
        await segments.delete(name, epoch=epoch, incarnation=incarnation, force=is_forced)

    @calls.get(f"{SEGMENT}/subscriptions", list[str], owner=True)
    async def list_subscriptions(ask: Ask) -> Any:
        """Subscriptions that have a cursor on a segment."""
        segments, name = await _here(ask)
        return await segments.subscriptions(name)

    @calls.get(f"{SEGMENT}/stats", SegmentStats, owner=True)
    async def get_stats(ask: Ask) -> Any:
        """Rates, size, backlog and clients of a segment."""
        segments, name = await _here(ask)
        return await segments.stats(name)

    @calls.post(f"{SEGMENT}/settle", owner=True)
    async def settle(ask: Ask) -> None:
        """Finish what transactions that ended have left on a segment. Brokers ask each other; it is done by itself, too."""
        segments, name = await _here(ask, serves_regular=True)
        await segments.settle(name)


async def _check_unused(segments: LocalSegments, name: TopicName) -> None:
    try:
        stats = await segments.stats(name)
    except TopicNotFound:
        return
    attached = stats.producers + sum(map(len, stats.consumers.values()))
    if attached:
        raise StillInUse(f"The segment {name} has {attached} producers and consumers; close them or use force.")


def _subscriptions(calls: Calls) -> None:
    leader = (EPOCH, INCARNATION, OPERATION)

    @calls.put(SUBSCRIPTION, query=(INITIAL, *leader), owner=True)
    async def create_subscription(ask: Ask) -> None:
        """Make the cursor of a subscription on a segment, if it is missing."""
        subscription = ask.subscription
        segments, name = await _here(ask)
        await segments.create_subscription(name, subscription, ask.query["initial"], **await _leader(ask, name))

    @calls.delete(SUBSCRIPTION, query=leader, owner=True)
    async def delete_subscription(ask: Ask) -> None:
        """Remove the cursor of a subscription from a segment; a missing one is fine."""
        subscription = ask.subscription
        segments, name = await _here(ask)
        await segments.delete_subscription(name, subscription, **await _leader(ask, name))

    detail = Query("detail", "Also whether the segment is sealed, and who is attached", bool, False)

    @calls.get(f"{SUBSCRIPTION}/backlog", int | SegmentBacklog, query=(detail,), owner=True)
    async def backlog(ask: Ask) -> Any:
        """Entries (a batch is one) a subscription has left in a segment; 404 if there is no such segment or cursor."""
        subscription = ask.subscription
        segments, name = await _here(ask)
        found = await segments.backlog(name, subscription)
        return found if ask.query["detail"] else found.messages

    @calls.post(f"{SUBSCRIPTION}/seek", query=(TIMESTAMP, *leader), owner=True)
    async def seek(ask: Ask) -> None:
        """Put a subscription to a time on a segment; 0 is the beginning."""
        subscription, when = ask.subscription, time_of(ask)
        segments, name = await _here(ask)
        await segments.seek(name, subscription, when, **await _leader(ask, name))

    @calls.post(f"{SUBSCRIPTION}/skip-all", query=leader, owner=True)
    async def skip_all(ask: Ask) -> None:
        """Acknowledge everything for a subscription on a segment."""
        subscription = ask.subscription
        segments, name = await _here(ask)
        await segments.skip_all(name, subscription, **await _leader(ask, name))
