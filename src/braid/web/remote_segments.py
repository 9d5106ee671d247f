"""`RemoteSegments`: segments that another broker owns, reached through its Segments API (R468-8).

Owns the translation between `SegmentOps` and HTTP, both ways: what the owner refuses comes back as the error it raised (a stale
leader stays `StaleLeader`, a missing topic `TopicNotFound`, a copy found stale `LedgerFenced`), so that a controller cannot
tell near from far. Everything in `SegmentOps` may be repeated, so a lost answer is asked for again. Bounded in time and in
bytes per request (INV17).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from braid import errors
from braid.broker.registry import BrokerInfo
from braid.client import operations_scalable as ops
from braid.client.admin_scalable_types import SealedSegment, SegmentCreation
from braid.client.admin_transport import AdminTransport, decode
from braid.client.operation import Operation
from braid.errors import BraidError, ConnectFailed, LedgerFenced, NotReady, RequestError, from_status
from braid.metadata.claims import StaleLeader
from braid.model.names import Domain, TopicName
from braid.model.positions import Position
from braid.scalable.api import UNTIL_REPAIRED, Sealed, SegmentBacklog, SegmentOps, SegmentStats
from braid.scalable.records import Initial

log = logging.getLogger(__name__)
T = TypeVar("T")
ERROR_HEADER = "x-braid-error"
"""Names the class of an error in an answer."""
STORED_AS_TOPIC = "persistent"
"""In place of a descriptor: the segment is stored in the regular topic of this name."""
CALL_SECONDS = 20.0
MAX_PART_BYTES = 800_000
"""Of the names in one creation; more are sent in several, which the owner adds up. Below the limit of a body."""
_BACKLOG: Operation[Any] = msgspec.structs.replace(ops.SEGMENTS_BACKLOG, reply=SegmentBacklog)
_STATS: Operation[Any] = msgspec.structs.replace(ops.SEGMENTS_STATS, reply=SegmentStats)
_KNOWN: dict[str, type[BraidError]] = {
    name: each
    for name, each in vars(errors).items()
    if isinstance(each, type) and issubclass(each, RequestError) and name != "LedElsewhere"
} | {"StaleLeader": StaleLeader, "LedgerFenced": LedgerFenced}
_KNOWN |= {each.__name__: each for each in UNTIL_REPAIRED}


class RemoteSegments:
    """`SegmentOps` of one other broker. Keeps its connections until `close`."""

    def __init__(self, broker: BrokerInfo, *, timeout: float = CALL_SECONDS) -> None:
        if not broker.http_url:
            raise NotReady(f"The broker {broker.broker_id} has no admin API, so its segments cannot be reached.")
        self.broker = broker
        self._transport = AdminTransport([broker.http_url], timeout, refusal=_refusal)
        self._is_closed = False

    async def close(self) -> None:
        """Close the connections; calls under way, and later ones, raise NotReady."""
        self._is_closed = True
        await self._transport.close()

    async def create(
        self,
        segment: TopicName,
        *,
        subscriptions: Mapping[str, Initial],
        producers: Mapping[str, int],
        epoch: int,
        incarnation: str,
    ) -> None:
        for some, others in _parts(subscriptions, producers):
            body = SegmentCreation(subscriptions=some, producers=others, epoch=epoch, incarnation=incarnation)
            await self._ask(ops.SEGMENTS_CREATE, segment_parts(segment), body=body)

    async def terminate(self, segment: TopicName, *, epoch: int, incarnation: str, force: bool = False) -> Sealed:
        query = {"force": force, "epoch": epoch, "incarnation": incarnation}
        found: SealedSegment = await self._ask(ops.SEGMENTS_TERMINATE, segment_parts(segment), query)
        return Sealed(Position(found.position.ledger_id, found.position.entry_id), found.producers)

    async def delete(self, segment: TopicName, *, epoch: int, incarnation: str, force: bool = False) -> None:
        query = {"force": force, "epoch": epoch, "incarnation": incarnation}
        await self._ask(ops.SEGMENTS_DELETE, segment_parts(segment), query)

    async def subscriptions(self, segment: TopicName) -> list[str]:
        return await self._ask(ops.SEGMENTS_SUBSCRIPTIONS, segment_parts(segment))

    async def create_subscription(
        self, segment: TopicName, subscription: str, initial: Initial, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        query = {"initial": initial, "epoch": epoch, "incarnation": incarnation, "operation": operation}
        await self._ask(ops.SEGMENTS_CREATE_SUBSCRIPTION, _subscription(segment, subscription), query)

    async def delete_subscription(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        query = {"epoch": epoch, "incarnation": incarnation, "operation": operation}
        await self._ask(ops.SEGMENTS_DELETE_SUBSCRIPTION, _subscription(segment, subscription), query)

    async def backlog(self, segment: TopicName, subscription: str) -> SegmentBacklog:
        return await self._ask(_BACKLOG, _subscription(segment, subscription), {"detail": True})

    async def seek(
        self, segment: TopicName, subscription: str, timestamp_ms: int, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        query = {"timestamp": timestamp_ms, "epoch": epoch, "incarnation": incarnation, "operation": operation}
        await self._ask(ops.SEGMENTS_SEEK, _subscription(segment, subscription), query)

    async def skip_all(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        query = {"epoch": epoch, "incarnation": incarnation, "operation": operation}
        await self._ask(ops.SEGMENTS_SKIP_ALL, _subscription(segment, subscription), query)

    async def stats(self, segment: TopicName) -> SegmentStats:
        return await self._ask(_STATS, segment_parts(segment))

    async def settle(self, segment: TopicName) -> None:
        await self._ask(ops.SEGMENTS_SETTLE, segment_parts(segment))

    async def _ask(
        self, operation: Operation[T], names: Mapping[str, str], query: Mapping[str, Any] | None = None, body: Any = None
    ) -> T:
        # Whoever asks found that broker to be the owner: it may have to take the segment's bundle first.
        asked = {**(query or {}), "authoritative": True}
        try:
            self._check_open()
            return decode(operation, await self._transport.send(operation, names, asked, body))
        except RuntimeError:  # how the HTTP client says that it was closed; anything else is a bug and is shown as one
            self._check_open()
            raise
        except ConnectFailed as error:
            raise ConnectFailed(
                f"The broker {self.broker.broker_id}, which owns the segment, cannot be reached: {error.__cause__ or error}"
            ) from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotReady(f"This broker is being closed and asks {self.broker.broker_id} nothing more; try again elsewhere.")


class RemoteSegmentsPool:
    """One `RemoteSegments` for each broker that was asked for; fills `BrokerService.remote_segments`."""

    def __init__(self, *, timeout: float = CALL_SECONDS) -> None:
        self._timeout = timeout
        self._by_url: dict[str, RemoteSegments] = {}

    def __call__(self, broker: BrokerInfo) -> SegmentOps:
        known = self._by_url.get(broker.http_url)
        if known is None:
            known = self._by_url[broker.http_url] = RemoteSegments(broker, timeout=self._timeout)
        return known

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        links, self._by_url = list(self._by_url.values()), {}
        for link in links:
            await link.close()


def segment_parts(segment: TopicName) -> dict[str, str]:
    """The parts of a segment's path, by its physical name."""
    parts = {"tenant": segment.tenant, "namespace": segment.namespace_portion}
    if segment.descriptor is not None:
        return {**parts, "topic": segment.parent.local_name, "descriptor": str(segment.descriptor)}
    if segment.domain is not Domain.PERSISTENT:
        raise errors.InvalidArgument(f"{segment} is neither a segment nor a regular topic that stores one.")
    return {**parts, "topic": segment.local_name, "descriptor": STORED_AS_TOPIC}


def _subscription(segment: TopicName, subscription: str) -> dict[str, str]:
    return {**segment_parts(segment), "subscription": subscription}


def _refusal(status: int, reason: str, headers: Mapping[str, str]) -> BraidError:
    """The error the owner raised, if it is one that callers tell apart; else one by its status."""
    kind = _KNOWN.get(headers.get(ERROR_HEADER, ""))
    return from_status(status, reason) if kind is None else kind(reason)


def _parts(
    subscriptions: Mapping[str, Initial], producers: Mapping[str, int]
) -> Iterator[tuple[dict[str, str], dict[str, int]]]:
    """Both maps cut into parts of bounded size; one part, perhaps empty, at least. No part is above the limit: a name that is
    too large by itself is left out."""
    some: dict[str, str] = {}
    others: dict[str, int] = {}
    size = 0
    for name, value in (*subscriptions.items(), *producers.items()):
        length = len(msgspec.json.encode(name)) + 24
        if length > MAX_PART_BYTES:
            # Asking for ever would keep the whole range from being written; what is lost is one name.
            log.warning("the name %r... has %d bytes and is not handed over to a new segment", name[:100], length)
            continue
        if size + length > MAX_PART_BYTES:
            yield some, others
            some, others, size = {}, {}, 0
        if isinstance(value, str):
            some[name] = value
        else:
            others[name] = value
        size += length
    yield some, others
