"""Stores with records of every kind, and the edits that make nonsense of one of them.

`made_image` lets a broker write records of every kind and keeps what the stores hold then. `edits` changes a record, one field
at a time. `spoilt_use.py` runs brokers on the edited stores.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from tests.unit.broker.conftest import FlakyLedgers, World
from tests.unit.broker.record_kinds import kind_of

from braid.broker.clusters import Clusters
from braid.errors import NotReady
from braid.metadata.engine import Engine, Storage
from braid.metadata.journal import KEY, OWNER, VALUE, Change, Image, Row, VolatileJournal
from braid.model.names import NamespaceName, TopicName
from braid.model.positions import Position
from braid.model.segments import physical_name
from braid.runtime.env import Runtime
from braid.runtime.plans import watching
from braid.runtime.threads import InlineThreads
from braid.testing.clock import DEFAULT_START_MS, ManualClock
from braid.testing.raw_client import RawClient
from braid.wire import messages as pb
from braid.wire import sink_requests, txn_requests
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, InitialPosition, ScalableConsumerType

HEALTHY = "acme/fine"
PLAIN = "persistent://public/default/plain"
PARTED = "persistent://public/default/parted"
SCALED = TopicName.parse("topic://public/default/scaled")
HALF = TopicName.parse("topic://public/default/half")
"""Whose split was cut off."""
SINK = "8a2c/topic://public/default/scaled"
HINT = "/loadbalance/hints/public/default/0x00000000_0x40000000"
LEDGER = "ledger "
"""Before the number of a ledger whose last entry is edited, where the key of a record would be."""
POLICIES: dict[str, Any] = {
    "deduplicationEnabled": True,
    "retention_policies": {"retentionTimeInMinutes": 60, "retentionSizeInMB": 10},
    "autoTopicCreationOverride": {"allowAutoTopicCreation": True, "topicType": "partitioned", "defaultNumPartitions": 2},
    "autoSubscriptionCreationOverride": {"allowAutoSubscriptionCreation": True},
}
ACROSS_MS = 600_000
"""Between the brokers: sessions and transactions of the first one are over."""


class Kept(msgspec.Struct, frozen=True):
    """What both stores hold."""

    rows: tuple[Row, ...]
    counter: int
    ledgers: dict[int, Any]

    def keys(self) -> list[str]:
        return sorted(row[KEY] for row in self.rows)

    def holds_messages(self, ledger: int) -> bool:
        """Whether it is a topic's; cursors change theirs when they are loaded."""
        return bool(self.ledgers[ledger].custom["component"] == b"managed-ledger")

    def value(self, key: str) -> bytes:
        if key.startswith(LEDGER):
            return bytes(self.ledgers[int(key.removeprefix(LEDGER))].entries[-1])
        return next(row[VALUE] for row in self.rows if row[KEY] == key)


class _Journal(VolatileJournal):
    def __init__(self, kept: Kept, edited: dict[str, bytes]) -> None:
        super().__init__("spoilt")
        self._kept = kept
        self._edited = edited

    def load(self) -> Image:
        rows = [(*row[:VALUE], self._edited.get(row[KEY], row[VALUE])) for row in self._kept.rows]
        return Image("spoilt", self._kept.counter, rows)

    def commit(self, changes: Sequence[Change], counter: int) -> None:
        return


class SpoiltWorld(World):
    """Stores that begin with what others hold."""

    def __init__(self, kept: Kept, edited: dict[str, bytes]) -> None:
        super().__init__()
        self.clock = ManualClock(DEFAULT_START_MS + ACROSS_MS)
        self._kept = kept
        self._edited = edited

    async def open(self) -> None:
        runtime = Runtime(clock=self.clock)
        self.ledgers = FlakyLedgers(runtime)
        for number, found in sorted(self._kept.ledgers.items()):
            self.ledgers._ids.take(number)
            copy = self.ledgers._ledgers[number] = copied(found)
            if (edited := self._edited.get(f"{LEDGER}{number}")) is not None:
                copy.entries[-1] = edited
        storage = Storage(_Journal(self._kept, self._edited), InlineThreads().worker("metadata"))
        self.metadata = await Engine.open(runtime, storage)


def copied(ledger: Any) -> Any:
    made = type(ledger)(ledger.ledger_id, ledger.created_ms, ledger.custom)
    made.entries = list(ledger.entries)
    made.is_closed, made.last, made.length = ledger.is_closed, ledger.last, ledger.length
    return made


# What is stored.


async def made_image() -> Kept:
    """Records of every kind, as a broker writes them."""
    world = World()
    await world.open()
    pumping = asyncio.ensure_future(pump(world))
    try:
        broker = await world.broker()
        client = await broker.client(is_braid=True)
        await _names(broker.service)
        positions = await _regular_topics(client)
        await _scalable_topics(broker.service, client)
        for topic in list(broker.service.topics.values()):
            for cursor in topic.log.cursors.values():
                await cursor.flush()
        with watching(_cut_off):
            await _half_done(broker.service)
            await _transactions(broker.service, client, positions)
            pumping.cancel()  # nothing runs out from here on
            rows = tuple(row for row in world.metadata.tables.rows.values() if row[OWNER] is None)
            ledgers = {each: copied(found) for each, found in world.ledgers._ledgers.items()}
            counter = world.metadata.commit_counter
            await broker.kill()
        hint: Row = (HINT, None, counter, 0, DEFAULT_START_MS, DEFAULT_START_MS, None, (), b'{"brokerId":"gone:1"}')
        return Kept((*map(_later, rows), hint), counter, ledgers)
    finally:
        pumping.cancel()
        await world.close()


async def _names(service: Any) -> None:
    names = service.namespaces
    await names.create_tenant("acme", {"adminRoles": [], "allowedClusters": ["standalone"]})
    await names.create_namespace(NamespaceName.parse(HEALTHY), {})
    for policy, value in POLICIES.items():
        await names.set_policy(NamespaceName.parse("public/default"), policy, value)
    await Clusters(service.metadata, "standalone").create("elsewhere", {"serviceUrl": "http://elsewhere:8080"})
    await service.create_partitioned(TopicName.parse(PARTED), 2)
    for topic in (PLAIN, f"persistent://{HEALTHY}/plain"):
        await service.topic(TopicName.parse(topic), create=True)


async def _regular_topics(client: RawClient) -> list[Position]:
    """Messages, cursors and schemas; where the messages of the first topic are."""
    positions: list[Position] = []
    for number, topic in enumerate((PLAIN, f"persistent://{HEALTHY}/plain", f"{PARTED}-partition-0"), 1):
        schema = pb.Schema(name="s", schema_data=b"", type=pb.Schema.Type.String)
        await client.subscribe(topic, "sub", consumer_id=number, permits=100, initial=InitialPosition.EARLIEST)
        await client.subscribe(topic, "other", consumer_id=100 + number, initial=InitialPosition.EARLIEST)
        await client.producer(topic, number, schema=schema)
        stored = [await client.store(b"%d" % each, each, number) for each in range(6)]
        await client.acked(stored[0], stored[2], consumer_id=number)
        positions = positions or stored
    return positions


async def _scalable_topics(service: Any, client: RawClient) -> None:
    """Subscriptions of every type, registrations, and a split."""
    healthy = TopicName.parse(f"topic://{HEALTHY}/scaled")
    for topic, segments in ((SCALED, 2), (healthy, 1)):
        await service.create_scalable_topic(topic, segments, properties={"team": "a"})
        controller = await service.scalable.lead_scalable(topic)
        await controller.create_subscription("stream", "STREAM", "earliest")
        await controller.create_subscription("other", "QUEUE", "earliest")
        await controller.create_subscription("group", "CHECKPOINT", "earliest")
    await register(client, str(SCALED), "c1", 50)
    await register(client, str(SCALED), "c2", 51)
    await register(client, PLAIN, "r1", 52)
    controller = await service.scalable.lead_scalable(SCALED)
    await client.producer(str(physical_name(SCALED, controller.layout.segment(0))), 20)
    for each in range(3):
        await client.store(b"%d" % each, each, 20)
    await controller.split_segment(0)


async def _cut_off(name: str, _moment: str) -> None:
    if name.startswith(("split:", "delete-subscription:")) and not name.endswith(":intend"):
        raise NotReady("Cut off.")


async def _half_done(service: Any) -> None:
    """Operations that are written down and not done."""
    await service.create_scalable_topic(HALF, 1)
    half = await service.scalable.lead_scalable(HALF)
    scaled = await service.scalable.lead_scalable(SCALED)
    await scaled.create_subscription("going", "QUEUE", "earliest")
    for work in (half.split_segment(0), scaled.delete_subscription("going")):
        task = asyncio.ensure_future(work)
        await asyncio.wait([task], timeout=0.05)
        task.cancel()
        await asyncio.wait([task])


async def _transactions(service: Any, client: RawClient, positions: list[Position]) -> None:
    """Open, committed and aborted, with writes and acknowledgments; one with a sub-transaction; one of a sink."""
    for number, decision in enumerate((None, True, False)):
        txn = await client.begin()
        await client.store(b"txn", 10 + number, 1, txn=txn)
        await client.acked(positions[3 + number], consumer_id=1, txn=txn)
        if decision is not None:
            await client.end(txn, commit=decision)
    decider = await client.begin(is_decider=True)
    client.send(txn_requests.new_sub(8, decider))
    await client.answer(8)
    client.send(sink_requests.begin(9, SINK, 0, "a", 30_000))
    await client.answer(9)


def _later(row: Row) -> Row:
    """Fields that are written in special cases only: a consumer that a new leader did not find, policies of single topics."""
    policy = {"retentionTimeInMinutes": 60, "retentionSizeInMB": 10}
    special: dict[str, dict[str, Any]] = {
        "registration": {"absentSinceMs": DEFAULT_START_MS + ACROSS_MS} if row[KEY].endswith("/c2") else {},
        "log": {"retention": policy},
        "partitioned topic": {"retentionPolicies": policy},
        "scalable topic": {"retentionPolicies": policy},
    }
    more = special.get(kind_of(row[KEY]) or "", {})
    return (*row[:VALUE], json.dumps({**json.loads(row[VALUE]), **more}).encode()) if more else row


async def register(client: RawClient, topic: str, name: str, consumer_id: int) -> Any:
    request_id = client.next_request()
    body = pb.CommandScalableTopicSubscribe(
        request_id=request_id,
        topic=topic,
        subscription="stream",
        consumer_name=name,
        consumer_id=consumer_id,
        consumer_type=enum_value(ScalableConsumerType.STREAM),
    )
    client.send(encode(CommandType.SCALABLE_TOPIC_SUBSCRIBE, body))
    return await client.answer(request_id)


async def pump(world: World) -> None:
    while True:
        await world.advance(0.25)
        await asyncio.sleep(0)


# Edits.

NONSENSE: tuple[bytes, ...] = (b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe\x00", b"{}", b'{"formatVersion":99}')


def edits(value: bytes) -> Iterator[tuple[str, bytes]]:
    """The record changed: as a whole, cut off, and one field at a time. What makes sense is left out: a log that is being
    deleted is deleted."""
    for what, bad in _edits(value):
        if what != "isDeleted = True":
            yield what, bad


def _edits(value: bytes) -> Iterator[tuple[str, bytes]]:
    for bad in NONSENSE:
        if bad != value:
            yield f"whole {bad!r}", bad
    yield "cut off", value[: len(value) // 2]
    try:
        document = json.loads(value)
    except ValueError:
        return
    for path in _paths(document):
        found = _at(document, path)
        for what, bad in _wrong(found):
            yield f"{'.'.join(map(str, path))} {what}", json.dumps(_with(document, path, bad)).encode()
        if isinstance(found, str):
            text = json.dumps(_with(document, path, "@spoilt@")).encode()
            yield f"{'.'.join(map(str, path))} = no text", text.replace(b"@spoilt@", b"\xff\xc3")


_MISSING = object()


def _wrong(value: Any) -> Iterator[tuple[str, Any]]:
    yield "missing", _MISSING
    yield "null", None
    others: tuple[Any, ...] = ("", "x\x00\N{PILE OF POO}", -1, 1 << 70, 1.5, True, [], {}, [[]], {"x": 1})
    for each in others:
        if each != value or type(each) is not type(value):
            yield f"= {each!r}"[:30], each


def _paths(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    for name, child in children:
        yield (*above, name)
        yield from _paths(child, (*above, name))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for each in path:
        document = document[each]
    return document


def _with(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    parent = _at(copy, path[:-1])
    if value is _MISSING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return copy
