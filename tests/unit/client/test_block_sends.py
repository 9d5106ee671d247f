"""Blocks of messages against a broker that is a script: how rows become entries, where they go when segments are sealed, what
bounds them, and what is told of those that fail."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest
from tests.unit.client.row_block import Row, RowBlock
from tests.unit.client.scripted_topic import QUICK, TOPIC, ScriptedTopic, until

import braid
from braid.client import Client, ClientConfig
from braid.client.blocks import places
from braid.client.producer import Producer
from braid.errors import (
    Closed,
    ConnectionLost,
    DeadlineExceeded,
    InvalidTransactionStatus,
    NotReady,
    TooLarge,
    TopicNotFound,
    TransactionConflict,
)
from braid.model.hashranges import HashRange
from braid.model.layout import SegmentLayout
from braid.model.routing import ring_hash
from braid.runtime.env import Runtime
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock
from braid.wire.entries import entry_metadata
from braid.wire.types import CommandType


class BlockSender:
    """Sends numbered rows of several keys, by blocks and in between one by one, and knows what must be stored."""

    def __init__(self, producer: Producer, keys: int = 24, seed: int = 5) -> None:
        self.producer = producer
        self.futures: list[asyncio.Future[Any]] = []
        self.wanted: dict[str | None, list[bytes]] = defaultdict(list)
        self._keys = [f"key-{number}" for number in range(keys)]
        self._rng = random.Random(seed)
        self._count = 0

    async def send(self, count: int) -> None:
        while count > 0:
            size = min(count, self._rng.choice([1, 5, 30, 100]))
            if size == 1:
                key, value = self._row()
                self.futures.append(self.producer.send_nowait(value, key=key))
            else:
                self.futures.append(await self.producer.send_block(RowBlock(self._row() for _each in range(size))))
            count -= size

    async def all_stored(self) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*self.futures)

    def _row(self) -> Row:
        key = self._rng.choice(self._keys)
        value = b"%d" % self._count
        self._count += 1
        self.wanted[key].append(value)
        return key, value


def block(count: int, key: str | None = "k", value: bytes = b"x") -> RowBlock:
    return RowBlock([(key, value)] * count)


# Entries.


async def test_a_block_becomes_one_entry_for_each_segment(client: Client, topic: ScriptedTopic) -> None:
    topic.layout = topic.shown = SegmentLayout.initial(4, 0)
    producer = await client.producer(TOPIC, name="p")
    rows: list[Row] = [(f"key-{number % 40}", b"%d" % number) for number in range(400)]
    await (await producer.send_block(RowBlock(rows)))
    assert [topic.segments[number].entries for number in range(4)] == [1, 1, 1, 1]
    for key, value in rows:
        segment = topic.layout.segment_of_key(key or "")
        assert (key, value) in topic.segments[segment.segment_id].messages
    wanted: dict[str | None, list[bytes]] = defaultdict(list)
    for key, value in rows:
        wanted[key].append(value)
    assert topic.by_key() == wanted


async def test_numbers_go_on_over_blocks_and_messages(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    await producer.send(b"0")
    topic.is_paused = True
    done = await producer.send_block(block(10))
    producer.send_nowait(b"11")
    await until(lambda: len(topic.sent) == 2)
    (_one, first), (_two, second) = topic.sent
    assert (first.sequence_id, first.highest_sequence_id, first.num_messages) == (1, 10, 10)
    metadata = entry_metadata(first.entry)
    assert (metadata.sequence_id, metadata.highest_sequence_id, metadata.num_messages_in_batch) == (1, 10, 10)
    assert second.sequence_id == 11
    topic.is_paused = False
    topic.pump()
    await producer.flush()
    assert done.done() and producer.last_sequence_id == 11


@pytest.mark.inv("INV17")
@pytest.mark.parametrize(("option", "value"), [("block_max_bytes", 1024), ("block_max_messages", 30)])
async def test_entries_are_bounded_in_bytes_and_messages(topic: ScriptedTopic, option: str, value: int) -> None:
    config = ClientConfig(**{option: value})
    async with braid.connect(topic.url, config=config) as client:
        producer = await client.producer(TOPIC)
        await (await producer.send_block(RowBlock([("k", b"%070d" % number) for number in range(100)])))
        counts = [count for _txn, count in topic.segments[0].transactions]
        assert sum(counts) == 100 and len(counts) >= 4
        assert max(counts) <= (30 if option == "block_max_messages" else 1024 // 70)
        assert topic.by_key()["k"] == [b"%070d" % number for number in range(100)]


async def test_the_brokers_limit_counts_though_the_block_came_before_it_was_known(topic: ScriptedTopic) -> None:
    topic.max_size = 4096
    async with braid.connect(topic.url, config=QUICK) as client:
        producer = await client.producer(TOPIC)
        await (await producer.send_block(RowBlock([("k", bytes(100))] * 200)))
        assert topic.count() == 200 and topic.segments[0].entries > 5


async def test_rows_without_a_key_take_turns_by_entries(topic: ScriptedTopic) -> None:
    topic.layout = topic.shown = SegmentLayout.initial(4, 0)
    async with braid.connect(topic.url, config=ClientConfig(block_max_messages=10)) as client:
        producer = await client.producer(TOPIC)
        await (await producer.send_block(block(160, key=None)))
        assert [len(topic.segments[number].messages) for number in range(4)] == [40, 40, 40, 40]


async def test_an_empty_block_is_done_at_once(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC)
    assert (await producer.send_block(RowBlock([]))).done()
    await producer.flush()
    assert topic.count() == 0


async def test_blocks_go_to_the_partitions_of_a_regular_topic() -> None:
    async with InProcessBroker() as broker, braid.connect(broker.service_url) as client:
        async with braid.AdminClient(broker.http_url) as admin:
            await admin.topics.create("parts", partitions=3)
        async with (
            client.consumer("parts", "s", initial="earliest") as consumer,
            client.producer("parts", compression="zstd") as producer,
        ):
            await (await producer.send_block(RowBlock([(f"key-{number}", b"%d" % number) for number in range(60)])))
            by_block = {}
            for _each in range(60):
                message = await consumer.receive(timeout=10)
                by_block[message.key] = message.id.partition
            for number in range(60):
                sent = await producer.send(b"x", key=f"key-{number}")
                assert by_block[f"key-{number}"] == sent.partition
            assert len(set(by_block.values())) == 3


# Sealed segments.


@pytest.mark.req("R468-47", "R468-51")
@pytest.mark.parametrize("deduplication", [False, True])
@pytest.mark.parametrize("ends_by_error", [False, True])
@pytest.mark.parametrize("shown_first", [False, True])
async def test_what_is_in_flight_at_a_split_goes_to_the_children_in_order(
    client: Client, topic: ScriptedTopic, deduplication: bool, ends_by_error: bool, shown_first: bool
) -> None:
    topic.ends_by_error = ends_by_error
    producer = await client.producer(TOPIC, name="p", deduplication=deduplication)
    sender = BlockSender(producer)
    await sender.send(100)
    await producer.flush()
    topic.is_paused = True
    await sender.send(500)
    await until(lambda: len(topic.sent) > 4)
    topic.store(len(topic.sent) // 2)
    stored = topic.count()
    topic.split(0)
    if shown_first:
        topic.show()
    topic.is_paused = False
    topic.pump()
    await sender.send(100)
    topic.show()
    await sender.send(100)
    await sender.all_stored()
    assert topic.by_key() == sender.wanted
    assert 100 < stored < 600 and topic.count() == 800
    assert topic.segments[1].messages and topic.segments[2].messages


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("deduplication", [False, True])
async def test_order_under_random_changes_and_crashes(
    client: Client, topic: ScriptedTopic, seed: int, deduplication: bool
) -> None:
    """Splits, merges, layouts shown late, owners that die after storing and before answering."""
    rng = random.Random(seed)
    producer = await client.producer(TOPIC, name="p", deduplication=deduplication)
    sender = BlockSender(producer, seed=seed)
    may_crash = deduplication or rng.random() < 0.5
    for _round in range(30):
        topic.is_paused = rng.random() < 0.6
        await sender.send(rng.randrange(150))
        for _turn in range(rng.randrange(12)):
            await asyncio.sleep(0)
        topic.answers = not (may_crash and rng.random() < 0.3)
        topic.store(rng.randrange(len(topic.sent) + 1))
        active = sorted(topic.layout.active_in_order, key=lambda each: each.hash_range)
        if rng.random() < 0.5:
            if len(active) > 1 and rng.random() < 0.5:
                at = rng.randrange(len(active) - 1)
                topic.merge(active[at].segment_id, active[at + 1].segment_id)
            else:
                topic.split(rng.choice(active).segment_id)
            await sender.send(rng.randrange(50))
        if not topic.answers:
            topic.crash()
            topic.answers = True
        if rng.random() < 0.7:
            topic.show()
    topic.is_paused = False
    topic.show()
    topic.pump()
    await sender.all_stored()
    for key, wanted in sender.wanted.items():
        stored = topic.by_key()[key]
        if deduplication:
            assert stored == wanted, key
        else:
            assert list(dict.fromkeys(stored)) == wanted, key  # again, but never out of order among the first ones
    window = producer._window
    assert (window.messages, window.size) == (0, 0)


async def test_what_is_re_routed_does_not_pass_lanes_that_still_wait(client: Client, topic: ScriptedTopic) -> None:
    """0 and 1 are merged into 2, which is split into 3 and 4, then 4 again, and nothing tells meanwhile what 0 stored: the lane
    of 2 waits for it, with rows of keys whose older ones were in the lane of 1."""
    topic.layout = topic.shown = SegmentLayout.initial(2, 0)
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    sender = BlockSender(producer)
    await sender.send(100)
    await producer.flush()
    topic.is_paused = True
    await sender.send(100)
    await until(lambda: len(topic.sent) > 2)
    topic.attach_errors |= {"p-seg-0": NotReady("Not yet."), "p-seg-1": NotReady("Not yet.")}
    topic.merge(0, 1)
    topic.crash()
    topic.is_paused = False
    topic.show()
    await until(lambda: topic.segments[2].names == ["p-seg-2"])
    await sender.send(100)
    topic.split(2)
    topic.show()
    await until(lambda: topic.segments[3].names == ["p-seg-3"] and topic.segments[4].names == ["p-seg-4"])
    await sender.send(100)
    del topic.attach_errors["p-seg-1"]
    await until(lambda: topic.segments[4].names == ["p-seg-4", "p-seg-1"])
    await until(lambda: "p-seg-1" not in topic.attached())
    topic.split(4)
    topic.show()
    await until(lambda: topic.segments[5].names == ["p-seg-5"] and topic.segments[6].names == ["p-seg-6"])
    await sender.send(100)
    assert topic.count() == 100
    del topic.attach_errors["p-seg-0"]
    await sender.all_stored()
    assert topic.by_key() == sender.wanted


async def test_rows_without_a_key_survive_a_split(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p")
    await producer.send(b"first")
    topic.is_paused = True
    done = [await producer.send_block(block(50, key=None)) for _each in range(4)]
    topic.split(0)
    topic.show()
    topic.is_paused = False
    topic.pump()
    await asyncio.gather(*done)
    assert topic.count() == 201
    assert topic.segments[1].messages and topic.segments[2].messages


def test_places_prefer_lanes_in_between() -> None:
    layout = SegmentLayout.initial(2, 0).split(0, 0)
    starts, at = places(layout, [(HashRange(0x1000, 0x8FFF), "older"), (HashRange(0x8000, 0xFFFF), "newer")])
    assert starts == [0x0000, 0x1000, 0x4000, 0x8000, 0x9000]
    assert [each if isinstance(each, str) else each.segment_id for each in at] == [2, "older", "older", "older", "newer"]
    for number in range(300):
        hash16 = ring_hash(layout.routing, f"key-{number}")
        place, _rows = RowBlock([(f"key-{number}", b"")]).spread(layout.routing, starts)[0]
        found = at[place]
        if isinstance(found, str):
            assert hash16 >= 0x1000
        else:
            assert hash16 < 0x1000 and found is layout.find_active_segment(hash16)
    regular = SegmentLayout.synthetic(["a", "b"])
    assert places(regular)[0] == [0, 1]
    assert places(regular, [(None, "older")])[1] == ["older", "older"]


# Bounds.


@pytest.mark.inv("INV17")
async def test_a_large_block_waits_for_room_and_the_window_holds(topic: ScriptedTopic) -> None:
    config = ClientConfig(max_pending_bytes=64 << 10, block_max_bytes=4 << 10)
    async with braid.connect(topic.url, config=config) as client:
        producer = await client.producer(TOPIC, name="p")
        await producer.send(b"first")
        topic.is_paused = True
        sending = asyncio.gather(producer.send_block(RowBlock([("k", b"%01000d" % number) for number in range(500)])))
        await until(lambda: producer._window.is_full)
        for _turn in range(20):
            await asyncio.sleep(0)
        assert not sending.done()
        most = 0
        while not sending.done():
            most = max(most, producer._window.size)
            topic.store(1)
            await asyncio.sleep(0)
        assert most <= (64 + 16) << 10
        topic.is_paused = False
        topic.pump()
        await (await sending)[0]
        assert topic.by_key()["k"] == [b"%01000d" % number for number in range(500)]
        assert (producer._window.messages, producer._window.size) == (0, 0)


async def test_a_row_above_the_brokers_limit_is_refused_before_anything_is_sent(topic: ScriptedTopic) -> None:
    topic.max_size = 10_000
    async with braid.connect(topic.url, config=QUICK) as client:
        producer = await client.producer(TOPIC)
        await producer.send(b"first")
        with pytest.raises(TooLarge, match=r"A message of 20\d\d\d bytes is above .* 10000 bytes, so nothing .* smaller"):
            await producer.send_block(RowBlock([("k", b"small")] * 100 + [("k", bytes(20_000))]))
        assert topic.count() == 1
        await producer.send(b"second")
        assert (producer._window.messages, producer._window.size) == (0, 0)


async def test_a_row_that_turns_out_to_be_too_large_fails_its_block(topic: ScriptedTopic) -> None:
    """The limit was not known yet: the lane was not attached."""
    topic.max_size = 10_000
    async with braid.connect(topic.url, config=QUICK) as client:
        producer = await client.producer(TOPIC)
        done = await producer.send_block(RowBlock([("k", b"small")] * 10 + [("k", bytes(20_000)), ("k", b"last")]))
        with pytest.raises(TooLarge, match="above the broker's limit of 10000 bytes"):
            await done
        await producer.flush()
        assert (producer._window.messages, producer._window.size) == (0, 0)


async def test_compressed_rows_may_be_larger(topic: ScriptedTopic) -> None:
    topic.max_size = 10_000
    async with braid.connect(topic.url, config=QUICK) as client:
        producer = await client.producer(TOPIC, compression="zstd")
        await producer.send(b"first")
        await (await producer.send_block(RowBlock([("k", bytes(20_000))])))
        assert topic.by_key()["k"] == [bytes(20_000)]


# Failures.


async def test_too_old_is_told(topic: ScriptedTopic) -> None:
    clock = ManualClock()
    config = ClientConfig(max_pending_bytes=64 << 10)
    async with braid.connect(topic.url, config=config, runtime=Runtime(clock=clock)) as client:
        producer = await client.producer(TOPIC, name="p")
        await producer.send(b"first")
        topic.is_paused = True
        done = await producer.send_block(RowBlock([("k", bytes(20_000))] * 4))
        late = asyncio.gather(producer.send_block(RowBlock([("k", bytes(20_000))] * 4)), return_exceptions=True)
        await clock.advance(61)
        with pytest.raises(DeadlineExceeded, match="60 s"):
            await done
        await clock.advance(61)
        (outcome,) = await late
        assert isinstance(outcome, asyncio.Future | DeadlineExceeded)
        if isinstance(outcome, asyncio.Future):
            with pytest.raises(DeadlineExceeded):
                await outcome
        topic.is_paused = False
        topic.sent.clear()
        assert (producer._window.messages, producer._window.size) == (0, 0)


async def test_who_gives_up_a_block_half_way_leaves_nothing_that_hangs(topic: ScriptedTopic) -> None:
    config = ClientConfig(max_pending_bytes=64 << 10)
    async with braid.connect(topic.url, config=config) as client:
        producer = await client.producer(TOPIC, name="p")
        await producer.send(b"first")
        topic.is_paused = True
        sending = asyncio.ensure_future(producer.send_block(RowBlock([("k", bytes(1000))] * 500)))
        await until(lambda: producer._window.is_full)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        topic.is_paused = False
        topic.pump()
        async with asyncio.timeout(10):
            await producer.flush()
        assert 1 < topic.count() < 501
        assert (producer._window.messages, producer._window.size) == (0, 0)


async def test_the_end_of_the_topic_or_the_producer_ends_blocks(client: Client, topic: ScriptedTopic) -> None:
    one, two = await client.producer(TOPIC), await client.producer(TOPIC)
    await two.close()
    with pytest.raises(Closed):
        await two.send_block(block(1))
    topic.is_paused = True
    lost = await one.send_block(block(10))
    topic.end(TopicNotFound("It is gone."))
    with pytest.raises(TopicNotFound):
        await lost
    with pytest.raises(TopicNotFound):
        await one.send_block(block(1))


# Transactions.


@pytest.mark.inv("INV14")
async def test_a_commit_waits_for_blocks(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first")
    topic.is_paused = True
    await producer.send_block(block(10), txn=txn)
    committing = asyncio.ensure_future(txn.commit())
    await until(lambda: len(topic.sent) == 1)
    metadata = entry_metadata(topic.sent[0][1].entry)
    assert (metadata.txnid_most_bits, metadata.txnid_least_bits) == txn.id
    for _turn in range(200):
        await asyncio.sleep(0)
    assert not topic.transactions.ended and not committing.done()
    with pytest.raises(InvalidTransactionStatus, match="being committed"):
        await producer.send_block(block(1), txn=txn)
    topic.is_paused = False
    topic.pump()
    await committing
    assert topic.segments[0].transactions[-1] == (txn.id, 10)


@pytest.mark.inv("INV14")
@pytest.mark.parametrize("why", ["refused", "lost", "too large"])
async def test_a_block_that_failed_fails_its_transaction(client: Client, topic: ScriptedTopic, why: str) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first")
    if why == "refused":
        topic.refuses[txn.id] = TransactionConflict("No.")
        with pytest.raises(TransactionConflict, match="No"):
            await (await producer.send_block(block(10), txn=txn))
    elif why == "lost":
        topic.is_paused = True
        done = await producer.send_block(block(10), txn=txn)
        await until(lambda: len(topic.sent) == 1)
        topic.crash()
        with pytest.raises(ConnectionLost, match="may be stored"):
            await done
    else:
        with pytest.raises(TooLarge):
            await producer.send_block(block(1, value=bytes(6 << 20)), txn=txn)
    topic.is_paused = False
    with pytest.raises(TransactionConflict, match="was aborted"):
        await txn.commit()
    assert topic.transactions.ended == [(txn.id, "ABORT")]


async def test_a_block_of_a_transaction_is_sent_again_with_deduplication(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    await producer.send(b"first")
    topic.answers = False
    done = await producer.send_block(block(10), txn=txn)
    await until(lambda: topic.count() == 11)
    topic.crash()
    topic.answers = True
    await done
    await txn.commit()
    assert topic.count() == 11 and topic.seen[CommandType.PRODUCER] == 2
