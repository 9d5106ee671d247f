"""Commands 1010 to 1017 over the wire: odd input, moves of owners, trims, transactions, bounds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from braid.errors import DataLost, IncarnationMismatch, InvalidTopicName, from_code
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import physical_name
from braid.scalable.records import ScalableTopicMetadata, topic_path
from braid.testing.raw_client import RawClient
from braid.wire import bulk, messages
from braid.wire.client import Bulk
from braid.wire.commands import encode
from braid.wire.types import CommandType

TOPIC = "persistent://public/default/t"
SMALL = ManagedLedgerConfig(max_entries_per_ledger=5, min_ledger_age_ms=0)
KEEP = {"retention_minutes": -1, "retention_mb": -1}


async def ask(client: RawClient, frame: Callable[[int], bytes]) -> Any:
    """The answer to a request; its error is raised."""
    number = client.next_request()
    client.send(frame(number))
    body = await client.answer(number)
    if body.HasField("error"):
        raise from_code(body.error, body.message)
    return body


async def describe(client: RawClient, *topics: str) -> Any:
    return (await ask(client, lambda number: bulk.describe_segments(number, topics))).segments


async def fetch(
    client: RawClient, start: int, stop: int, size: int = 1 << 20, incarnation: str = "", topic: str = TOPIC
) -> Bulk:
    number = client.next_request()
    client.send(bulk.fetch_entries(number, topic, incarnation, start, stop, size))
    event = await client.take(
        lambda each: not isinstance(each, messages.CommandMessage) and getattr(each.body, "request_id", None) == number  # type: ignore[union-attr]
    )
    if event.body.HasField("error"):
        raise from_code(event.body.error, event.body.message)
    assert isinstance(event, Bulk)
    return event


async def filled(broker: Any, entries: int, *, size: int = 10) -> RawClient:
    client: RawClient = await broker.client(is_braid=True)
    await client.producer(TOPIC)
    for number in range(entries):
        await client.store(b"%d" % number + b"x" * size, number)
    return client


@pytest.mark.inv("INV5")
async def test_the_numbers_of_a_topic_and_of_what_there_is_not(world: Any) -> None:
    broker = await world.broker()
    client = await filled(broker, 7)
    known, missing, odd, scalable = await describe(
        client, TOPIC, "persistent://public/default/none", "not://a/topic", "topic://public/default/x"
    )
    assert (known.low_index, known.stable_index, known.end_index, known.is_sealed) == (0, 7, 7, False)
    assert known.incarnation == broker.topic(TOPIC).log.incarnation
    assert known.stored_bytes > 70
    assert missing.error == 11
    assert odd.HasField("error")
    assert "segments are read" in scalable.message
    with pytest.raises(InvalidTopicName):
        await ask(client, lambda number: bulk.pruned_segments(number, "not://a/topic"))
    nothing = await ask(client, lambda number: bulk.pruned_segments(number, TOPIC))
    assert (nothing.HasField("incarnation"), list(nothing.pruned), list(nothing.segments)) == (False, [], [])
    await broker.topic(TOPIC).terminate()
    assert (await describe(client, TOPIC))[0].is_sealed
    with pytest.raises(IncarnationMismatch, match="begin anew"):
        await fetch(client, 0, 1, incarnation="earlier")
    assert (await fetch(client, 0, 7, incarnation=known.incarnation)).body.covered_to == 7


@pytest.mark.inv("INV17")
async def test_too_many_topics_at_once_are_refused(world: Any) -> None:
    broker = await world.broker(max_described_topics=3)
    client = await broker.client(is_braid=True)
    assert len(await describe(client, *["persistent://public/default/a"] * 3)) == 3
    with pytest.raises(Exception, match="at most 3"):
        await describe(client, *["persistent://public/default/a"] * 4)
    assert len(await describe(client)) == 0


async def test_other_clients_never_see_them(world: Any) -> None:
    broker = await world.broker()
    client = await broker.client()
    client.send(bulk.describe_segments(1, [TOPIC]))
    await client.expect_close()


async def test_lost_data_is_told_with_what_is_left(world: Any) -> None:
    broker = await world.broker(SMALL)
    client = await filled(broker, 23)
    await client.subscribe(TOPIC, initial=0)  # type: ignore[arg-type]
    topic = broker.topic(TOPIC)
    client.ack(topic.log.map.at(topic.log.map.start + 12), cumulative=True)
    await client.settle()
    await topic.log.trim()
    (known,) = await describe(client, TOPIC)
    assert known.low_index == topic.log.map.start > 0
    for start, stop in ((0, 23), (known.low_index - 1, known.low_index), (known.low_index - 1, 23)):
        with pytest.raises(DataLost, match="not stored any more") as lost:
            await fetch(client, start, stop)
        assert lost.value.low == known.low_index
    with pytest.raises(DataLost):
        await ask(client, lambda number: bulk.offset_for(number, TOPIC, "", 0, 1, None))
    assert (await fetch(client, known.low_index, 23)).body.covered_to == 23


async def test_a_gap_in_the_numbers_is_lost_data(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that vanished leaves a hole that must not be read over."""
    broker = await world.broker(SMALL, **KEEP)
    client = await filled(broker, 13)
    topic = broker.topic(TOPIC)
    log = topic.log
    gone = log.infos[1]
    del log.infos[1]
    at = log.map._ids.index(gone.ledger_id)
    del log.map._ids[at], log.map._bases[at]
    log.map._bases[at:] = [base - 5 for base in log.map._bases[at:]]
    log.map.end -= 5
    first = await fetch(client, 0, 5)
    assert first.body.covered_to == 5
    for start in (5, 6, 9):
        with pytest.raises(DataLost) as lost:
            await fetch(client, start, 13)
        assert lost.value.low == 10
    with pytest.raises(DataLost) as lost:
        await fetch(client, 2, 13)
    assert (await fetch(client, 10, 13)).body.covered_to == 13


@pytest.mark.inv("INV13")
@pytest.mark.parametrize("is_cached", [False, True], ids=["stored", "cached"])
async def test_only_what_is_decided_is_read_also_after_the_owner_changed(world: Any, until: Any, is_cached: bool) -> None:
    broker = await world.broker(SMALL, **KEEP)
    client = await broker.client(is_braid=True)
    await client.producer(TOPIC)
    if is_cached:
        await broker.topic(TOPIC).log.open_cursor("reads", initial="earliest")
    for number in range(3):
        await client.store(b"%d" % number, number)
    txns = [await client.begin() for _ in range(2)]
    for number in range(3, 15):
        await client.store(b"txn", number, txn=txns[number % 2])
    await client.store(b"plain", 15)
    (known,) = await describe(client, TOPIC)
    assert (known.stable_index, known.end_index) == (3, 16)
    with pytest.raises(Exception, match="up to message 3"):
        await fetch(client, 0, 4)
    await client.end(txns[0], commit=False)
    await client.end(txns[1], commit=True)
    topic = broker.topic(TOPIC)
    await until(lambda: topic.transactions.max_read_position > topic.log.last_position)
    before = await fetch(client, 0, 16)
    assert list(before.body.last_index) == [0, 1, 2, *range(3, 15, 2), 15]
    assert before.body.covered_to == 16
    third = await client.begin()
    await client.store(b"open", 16, txn=third)
    await broker.kill()
    broker = await world.broker(SMALL, **KEEP)
    client = await broker.client(is_braid=True)
    (known,) = await describe(client, TOPIC)
    assert (known.stable_index, known.end_index) == (16, 17)
    after = await fetch(client, 0, 16)
    assert (after.data, list(after.body.last_index)) == (before.data, list(before.body.last_index))
    with pytest.raises(Exception, match="up to message 16"):
        await fetch(client, 16, 17)
    await client.end(third, commit=True)
    topic = broker.topic(TOPIC)
    await until(lambda: topic.transactions.max_read_position > topic.log.last_position)
    assert (await fetch(client, 16, 17)).body.covered_to == 17


async def test_long_runs_of_hidden_entries_are_covered_in_bounded_steps(world: Any, until: Any) -> None:
    broker = await world.broker()
    client = await broker.client(is_braid=True)
    await client.producer(TOPIC)
    txn = await client.begin()
    for number in range(60):
        await client.store(b"x" * 1000, number, txn=txn)
    await client.end(txn, commit=False)
    topic = broker.topic(TOPIC)
    await until(lambda: topic.transactions.max_read_position > topic.log.last_position)
    at, steps = 0, 0
    while at < 60:
        found = await fetch(client, at, 60, 1000)
        assert found.data is not None
        assert (len(found.data), found.body.covered_to > at) == (0, True)
        at = found.body.covered_to
        steps += 1
    assert 2 < steps < 30


async def test_another_broker_is_not_asked_in_vain(world: Any) -> None:
    client = await filled(await world.broker(balance=False), 3)
    other = await (await world.broker(balance=False)).client(is_braid=True)
    assert (await fetch(client, 0, 3)).body.covered_to == 3
    with pytest.raises(Exception, match="look it up again"):
        await fetch(other, 0, 3)
    (refused,) = await describe(other, TOPIC)
    assert refused.error == 6


@pytest.mark.inv("INV17")
async def test_bulk_reads_of_a_connection_wait_for_their_turn(world: Any, until: Any) -> None:
    broker = await world.broker(max_fetches_per_connection=2, write_high_water_bytes=4096, max_message_size=1 << 20)
    client = await filled(broker, 6, size=900_000)
    client.stop_reading()
    for _ in range(12):
        client.send(bulk.fetch_entries(client.next_request(), TOPIC, "", 0, 6, 1 << 22))
    (connection,) = broker.server.connections
    budget = broker.service.read_budget
    await until(lambda: connection.fetching.locked() and not connection.link.is_writable)
    other = await broker.client(is_braid=True)
    assert (await fetch(other, 0, 1)).body.covered_to == 1, "others are served meanwhile"
    assert 0 < budget.used <= 2 << 20
    assert connection._unsent() <= 3 << 20
    client.start_reading()
    for _ in range(12):
        event = await client.take(lambda each: isinstance(each, Bulk))
        assert event.data is not None
    await until(lambda: budget.used == 0)


@pytest.mark.inv("INV17")
async def test_the_brokers_memory_for_bulk_reads_is_bounded(world: Any, until: Any) -> None:
    broker = await world.broker(max_fetch_bytes=1 << 20, write_high_water_bytes=4096)
    first = await filled(broker, 8, size=900_000)
    first.stop_reading()
    for _ in range(40):
        first.send(bulk.fetch_entries(first.next_request(), TOPIC, "", 0, 8, 1 << 20))
    budget = broker.service.read_budget
    stuck = next(iter(broker.server.connections))
    await until(lambda: not stuck.link.is_writable)
    second = await broker.client(is_braid=True)
    waiting = asyncio.create_task(fetch(second, 0, 1, 1 << 20))
    await second.settle()
    assert (budget.used, waiting.done()) == (1 << 20, False)
    first.close()
    assert (await waiting).body.covered_to == 1
    await until(lambda: budget.used == 0 and not budget._line)


async def test_answers_have_a_limit_of_their_own(world: Any) -> None:
    broker = await world.broker(fetch_max_bytes=5000)
    client = await filled(broker, 20, size=1000)
    found = await fetch(client, 0, 20, 1 << 30)
    assert 3 <= len(found.body.size) <= 4
    assert len(found.data or b"") <= 5000
    found = await fetch(client, 0, 20, 0)
    assert len(found.body.size) == 1, "at least one"


async def test_odd_numbers_are_refused_or_answered(world: Any) -> None:
    """Whatever a client sends, it gets one answer, and the connection lives on."""
    broker = await world.broker(SMALL, **KEEP)
    client = await filled(broker, 12)
    await broker.service.create_scalable_topic(TopicName.parse("topic://public/default/s"), 1)
    chance = random.Random(3)
    numbers = [0, 1, 5, 11, 12, 13, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1, (1 << 63) - 1]
    topics = [
        TOPIC,
        TOPIC,
        "",
        "x",
        "topic://public/default/s",
        "segment://public/default/s/0000-ffff-0",
        "segment://public/default/s/0000-7fff-9",
        "persistent://public/default/t-partition-0",
        "persistent://no/such/topic",
        "non-persistent://public/default/t",
        "\x00",
        "persistent://public/default/" + "y" * 5000,
    ]
    names = ["sub", "", "__", "a/b", "\n", "z" * 3000]
    for _ in range(400):
        number = client.next_request()
        topic = chance.choice(topics)
        incarnation = chance.choice(["", "", "other"])
        kind = chance.randrange(4)
        body: Any
        if kind == 0:
            body = messages.CommandDescribeSegments(request_id=number, topics=chance.choices(topics, k=chance.randrange(4)))
            client.send(encode(CommandType.DESCRIBE_SEGMENTS, body))
        elif kind == 1:
            body = messages.CommandFindIndex(request_id=number, topic=topic, incarnation=incarnation)
            for field in ("timestamp", "from_index", "max_messages", "max_bytes"):
                if chance.random() < 0.5:
                    setattr(body, field, chance.choice(numbers))
            client.send(encode(CommandType.FIND_INDEX, body))
        elif kind == 2:
            body = messages.CommandFetchEntries(
                request_id=number, topic=topic, from_index=chance.choice(numbers), to_index=chance.choice(numbers)
            )
            if chance.random() < 0.5:
                body.max_bytes = chance.choice([0, 1, 100, (1 << 32) - 1])
            client.send(encode(CommandType.FETCH_ENTRIES, body))
        else:
            body = messages.CommandMoveCursor(
                request_id=number, topic=topic, subscription=chance.choice(names), index=chance.choice(numbers)
            )
            client.send(encode(CommandType.MOVE_CURSOR, body))
        answer = await client.answer(number)
        if answer.HasField("error"):
            assert answer.message.endswith((".", ")")) or "Illegal" in answer.message, answer.message
            assert "its log says why" not in answer.message, f"{body} failed in the broker"
    (known,) = await describe(client, TOPIC)
    assert known.end_index == 12


async def test_a_cursor_is_moved_only_where_nobody_consumes(world: Any) -> None:
    broker = await world.broker()
    client = await filled(broker, 6)
    await ask(client, lambda number: bulk.move_cursor(number, TOPIC, "", "spark", 4))
    assert broker.topic(TOPIC).subscriptions["spark"].cursor.backlog() == 2
    await client.subscribe(TOPIC, "spark")
    with pytest.raises(Exception, match="has consumers"):
        await ask(client, lambda number: bulk.move_cursor(number, TOPIC, "", "spark", 5))
    await client.close_consumer()
    await broker.policy("autoSubscriptionCreationOverride", {"allowAutoSubscriptionCreation": False})
    with pytest.raises(Exception, match="may not be created"):
        await ask(client, lambda number: bulk.move_cursor(number, TOPIC, "", "new", 5))
    await ask(client, lambda number: bulk.move_cursor(number, TOPIC, "", "spark", 5))
    await broker.kill()
    broker = await world.broker()
    client = await broker.client(is_braid=True)
    await describe(client, TOPIC)
    assert broker.topic(TOPIC).subscriptions["spark"].cursor.backlog() == 1, "durable when it was answered"


async def test_a_batch_is_read_whole_and_a_cursor_stands_between_entries(world: Any) -> None:
    broker = await world.broker()
    client = await broker.client(is_braid=True)
    await client.producer(TOPIC)
    for number in range(4):
        await client.store(b"", number, batch=[b"a", b"b", b"c"])
    found = await fetch(client, 4, 8)
    assert (list(found.body.last_index), found.body.covered_to) == ([5, 8], 8)
    await ask(client, lambda number: bulk.move_cursor(number, TOPIC, "", "spark", 7))
    assert broker.topic(TOPIC).subscriptions["spark"].cursor.backlog() == 2


async def test_a_segment_that_is_used_and_sealed_while_it_is_described_is_not_called_empty(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who plans by it would count the segment as read and never come back."""
    broker = await world.broker()
    client = await broker.client(is_braid=True)
    layout = SegmentLayout.initial(1, 1)
    scalable = TopicName.parse("topic://public/default/orders")
    segment = str(physical_name(scalable, layout.all_segments[0]))

    async def put(layout: SegmentLayout) -> None:
        empty = ScalableTopicMetadata(epoch=0, next_segment_id=0, segments={}, incarnation="life", leader_epoch=7)
        await broker.service.metadata.put(topic_path(scalable), msgspec.json.encode(empty.with_layout(layout)))

    await put(layout)
    (known,) = await describe(client, segment)
    assert (known.end_index, known.is_sealed) == (0, False), "nobody used it so far"
    records, look_up = broker.service.records, broker.service.records.listed

    asked: list[TopicName] = []

    async def late(name: TopicName) -> Any:
        asked.append(name)
        if len(asked) != 2:  # the first time, nobody may make its log
            return await look_up(name)
        other = await broker.client(is_braid=True)
        await other.producer(segment, 1)
        await other.store(b"one", 0, 1)
        await put(layout.split(0, 5))
        await broker.service.local_segments.terminate(name, epoch=7, incarnation="life")
        return await look_up(name)

    monkeypatch.setattr(records, "listed", late)
    (known,) = await describe(client, segment)
    assert "ask again" in known.message
    (known,) = await describe(client, segment)
    assert (known.stable_index, known.end_index, known.is_sealed) == (1, 1, True)
