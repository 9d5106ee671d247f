"""Messages that no subscription has read stay: through an unload, a change of ledgers, a split; until their time is over."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

import braid
from braid.broker.config import BrokerConfig, RetentionConfig
from braid.cli import admin_work
from braid.cli.admin_output import next_trim
from braid.cli.produce import ProduceOptions
from braid.cli.produce import _produce as produce
from braid.cli.top import TopOptions, Watcher
from braid.client import Client
from braid.client.admin import AdminClient
from braid.errors import ConfigError
from braid.model.names import TopicName
from braid.model.retention import NextTrim
from braid.runtime.clock import SystemClock
from braid.runtime.config import load
from braid.scalable.config import ScalableConfig
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig

PLAIN = "persistent://public/default/orders"
SCALABLE = "topic://public/default/orders"
NAMESPACE = "public/default"
SECONDS = 20.0
KIND = pytest.mark.parametrize("topic", [PLAIN, SCALABLE], ids=["persistent", "topic"])


@dataclass
class World:
    broker: InProcessBroker
    client: Client
    admin: AdminClient

    @property
    def service(self) -> Any:
        return self.broker.nodes[0].service

    async def create(self, topic: str) -> None:
        if topic == SCALABLE:
            await self.admin.scalable_topics.create(topic, segments=1)
        else:
            await self.admin.topics.create(topic)

    async def produce(self, topic: str, first: int, last: int) -> None:
        async with self.client.producer(topic) as producer:
            await asyncio.gather(*(producer.send(b"%d" % number, key="k") for number in range(first, last)))

    async def unload(self) -> None:
        for topic in list(self.service.topics.values()):
            await self.service.unload(topic)

    async def controller(self) -> Any:
        return await self.service.scalable.lead(TopicName.parse(SCALABLE))

    async def trim(self) -> None:
        for topic in list(self.service.topics.values()):
            await topic.log.trim()

    async def read(self, topic: str, last: int, name: str = "late") -> list[int]:
        """What a new subscription gets from the beginning, up to message `last`."""
        found: list[int] = []
        opened = (
            self.client.stream_consumer(topic, name, initial="earliest")
            if topic == SCALABLE
            else self.client.consumer(topic, name, initial="earliest")
        )
        async with asyncio.timeout(SECONDS), opened as consumer:
            while not found or found[-1] != last:
                message = await consumer.receive()
                found.append(int(message.value))
                await consumer.acknowledge_cumulative(message)
        return found


@asynccontextmanager
async def running(**sections: Any) -> AsyncIterator[World]:
    config = StandaloneConfig(**({"scalable_topics": ScalableConfig(prune_seconds=3600)} | sections))
    async with (
        InProcessBroker(config=config) as broker,
        braid.connect(broker.service_url) as client,
        AdminClient(broker.http_url) as admin,
    ):
        yield World(broker, client, admin)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running() as made:
        yield made


@KIND
async def test_an_unload_deletes_nothing_that_nobody_has_read(world: World, topic: str) -> None:
    await world.create(topic)
    await world.produce(topic, 0, 100)
    await world.unload()
    await world.produce(topic, 100, 101)
    await world.trim()
    assert await world.read(topic, 100) == list(range(101))


async def test_a_split_and_a_prune_delete_nothing_that_nobody_has_read(world: World) -> None:
    await world.create(SCALABLE)
    await world.produce(SCALABLE, 0, 10)
    controller = await world.controller()
    await controller.split_segment(0)
    await world.produce(SCALABLE, 10, 11)
    assert await controller.prune() == []
    assert await world.read(SCALABLE, 10) == list(range(11))


@pytest.mark.parametrize(
    ("is_read", "why"), [(False, "the topic has no subscription"), (True, "every subscription has read them")]
)
async def test_a_prune_says_what_went_and_why(caplog: pytest.LogCaptureFixture, is_read: bool, why: str) -> None:
    caplog.set_level(logging.INFO)
    async with running(retention=RetentionConfig(unread_minutes=0)) as world:
        await world.create(SCALABLE)
        await world.produce(SCALABLE, 0, 10)
        if is_read:
            await world.read(SCALABLE, 9)
        controller = await world.controller()
        await controller.split_segment(0)
        assert await controller.prune() == [0]
    (line,) = [each for each in caplog.records if "deleted" in each.message]
    assert line.levelno == logging.INFO
    assert line.message.startswith(f"deleted 10 messages of {SCALABLE.replace('topic:', 'segment:')}/")
    assert line.message.endswith(f" bytes): {why}")


@KIND
async def test_without_the_rule_pulsars_holds(topic: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(retention=RetentionConfig(unread_minutes=0)) as world:
        await world.create(topic)
        await world.produce(topic, 0, 10)
        await world.unload()
        await world.produce(topic, 10, 11)
        await world.trim()
        assert await world.read(topic, 10) == [10]
    assert "deleted 10 messages of " in caplog.text
    assert "the topic has no subscription" in caplog.text


async def test_a_policy_wins(world: World) -> None:
    """Of the namespace, at once, also one that keeps nothing; and without it the rule is back."""
    await world.create(PLAIN)
    await world.produce(PLAIN, 0, 10)
    await world.unload()
    await world.produce(PLAIN, 10, 11)
    (topic,) = world.service.topics.values()
    assert topic.log.next_trim().rule == "unread"
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=-1, megabytes=-1)
    assert tuple(topic.log.limits) == (-1, -1, 0)
    await world.admin.namespaces.remove_retention(NAMESPACE)
    assert tuple(topic.log.limits) == (0, 0, 10_080)
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=0, megabytes=0)
    await world.trim()
    assert await world.read(PLAIN, 10) == [10]


async def test_retention_of_the_brokers_settings_wins() -> None:
    async with running(broker=BrokerConfig(retention_minutes=30, retention_mb=-1)) as world:
        await world.create(PLAIN)
        await world.produce(PLAIN, 0, 1)
        (topic,) = world.service.topics.values()
        assert tuple(topic.log.limits) == (30, -1, 0)


@pytest.mark.parametrize(("minutes", "megabytes"), [(10_080, 0), (0, 500), (-1, 0), (0, -1)])
def test_half_a_retention_in_the_settings_is_refused(minutes: int, megabytes: int) -> None:
    """As by REST. It would keep nothing, and who sets one of them wants more to be kept, not less."""
    given = {"retention_minutes": minutes, "retention_mb": megabytes}
    flags = {"broker": {key: value for key, value in given.items() if value}}
    with pytest.raises(ConfigError, match=r"broker\.retention_minutes and broker\.retention_mb"):
        load(StandaloneConfig, None, {}, flags)


async def test_truncate_is_no_surprise(world: World) -> None:
    """Who asks for the messages to be deleted gets that."""
    await world.create(PLAIN)
    await world.produce(PLAIN, 0, 10)
    await world.unload()
    await world.produce(PLAIN, 10, 11)
    await world.admin.topics.truncate(PLAIN)
    assert await world.read(PLAIN, 10) == [10]


async def test_deleting_the_last_subscription_deletes_no_message(world: World) -> None:
    await world.create(PLAIN)
    async with world.client.consumer(PLAIN, "first"):
        await world.produce(PLAIN, 0, 10)
    await world.unload()
    await world.produce(PLAIN, 10, 11)
    await world.admin.subscriptions.delete(PLAIN, "first")
    await world.trim()
    assert await world.read(PLAIN, 10) == list(range(11))


@pytest.mark.req("R473-2")
@KIND
async def test_what_an_open_transaction_wrote_is_not_deleted_before_it_is_decided(topic: str) -> None:
    """Neither with a sealed segment nor with an old ledger, whatever retention says."""
    async with running(retention=RetentionConfig(unread_minutes=0)) as world:
        await world.create(topic)
        async with world.client.producer(topic) as producer:
            txn = await world.client.begin_transaction(timeout=120)
            await producer.send(b"0", key="k", txn=txn)
            if topic == SCALABLE:
                controller = await world.controller()
                await controller.split_segment(0)
                await producer.send(b"1", key="k", txn=txn)
                assert await controller.prune() == []
            else:
                await world.unload()
                await producer.send(b"1", key="k", txn=txn)
                await world.trim()
            late = asyncio.create_task(world.read(topic, 1))  # before the commit: from then on it keeps them
            while not any(each.subscriptions for each in world.service.topics.values()):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
            await txn.commit()
            assert await late == [0, 1]


@KIND
async def test_stats_say_what_goes_next_and_when(world: World, topic: str) -> None:
    await world.create(topic)
    await world.produce(topic, 0, 10)
    await world.unload()
    await world.produce(topic, 10, 11)

    async def told() -> NextTrim:
        if topic == PLAIN:
            return (await world.admin.topics.stats(topic)).next_trim
        return (await world.admin.scalable_topics.get_stats(topic)).segments[0].next_trim

    found = await told()
    (loaded,) = world.service.topics.values()
    assert (found.rule, found.messages, found.unread_minutes) == ("unread", 10, 10_080)
    assert found.at_ms == loaded.log.infos[0].last_append_ms + 10_080 * 60_000 + 1
    assert 0 < found.unread_bytes == found.bytes
    assert next_trim(found).startswith("10 messages, after 20")
    if topic == SCALABLE:
        await (await world.controller()).split_segment(0)
        found = await told()
        assert (found.rule, found.messages) == ("unread", 11)  # a sealed segment goes as a whole
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=-1, megabytes=-1)
    assert (await told()).unread_bytes == 0


async def test_brokers_warn_when_such_messages_fill_half_of_the_disk(world: World) -> None:
    await world.create(PLAIN)
    await world.produce(PLAIN, 0, 10)
    await world.unload()
    await world.produce(PLAIN, 10, 11)
    await world.service.retention.trim()
    size = world.service.retention.unread_bytes
    assert size > 0
    ledgers: Any = world.broker.standalone.ledgers
    ledgers.disk_bytes = 2 * size
    assert await world.admin.brokers.warnings() == []
    ledgers.disk_bytes = 2 * size - 2
    (warning,) = await world.admin.brokers.warnings()
    assert "more than half of the disk" in warning
    assert await world.admin.brokers.health() == "ok"
    options = TopOptions(
        interval=0.0, sort="in", rows=5, namespace=None, is_once=True, url=world.broker.http_url, is_json=False, timeout=10.0
    )
    async with Watcher(options, SystemClock()) as watcher:
        (shown,) = (await watcher.look()).warnings
    assert shown.endswith(warning)
    await world.service.retention.trim()
    assert await world.read(PLAIN, 10) == list(range(11)), "it is not deleted for that"


@pytest.mark.parametrize("partitions", [0, 2])
async def test_who_creates_a_topic_is_told_how_long_it_keeps_messages(
    world: World, partitions: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal; scripts hear nothing."""
    await admin_work.create_topic(world.admin, "quiet")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    await admin_work.create_topic(world.admin, "plain", partitions=partitions)
    assert capsys.readouterr().err == (
        "plain has no subscription yet: messages are kept for 7 days, or as a retention policy says.\n"
    )
    await admin_work.create_scalable_topic(world.admin, SCALABLE, segments=2)
    assert capsys.readouterr().err.count("kept for 7 days") == 1
    await world.admin.namespaces.set_retention(NAMESPACE, minutes=10, megabytes=-1)
    await admin_work.create_topic(world.admin, "other")
    assert capsys.readouterr().err == ""


@KIND
async def test_who_makes_a_topic_by_producing_is_told_that_messages_go(
    world: World, topic: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal, and once: not of a topic that is there."""
    options = ProduceOptions(
        topic=topic,
        messages=1,
        file=None,
        text="x",
        size=1,
        rate=0,
        key=None,
        batch=1,
        compression="none",
        url=world.broker.service_url,
        is_json=False,
    )
    for is_terminal, hints in ((True, 1), (True, 0), (False, 0)):
        with monkeypatch.context() as patched:
            patched.setattr(sys.stderr, "isatty", lambda shown=is_terminal: shown)
            await produce(options)
        assert capsys.readouterr().err.count(f"{topic} is new and has no subscription yet") == hints
    await world.admin.topics.create("persistent://public/default/there")
    with monkeypatch.context() as patched:
        patched.setattr(sys.stderr, "isatty", lambda: True)
        await produce(msgspec.structs.replace(options, topic="there"))
    assert "is new" not in capsys.readouterr().err
