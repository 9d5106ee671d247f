"""Sequence ids of the application's own on topics whose segments change: what is stored is not stored again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
import pytest

import braid
from braid.broker.config import RetentionConfig
from braid.client import Client, ClientConfig
from braid.client.connection import Connection
from braid.client.messages import MessageId
from braid.errors import NotAllowed, NotReady
from braid.model.names import TopicName
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig

TOPIC = "topic://public/default/orders"
NAME = TopicName.parse(TOPIC)
SECONDS = 10.0
CONFIG = StandaloneConfig(scalable_topics=ScalableConfig(drain_poll_seconds=0.1), retention=RetentionConfig(unread_minutes=0))
KEYS = [f"k{number}" for number in range(8)]


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker(config=CONFIG, with_http=False) as one:
        await one.nodes[0].service.create_scalable_topic(NAME, 1)
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url) as one:
        yield one


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    found = await broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(found, ScalableTopicController)
    return found


def key_of(number: int, is_keyed: bool = True) -> str | None:
    return KEYS[number % len(KEYS)] if is_keyed else None


async def process(
    client: Client, ids: Iterable[int], *, is_keyed: bool = True, batching: bool = True, deduplication: bool = True
) -> dict[int, MessageId]:
    """One run of the application under its name: where each message is stored."""
    async with client.producer(TOPIC, name="p", deduplication=deduplication, batching=batching) as producer:
        futures = {
            number: producer.send_nowait(str(number).encode(), key=key_of(number, is_keyed), sequence_id=number)
            for number in ids
        }
        await asyncio.gather(*futures.values())
        return {number: future.result() for number, future in futures.items()}


async def stored(client: Client, count: int) -> list[int]:
    """The messages of the topic, and whether more than expected are there."""
    async with client.checkpoint_consumer(TOPIC) as reader:
        got = [int((await reader.receive(SECONDS)).payload) for _ in range(count)]
        return got + [int(each.payload) for each in await reader.receive_batch(50, 0.1)]


def duplicates(answers: dict[int, MessageId]) -> list[int]:
    return sorted(number for number, where in answers.items() if where.ledger_id < 0)


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("is_keyed", [True, False])
async def test_what_a_parent_stored_is_not_stored_again(
    broker: InProcessBroker, client: Client, batching: bool, is_keyed: bool
) -> None:
    await process(client, range(5), batching=batching, is_keyed=is_keyed)
    await (await leader(broker)).split_segment(0)
    answers = await process(client, range(3, 8), batching=batching, is_keyed=is_keyed)
    assert duplicates(answers) == [3, 4]
    assert sorted(await stored(client, 8)) == list(range(8))
    # Again, now that the child has some of its own, and after another split.
    answers = await process(client, range(10), batching=batching, is_keyed=is_keyed)
    assert duplicates(answers) == list(range(8))
    await (await leader(broker)).split_segment(1)
    answers = await process(client, range(12), batching=batching, is_keyed=is_keyed)
    assert duplicates(answers) == list(range(10))
    assert sorted(await stored(client, 12)) == list(range(12))


async def test_without_a_change_of_the_layout(broker: InProcessBroker, client: Client) -> None:
    await process(client, range(5))
    assert duplicates(await process(client, range(3, 8))) == [3, 4]
    assert sorted(await stored(client, 8)) == list(range(8))


@pytest.mark.parametrize("is_pruned", [False, True])
async def test_two_parents_that_were_merged(broker: InProcessBroker, client: Client, is_pruned: bool) -> None:
    """What one of them stored tells nothing of the other: the key decides."""
    controller = await leader(broker)
    await controller.split_segment(0)
    layout = controller._term.work.layout  # type: ignore[union-attr]
    lower = [number for number in range(40) if layout.segment_of_key(KEYS[number % len(KEYS)]).segment_id == 1]
    upper = [number for number in range(40) if number not in lower]
    assert lower
    assert upper
    first = [number for number in lower if number < 20]  # of one it was stored up to 19, of the other up to 39
    await process(client, first)
    await process(client, upper)
    await controller.merge_segments(1, 2)
    if is_pruned:
        assert await controller.prune() == [0, 1, 2]
    answers = await process(client, range(45))
    assert duplicates(answers) == sorted(first + upper)
    if not is_pruned:
        assert sorted(await stored(client, 45)) == list(range(45))
    again = await process(client, range(46))
    assert duplicates(again) == list(range(45))


async def test_a_parent_that_was_removed(broker: InProcessBroker, client: Client) -> None:
    controller = await leader(broker)
    await process(client, range(5))
    await controller.split_segment(0)
    assert await controller.prune() == [0]
    assert duplicates(await process(client, range(3, 8))) == [3, 4]
    await controller.split_segment(1)
    await controller.split_segment(2)
    assert await controller.prune() == [1, 2]
    assert duplicates(await process(client, range(10))) == list(range(8))
    assert sorted(await stored(client, 2)) == [8, 9]


async def test_a_parent_of_which_nothing_is_remembered(broker: InProcessBroker, client: Client) -> None:
    """Too many segments were removed since: what cannot be told is refused, not stored twice and not lost."""
    controller = await leader(broker)
    await process(client, range(5))
    await controller.split_segment(0)
    assert await controller.prune() == [0]
    term = controller._term
    assert term is not None
    await term.work.change(lambda value: msgspec.structs.replace(value, pruned_ends={}))
    with pytest.raises(NotAllowed, match="above 4"):
        await process(client, range(3, 8))
    assert duplicates(await process(client, range(5, 10))) == [5, 6, 7]
    async with client.producer(TOPIC, name="p", deduplication=True) as producer:  # numbers of its own choice
        assert (await producer.send(b"8", key="k0")).ledger_id >= 0


async def test_brokers_that_were_restarted(tmp_path: Path) -> None:
    config = StandaloneConfig(scalable_topics=ScalableConfig(drain_poll_seconds=0.1))
    for run in range(3):
        async with InProcessBroker(config=config, data_dir=tmp_path, with_http=False) as broker:
            if run == 0:
                await broker.nodes[0].service.create_scalable_topic(NAME, 1)
            async with braid.connect(broker.service_url) as client:
                answers = await process(client, range(run * 5 + 5))
                assert duplicates(answers) == list(range(run * 5))
                controller = await leader(broker)
                await controller.split_segment(run)  # 0, then 1, then 2
                assert sorted(await stored(client, run * 5 + 5)) == list(range(run * 5 + 5))


async def test_a_topic_that_deduplicates_everybody(broker: InProcessBroker, client: Client) -> None:
    service = broker.nodes[0].service
    await service.namespaces.set_policy(NAME.namespace, "deduplicationEnabled", True)
    await process(client, range(5), deduplication=False)
    await (await leader(broker)).split_segment(0)
    assert duplicates(await process(client, range(3, 8), deduplication=False)) == [3, 4]


async def test_only_who_asks_and_knows_is_told(broker: InProcessBroker, client: Client) -> None:
    """Other clients never see the extension; a producer that is not deduplicated has no use for it."""
    await process(client, range(5))
    await (await leader(broker)).split_segment(0)
    async with client.producer(TOPIC, name="p", deduplication=True) as producer:
        await producer.send(b"5", key="k0", sequence_id=5)
        topic = next(each for each in broker.nodes[0].service.topics.values() if each.producers)
        [attached] = topic.producers.values()
        assert topic._elders_of(attached) == {0: 4}
        attached.link.is_braid = False
        assert topic._elders_of(attached) == {}
        attached.link.is_braid = True
        attached.asks_dedup = False
        assert topic._elders_of(attached) == {}


async def test_a_segment_that_is_split_before_the_lane_is_attached(broker: InProcessBroker) -> None:
    """What waits for a lane is judged by the one that takes it in the end."""
    async with braid.connect(broker.service_url, config=ClientConfig(backoff_initial=0.01, layout_check=0.05)) as client:
        await process(client, range(5))
        controller = await leader(broker)
        producer = await client.producer(TOPIC, name="p", deduplication=True)
        locate, is_lost = client.locate, True

        async def straying(topic: str) -> Connection:
            if is_lost and topic.startswith("segment://"):
                raise NotReady(f"{topic} has no owner at the moment.")
            return await locate(topic)

        client.locate = straying  # type: ignore[method-assign]
        futures = [producer.send_nowait(str(number).encode(), key=key_of(number), sequence_id=number) for number in range(3, 8)]
        await asyncio.sleep(0)
        await controller.split_segment(0)
        is_lost = False
        answers = dict(zip(range(3, 8), await asyncio.gather(*futures), strict=True))
        assert duplicates(answers) == [3, 4]
        await producer.close()
        assert sorted(await stored(client, 8)) == list(range(8))
