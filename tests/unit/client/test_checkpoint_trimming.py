"""Checkpoint consumers and retention inside of a segment: what is gone before it was read is told, never skipped. What was
read, or was gone before the consumer began, is nobody's loss."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator

import pytest

import braid
from braid.broker.topic import Topic
from braid.client import Client
from braid.client.checkpoint_consumer import CheckpointConsumer, Start
from braid.client.config import ClientConfig
from braid.client.messages import EARLIEST, LATEST
from braid.client.opening import Opening
from braid.errors import CheckpointOutdated
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.log import ManagedLedger
from braid.model.names import TopicName
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig

TOPIC = "topic://public/default/kept"
NAME = TopicName.parse(TOPIC)
SECONDS = 10.0
PER_LEDGER = 5
ROOM = 4
"""Messages received ahead."""


class World:
    """One broker with one topic of one segment, whose ledgers are short and kept until the test says so."""

    def __init__(self, broker: InProcessBroker, client: Client) -> None:
        self.broker = broker
        self.client = client

    @property
    def topic(self) -> Topic:
        (found,) = self.broker.nodes[0].service.topics.values()
        return found

    async def produce(self, first: int, last: int) -> None:
        async with self.client.producer(TOPIC) as producer:
            for number in range(first, last):
                await producer.send(b"%d" % number)

    async def trim(self, log: ManagedLedger | None = None) -> int:
        """Retention keeps nothing but the last ledger now; returns the number of messages that are gone."""
        log = log or self.topic.log
        log.retention_minutes, log.retention_mb = -1, 0
        log.cursors.pop("pulsar.dedup", None)  # it keeps what deduplication may need
        while await log.trim():
            pass
        log.retention_minutes = log.retention_mb = -1
        assert log.map.start > 0
        return log.map.start

    def consumer(self, start: Start = EARLIEST, group: str | None = None) -> Opening[CheckpointConsumer]:
        return self.client.checkpoint_consumer(TOPIC, start=start, group=group)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    config = StandaloneConfig(
        scalable_topics=ScalableConfig(),
        managed_ledger=ManagedLedgerConfig(max_entries_per_ledger=PER_LEDGER, min_ledger_age_ms=0),
    )
    async with InProcessBroker(config=config, with_http=False) as broker:
        service = broker.nodes[0].service
        await service.namespaces.set_policy(
            NAME.namespace, "retention_policies", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}
        )
        await service.create_scalable_topic(NAME, 1)
        async with braid.connect(broker.service_url, config=ClientConfig(receiver_queue=ROOM)) as client:
            yield World(broker, client)


async def take(consumer: CheckpointConsumer, count: int) -> list[int]:
    return [int((await consumer.receive(SECONDS)).payload) for _ in range(count)]


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("is_loaded_again", [False, True])
async def test_a_checkpoint_before_what_is_kept_is_refused(world: World, group: str | None, is_loaded_again: bool) -> None:
    await world.produce(0, 12)
    async with world.consumer(group=group) as consumer:
        assert await take(consumer, 3) == [0, 1, 2]
        place = consumer.checkpoint().to_bytes()
        last = consumer.checkpoint().places[0]
    await world.produce(12, 23)
    first = await world.trim()
    if is_loaded_again:
        await world.broker.nodes[0].service.unload(world.topic)
    with pytest.raises(CheckpointOutdated) as refusal:
        await world.consumer(place, group)
    text = str(refusal.value)
    assert f"messages of segment 0 of {TOPIC}" in text
    assert f"What follows {last.ledger_id}:{last.entry_id} in" in text  # type: ignore[union-attr]
    assert f"the first entry that is kept is {world.topic.log.first_position}" in text
    assert "start from EARLIEST" in text
    assert "keep a subscription" in text
    for start in (EARLIEST, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)):
        async with world.consumer(start) as consumer:
            assert await take(consumer, 23 - first) == list(range(first, 23))
    async with world.consumer(LATEST) as consumer:
        await world.produce(23, 24)
        assert await take(consumer, 1) == [23]


async def test_a_group_behind_what_is_kept_says_what_helps(world: World) -> None:
    """Another `start` does not: the group's place goes before it."""
    await world.produce(0, 12)
    async with world.consumer(group="g") as consumer:
        assert await take(consumer, 3) == [0, 1, 2]
    await world.produce(12, 23)
    first = await world.trim()
    for start in (EARLIEST, LATEST):
        with pytest.raises(
            CheckpointOutdated, match="take another group, or delete the subscription g, and start from EARLIEST"
        ):
            await world.consumer(start, "g")
    controller = await world.broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(controller, ScalableTopicController)
    async with world.consumer(group="h") as consumer:
        assert await take(consumer, 23 - first) == list(range(first, 23))
    await controller.delete_subscription("g")
    async with world.consumer(group="g") as consumer:
        assert await take(consumer, 23 - first) == list(range(first, 23))


async def test_a_checkpoint_right_behind_what_is_gone_goes_on(world: World) -> None:
    await world.produce(0, 12)
    async with world.consumer() as consumer:
        await take(consumer, 10)
        place = consumer.checkpoint().to_bytes()
    assert await world.trim() == 10
    async with world.consumer(place) as consumer:
        assert await take(consumer, 2) == [10, 11]


async def test_one_message_too_early_is_too_early(world: World) -> None:
    await world.produce(0, 12)
    async with world.consumer() as consumer:
        await take(consumer, 9)
        place = consumer.checkpoint().to_bytes()
    assert await world.trim() == 10
    with pytest.raises(CheckpointOutdated):
        await world.consumer(place)


async def test_the_rest_of_a_batch_is_wanted_too(world: World) -> None:
    async with world.client.producer(TOPIC) as producer:
        for entry in range(PER_LEDGER):
            await asyncio.gather(*[producer.send(b"%d" % (3 * entry + number)) for number in range(3)])
    await world.produce(15, 17)
    async with world.consumer() as consumer:
        got = await take(consumer, 14)
        middle = consumer.checkpoint().to_bytes()
        got += await take(consumer, 1)
        end = consumer.checkpoint().to_bytes()
        assert got == list(range(15))
    assert await world.trim() == PER_LEDGER, "the batches went into one entry each"
    with pytest.raises(CheckpointOutdated):
        await world.consumer(middle)
    async with world.consumer(end) as consumer:
        assert await take(consumer, 2) == [15, 16]


async def test_a_consumer_that_falls_behind_while_it_runs_is_told(world: World) -> None:
    await world.produce(0, 33)
    async with world.consumer() as consumer:
        got = await take(consumer, 2)
        await world.trim()
        with pytest.raises(CheckpointOutdated, match="messages of segment 0"):
            while True:
                got += await take(consumer, 1)
        assert got == list(range(len(got))), "what had been received can still be had, nothing behind the gap"
        assert len(got) < 30


async def test_a_consumer_that_has_everything_is_not_disturbed(world: World) -> None:
    await world.produce(0, 12)
    async with world.consumer() as consumer:
        assert await take(consumer, 12) == list(range(12))
        await world.trim()
        await world.produce(12, 23)
        assert await take(consumer, 11) == list(range(12, 23))
        await world.trim()
        assert consumer.failure is None
        assert consumer._lanes[0].attachments == 1


async def test_what_is_gone_before_anything_was_received_is_missed_as_well(world: World) -> None:
    """From the moment a consumer is there, or a checkpoint is taken, the beginning is a place like any other."""
    async with world.consumer() as consumer:
        empty = consumer.checkpoint().to_bytes()  # nothing was ever stored
        await world.produce(0, 12)
        assert await take(consumer, 1) == [0]
    await world.trim()
    with pytest.raises(CheckpointOutdated):
        await world.consumer(empty)
    async with world.consumer() as consumer:
        kept = consumer.checkpoint().to_bytes()
    async with world.consumer(kept) as consumer:
        assert await take(consumer, 2) == [10, 11], "it began at what was kept, and that is still there"
    await world.produce(12, 23)
    await world.trim()
    with pytest.raises(CheckpointOutdated):
        await world.consumer(kept)


async def test_a_segment_that_came_after_the_checkpoint_is_wanted_from_its_first_message_on(world: World) -> None:
    await world.produce(0, 2)
    async with world.consumer() as consumer:
        await take(consumer, 2)
        place = consumer.checkpoint().to_bytes()
    controller = await world.broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(controller, ScalableTopicController)
    await controller.split_segment(0)
    await world.produce(2, 26)
    long = [each.log for each in world.broker.nodes[0].service.topics.values() if len(each.log.infos) > 1]
    assert long
    for log in long:
        await world.trim(log)
    with pytest.raises(CheckpointOutdated, match=r"messages of segment [12]"):
        async with world.consumer(place) as consumer:
            await take(consumer, 24)


async def test_an_aborted_transaction_behind_what_was_read_is_no_gap(world: World) -> None:
    """Nobody was ever shown its entries, so no reader stands behind them."""
    async with world.client.producer(TOPIC, batching=False) as producer:
        for number in range(3):
            await producer.send(b"%d" % number)
        txn = await world.client.begin_transaction()
        for _ in range(PER_LEDGER - 3):
            await producer.send(b"99", txn=txn)
        await txn.abort()
    async with world.consumer() as consumer:
        assert await take(consumer, 3) == [0, 1, 2]
        place = consumer.checkpoint().to_bytes()
    await world.produce(3, 4)  # in the next ledger
    assert await world.trim() == PER_LEDGER
    async with world.consumer(place) as consumer:
        assert await take(consumer, 1) == [3]


async def test_a_member_of_a_group_goes_on_where_another_had_read_what_is_gone(world: World) -> None:
    """It cannot know what the other one read; a group promises that its members do not read the same, no more."""
    first, second = await world.consumer(group="g"), await world.consumer(group="g")
    controller = await world.broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(controller, ScalableTopicController)
    await controller.split_segment(0)
    keys = dict.fromkeys((1, 2), "")
    layout = controller.layout
    for number in range(100):
        keys[layout.segment_of_key(f"k{number}").segment_id] = f"k{number}"
    async with world.client.producer(TOPIC, batching=False) as producer:
        for number in range(2 * PER_LEDGER + 2):
            for segment, key in keys.items():
                await producer.send(b"%d" % (segment * 100 + number), key=key)
        mine = {int((await first.receive(SECONDS)).payload) // 100 for _ in range(2 * PER_LEDGER + 2)}
        assert len(mine) == 1
        await take(second, 2 * PER_LEDGER + 2)
        for each in list(world.broker.nodes[0].service.topics.values()):
            if len(each.log.infos) > 1:
                await world.trim(each.log)
        await first.close()
        await producer.send(b"7", key=keys[mine.pop()])
        while (await second.receive(SECONDS)).payload != b"7":
            pass  # what is kept of the segment comes first
        await second.close()
