"""The late-write table: a broker is paused past its session, another takes its bundle over, and the first one, which knows
nothing of it, does every kind of write once. Each is refused and leaves the stores as they were (INV2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from braid.errors import BraidError, LedgerFenced, NotReady
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.bundles import find, hash_of, split_evenly
from braid.model.names import NamespaceName, TopicName
from braid.model.positions import EARLIEST as EARLIEST_POSITION
from braid.model.positions import LATEST, Position
from braid.testing.raw_client import RawClient
from braid.wire.commands import encode, enum_value
from braid.wire.messages import CommandGetOrCreateSchema, Schema
from braid.wire.types import CommandType, InitialPosition, ProducerAccessMode, SchemaType, SubType

pytestmark = pytest.mark.inv("INV2")
TOPIC = TopicName.parse("t")
BUNDLE = find(split_evenly(4), hash_of(TOPIC))
PUBLIC = NamespaceName.parse("public/default")
SESSION_SECONDS = 10.0


class Deaf:
    """Between a ledger's writer and the log of a paused broker: nobody tells it that its ledger was fenced."""

    def __init__(self, listener: Any) -> None:
        self.ledger_advanced = listener.ledger_advanced

    def ledger_failed(self, error: BraidError) -> None:
        pass


class Takeover:
    """A stale owner and the one that took over."""

    def __init__(self, world: Any, stale: Any, owner: Any) -> None:
        self.world = world
        self.stale = stale
        self.owner = owner
        self.client: RawClient
        self.positions: list[Position] = []

    @property
    def topic(self) -> Any:
        """The topic as the stale owner still has it."""
        return self.stale.topic(str(TOPIC))

    async def prepare(self, *, load_again: bool) -> None:
        """Messages in two ledgers, a half consumed subscription, deduplication, a schema."""
        stale, world = self.stale, self.world
        assert (await stale.ownership.find(TOPIC, authoritative=True)).is_mine
        client = self.client = await stale.client()
        await client.producer(str(TOPIC), name="p", schema=_schema("one"))
        await client.subscribe(str(TOPIC), sub_type=SubType.SHARED, permits=10, initial=InitialPosition.EARLIEST)
        self.positions = [await client.store(b"%d" % number, number) for number in range(4)]
        await client.messages(4)
        await client.acked(*self.positions[:3])
        if load_again:  # no ledger is open for writing then
            await stale.service.unload(stale.topic(str(TOPIC)))
            client = self.client = await stale.client()
            await client.producer(str(TOPIC), name="p", epoch=1)
            await client.subscribe(str(TOPIC), sub_type=SubType.SHARED, permits=10)
            await client.messages(1)
        stale.clock.pause()
        for ledger in world.ledgers._ledgers.values():
            if ledger.writer is not None and ledger.writer._listener is not None:
                ledger.writer._listener = Deaf(ledger.writer._listener)
        await world.advance(SESSION_SECONDS + 1)
        assert (await self.owner.ownership.find(TOPIC, authoritative=True)).is_mine
        loaded = await self.owner.service.topic(TOPIC, create=False)
        await loaded.subscription("theirs", is_durable=True, start=None, initial=LATEST)
        await loaded.subscriptions["theirs"].cursor.flush()

    def stored(self) -> tuple[dict[str, Any], dict[int, list[bytes]]]:
        """Everything in the stores that belongs to the topic, the bundle and the brokers. An empty ledger that no record names
        may be left by a refused append, as by a crash; the orphan sweep removes it."""
        roots = (
            "/managed-ledgers",
            "/schemas",
            "/namespace/",
            "/admin",
            f"/loadbalance/brokers/{self.owner.ownership.broker_id}",
        )
        rows = {key: row for key, row in self.world.metadata.tables.rows.items() if key.startswith(roots)}
        ledgers = {number: list(ledger.entries[: ledger.last + 1]) for number, ledger in self.world.ledgers._ledgers.items()}
        return rows, {number: entries for number, entries in ledgers.items() if entries}

    async def quiet(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)

    async def awake(self) -> None:
        """The stale owner goes on, finds out, and is an ordinary broker again."""
        self.stale.clock.resume()
        async with asyncio.timeout(5):
            while not self.stale.ownership._registry.is_registered or self.stale.service.topics:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert not self.stale.ownership.owned()

    async def check_owner(self) -> None:
        """The new owner was not disturbed: it has all messages, goes on with the next index, and no cursor moved."""
        client = await self.owner.client()
        await client.producer(str(TOPIC), name="p", epoch=9)
        await client.store(b"4", 4)
        await client.subscribe(str(TOPIC), "all", permits=100, initial=InitialPosition.EARLIEST)
        assert await client.payloads(5) == [b"0", b"1", b"2", b"3", b"4"]
        topic = self.owner.topic(str(TOPIC))
        assert topic.log.last_index == 4
        assert topic.subscriptions["sub"].cursor.mark_delete == self.positions[2]
        assert "theirs" in topic.subscriptions


def _schema(name: str) -> Schema:
    return Schema(name=name, schema_data=name.encode(), type=enum_value(SchemaType.JSON))


async def append(case: Takeover) -> None:
    case.client.publish(b"late", 4)
    await case.client.expect(CommandType.CLOSE_PRODUCER)
    await case.client.settle()
    assert CommandType.SEND_RECEIPT not in case.client.kinds()
    raise LedgerFenced("the client was told")


async def acknowledge(case: Takeover) -> None:
    reply = await case.client.acked(case.positions[3])
    assert reply.HasField("error")
    raise LedgerFenced(reply.message)


async def cursor_flush(case: Takeover) -> None:
    cursor = case.topic.subscriptions["sub"].cursor
    cursor.acknowledge([case.positions[3]])
    await cursor.flush()


async def cursor_properties(case: Takeover) -> None:
    await case.topic.subscriptions["sub"].cursor.set_properties({"late": "yes"})


async def seek(case: Takeover) -> None:
    await case.topic.subscriptions["sub"].cursor.reset(case.positions[0])


async def subscription_create(case: Takeover) -> None:
    await case.topic.subscription("late", is_durable=True, start=None, initial=EARLIEST_POSITION)


async def subscription_create_over_theirs(case: Takeover) -> None:
    await case.topic.subscription("theirs", is_durable=True, start=None, initial=EARLIEST_POSITION)


async def subscription_delete(case: Takeover) -> None:
    await case.topic.delete_subscription("sub")


async def properties(case: Takeover) -> None:
    await case.topic.log.set_properties({"late": "yes"})


async def terminate(case: Takeover) -> None:
    await case.topic.terminate()


async def trim(case: Takeover) -> None:
    cursor = case.topic.subscriptions["sub"].cursor
    cursor.acknowledge(case.positions)
    case.topic.dedup.snapshot(case.positions[3])
    case.topic.log.retention_minutes = case.topic.log.retention_mb = 0
    assert await case.topic.log.trim()


async def deduplication_snapshot(case: Takeover) -> None:
    case.topic.dedup.snapshot(case.positions[3])
    await case.topic.log.cursors["pulsar.dedup"].flush()


async def deduplication_off(case: Takeover) -> None:
    await case.topic.set_deduplication(False)


async def close(case: Takeover) -> None:
    """A clean end has nothing left to say about a log that is another's."""
    topic = case.topic
    topic.subscriptions["sub"].cursor.acknowledge([case.positions[3]])
    await case.stale.service.unload(topic)
    assert topic.log.is_fenced
    raise LedgerFenced("it was closed without a write")


async def producer(case: Takeover) -> None:
    await (await case.stale.client()).producer(str(TOPIC), name="q", mode=ProducerAccessMode.EXCLUSIVE)


async def producer_with_schema(case: Takeover) -> None:
    await (await case.stale.client()).producer(str(TOPIC), name="q", schema=_schema("two"))


async def schema(case: Takeover) -> None:
    client = await case.stale.client()
    request_id = client.next_request()
    body = CommandGetOrCreateSchema(request_id=request_id, topic=str(TOPIC), schema=_schema("two"))
    client.send(encode(CommandType.GET_OR_CREATE_SCHEMA, body))
    reply = await client.answer(request_id)
    assert reply.HasField("error_code")
    raise NotReady(reply.error_message)


async def subscribe(case: Takeover) -> None:
    await (await case.stale.client()).subscribe(str(TOPIC), "late")


async def new_topic(case: Takeover) -> None:
    name = next(f"n{number}" for number in range(100) if BUNDLE.contains(hash_of(TopicName.parse(f"n{number}"))))
    await (await case.stale.client()).producer(name)


async def delete(case: Takeover) -> None:
    await case.stale.service.delete_topic(TOPIC, force=True)


async def unload(case: Takeover) -> None:
    """Its lock is its successor's by now and must not be touched."""
    await case.stale.ownership.unload(PUBLIC, BUNDLE)
    raise NotReady("there was nothing to release")


async def lock_release(case: Takeover) -> None:
    await case.stale.ownership.holdings.all()[0].lock.release()
    raise NotReady("there was nothing to release")


async def drain(case: Takeover) -> None:
    await case.stale.ownership.drain()


KINDS: list[Callable[[Takeover], Awaitable[None]]] = [
    append,
    acknowledge,
    cursor_flush,
    cursor_properties,
    seek,
    subscription_create,
    subscription_create_over_theirs,
    subscription_delete,
    properties,
    terminate,
    trim,
    deduplication_snapshot,
    deduplication_off,
    close,
    producer,
    producer_with_schema,
    schema,
    subscribe,
    new_topic,
    delete,
    unload,
    lock_release,
    drain,
]


@pytest.mark.parametrize("load_again", [False, True], ids=["writing", "just-loaded"])
@pytest.mark.parametrize("write", KINDS, ids=lambda each: each.__name__)
async def test_a_stale_owner_writes_nothing(world: Any, write: Callable[[Takeover], Awaitable[None]], load_again: bool) -> None:
    logs = ManagedLedgerConfig(max_entries_per_ledger=3, min_ledger_age_ms=0)
    settings = {"deduplication": True, "retention_minutes": -1, "retention_mb": -1, "balance": False}
    case = Takeover(world, await world.broker(logs, **settings), await world.broker(logs, **settings))
    await case.prepare(load_again=load_again)
    await case.quiet()
    before = case.stored()
    with pytest.raises(BraidError):
        await write(case)
    await case.quiet()
    assert case.stored() == before
    await case.awake()
    await case.quiet()
    assert case.stored() == before, "nothing is written by waking up either"
    await case.check_owner()
