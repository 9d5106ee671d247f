"""A producer at awkward moments: callers that give up, lost answers, brokers that lag behind, closing in the middle."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from tests.unit.client.scripted_topic import QUICK, TOPIC, Script, ScriptedTopic, Sender, until

import braid
from braid.client import Client, ClientConfig
from braid.client.connection import Connection
from braid.client.layouts import LayoutSession
from braid.errors import (
    BraidError,
    Closed,
    DeadlineExceeded,
    IncompatibleSchema,
    InvalidArgument,
    NotReady,
    ProducerBusy,
    TopicNotFound,
)
from braid.model.layout import SegmentLayout
from braid.runtime.env import Runtime
from braid.testing.clock import ManualClock
from braid.wire.types import CommandType

# The line before a full window.


async def test_a_caller_that_gives_up_when_its_turn_comes_lets_the_next_one_go(topic: ScriptedTopic) -> None:
    async with braid.connect(topic.url, config=ClientConfig(max_pending_messages=1)) as client:
        producer = await client.producer(TOPIC, batching=False)
        await producer.send(b"0", key="k")
        topic.is_paused = True
        first = producer.send_nowait(b"1", key="k")
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            second = group.create_task(producer.send(b"2", key="k"))
            third = group.create_task(producer.send(b"3", key="k"))
            first.add_done_callback(lambda _done: second.cancel())
            await until(lambda: len(producer._window.line) == 2)
            topic.is_paused = False
            topic.pump()
            await third
        assert second.cancelled()
        assert topic.by_key()["k"] == [b"0", b"1", b"3"]


async def test_callers_pass_a_full_window_in_the_order_they_came(topic: ScriptedTopic) -> None:
    """One that comes just when there is room again does not overtake those who wait, nor does it send them to the end."""
    async with braid.connect(topic.url, config=ClientConfig(max_pending_messages=2)) as client:
        producer = await client.producer(TOPIC, batching=False)
        await producer.send(b"0", key="k")
        topic.is_paused = True
        first = producer.send_nowait(b"1", key="k")
        async with asyncio.TaskGroup() as group:
            for number in range(2, 6):
                group.create_task(producer.send(b"%d" % number, key="k"))
            await until(lambda: len(producer._window.line) == 3)
            first.add_done_callback(lambda _done: group.create_task(producer.send(b"6", key="k")))
            topic.is_paused = False
            topic.pump()
        assert topic.by_key()["k"] == [b"%d" % number for number in range(7)]


async def test_a_cancelled_send_is_stored_all_the_same(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC)
    topic.is_paused = True
    sending = asyncio.gather(producer.send(b"1", key="k"))
    await until(lambda: bool(topic.sent))
    sending.cancel()
    topic.split(0)
    topic.is_paused = False
    topic.show()
    await producer.send(b"2", key="k")
    assert topic.by_key()["k"] == [b"1", b"2"]
    assert producer._window.messages == producer._window.size == 0


# Input.


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"key": b"bytes"},
        {"key": "\ud800"},
        {"key": 5},
        {"properties": {"a": b"b"}},
        {"properties": {"a": 1}},
        {"properties": [("a", "b")]},
        {"properties": "a=b"},
        {"properties": {"a": "\ud800"}},
        {"properties": {1: "b"}},
        {"sequence_id": 1 << 63},
        {"sequence_id": -1},
        {"sequence_id": "1"},
        {"event_time": -1},
        {"event_time": 1 << 64},
        {"event_time": "now"},
    ],
)
async def test_what_cannot_be_written_is_refused_at_once(
    client: Client, topic: ScriptedTopic, fields: dict[str, Any], batching: bool
) -> None:
    producer = await client.producer(TOPIC, batching=batching)
    await producer.send(b"0")
    with pytest.raises(InvalidArgument):
        producer.send_nowait(b"x", **fields)
    with pytest.raises(InvalidArgument):
        await producer.send(b"x", **fields)
    assert producer._window.messages == 0
    await producer.send(b"1", key="ü", properties={"ä": "ö"}, event_time=1, sequence_id=5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"compression": "brotli"}, '"zstd"'),
        ({"compression": None}, '"none"'),
        ({"compression": []}, '"none"'),
        ({"schema": int}, "dataclass"),
        ({"schema": {"type": "string"}}, "dataclass"),
        ({"name": ""}, "name="),
        ({"name": 5}, "name="),
        ({"topic": 5}, "topic="),
        ({"topic": ""}, "topic="),
    ],
)
async def test_a_producer_that_cannot_be_made_is_refused_by_the_call(client: Client, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        client.producer(**{"topic": TOPIC, **fields})


# Layouts.


async def test_a_question_that_is_not_answered_yet_is_not_given_up(client: Client, topic: ScriptedTopic) -> None:
    """A broker that takes its time, such as one that waits for a new leader, must not be asked from the start every second."""
    session = LayoutSession(client, TOPIC)
    await session.open()
    topic.is_silent = True
    session.refresh()
    await until(lambda: topic.seen[CommandType.SCALABLE_TOPIC_LOOKUP] == 2)
    session.refresh()
    topic.split(0)
    topic.show()
    async with asyncio.timeout(2):
        assert (await session.wait_newer(0)).epoch == 1
    await session.close()


async def test_a_session_that_is_being_opened_can_be_stopped(client: Client, topic: ScriptedTopic) -> None:
    session = LayoutSession(client, TOPIC)
    topic.is_silent = True
    opening = asyncio.gather(session.open(), return_exceptions=True)
    await until(lambda: topic.seen[CommandType.SCALABLE_TOPIC_LOOKUP] == 1)
    await session.close()
    assert isinstance((await opening)[0], Closed)


async def test_a_segment_that_is_gone_makes_the_producer_ask_for_the_layout(client: Client, topic: ScriptedTopic) -> None:
    """The parent is sealed and pruned while the client was away, and nobody tells it."""
    producer = await client.producer(TOPIC, name="p")
    await producer.send(b"0", key="k")
    topic.split(0)
    topic.attach_errors[0] = TopicNotFound("There is no such segment.")
    topic.segments[0].is_sealed = False
    topic.shown = topic.layout
    async with asyncio.timeout(5):
        assert (await producer.send(b"1", key="a")).segment_id == 1


async def test_a_broker_that_lags_behind_does_not_turn_lanes_back(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    past = topic.layout
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    topic.split(0)
    topic.show()
    sender.send(10)
    await producer.flush()
    topic.shown = past
    topic.crash()
    await until(lambda: topic.seen[CommandType.SCALABLE_TOPIC_LOOKUP] == 2)
    await asyncio.sleep(0.02)
    sender.send(10)
    await sender.all_stored()
    assert topic.by_key() == sender.wanted
    assert [topic.segments[each].names.count(f"p-seg-{each}") for each in (1, 2)] == [2, 2]


async def test_a_split_that_is_told_soon_costs_two_producers(topic: ScriptedTopic) -> None:
    """Between the seal and the new layout the sealed segment is not asked for a place."""
    async with braid.connect(topic.url, config=ClientConfig(backoff_initial=0.5)) as client:
        producer = await client.producer(TOPIC, name="p")
        sender = Sender(producer)
        sender.send(10)
        await producer.flush()
        topic.split(0)
        await until(lambda: not producer.is_connected)
        sender.send(10)
        await asyncio.sleep(0.02)
        topic.show()
        await sender.all_stored()
        assert topic.seen[CommandType.PRODUCER] == 3


# Names.


async def test_a_name_taken_on_a_child_does_not_let_newer_messages_overtake(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    await producer.send(b"0", key="a")
    topic.is_paused = True
    old = producer.send_nowait(b"1", key="a")
    await until(lambda: len(topic.sent) == 1)
    topic.attach_errors["p-seg-0"] = NotReady("Its owner is moving.")
    topic.attach_errors["p-seg-1"] = ProducerBusy("p-seg-1 is connected.")
    topic.split(0)
    topic.show()
    await until(lambda: topic.seen[CommandType.PRODUCER] >= 4)
    topic.is_paused = False
    topic.attach_errors.pop("p-seg-1")
    with pytest.raises(ProducerBusy):
        while True:  # the lane that was refused takes one message with it, if it is there in time
            new = producer.send_nowait(b"2", key="a")
            await until(lambda: new.done() or topic.segments[1].names != [])  # noqa: B023
            if not new.done():
                raise ProducerBusy("It was refused before.")
            new.result()
    last = producer.send_nowait(b"3", key="a")
    await until(lambda: bool(topic.segments[1].names))
    await asyncio.sleep(0.02)
    assert not old.done() and not last.done()
    topic.attach_errors.clear()
    await last
    await old
    stored = topic.by_key()["a"]
    assert stored == sorted(stored) and stored[-1] == b"3" and b"1" in stored


async def test_an_answer_that_was_lost_does_not_make_our_own_name_taken(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p")
    topic.ignores_producers = True
    future = producer.send_nowait(b"x", key="k")
    await until(lambda: topic.seen[CommandType.PRODUCER] == 1)
    topic.ignores_producers = False
    topic.attach_errors[0] = ProducerBusy("p-seg-0 is connected.")
    topic.crash()
    await until(lambda: topic.seen[CommandType.PRODUCER] >= 3)
    topic.attach_errors.clear()
    assert (await future).segment_id == 0


@pytest.mark.parametrize("name", ["persistent://public/default/t", TOPIC])
async def test_who_gives_up_while_attaching_leaves_no_producer_behind(topic: ScriptedTopic, name: str) -> None:
    topic.is_enabled = name == TOPIC
    async with braid.connect(topic.url, config=QUICK) as client:
        topic.ignores_producers = True
        producer = await client.producer(name, name="p") if name == TOPIC else None
        work = producer.send(b"x") if producer is not None else _awaited(client.producer(name, name="p"))
        attempt = asyncio.gather(work, return_exceptions=True)
        await until(lambda: topic.seen[CommandType.PRODUCER] == 1)
        if producer is None:
            attempt.cancel()
        else:
            closing = asyncio.gather(producer.close())
            await asyncio.sleep(0)
            closing.cancel()
        await until(lambda: not topic.connections[0].producers)
        await asyncio.wait((attempt,))


async def _awaited(opening: Any) -> Any:
    return await opening


# Time.


async def test_messages_that_were_moved_keep_their_time(topic: ScriptedTopic) -> None:
    clock = ManualClock()
    async with braid.connect(topic.url, runtime=Runtime(clock=clock)) as client:
        producer = await client.producer(TOPIC, name="p", deduplication=True)
        await producer.send(b"0", key="a")
        topic.is_paused = True
        old = producer.send_nowait(b"1", key="a")
        await until(lambda: len(topic.sent) == 1)
        await clock.advance(30)
        topic.attach_errors[1] = NotReady("Its owner is moving.")
        topic.split(0)
        topic.show()
        await until(lambda: bool(topic.segments[2].names) or topic.seen[CommandType.PRODUCER] >= 3)
        new = producer.send_nowait(b"2", key="a")
        topic.attach_errors.clear()
        topic.attach_errors["p-seg-1"] = NotReady("Its owner is moving.")
        await clock.advance(29)
        assert not old.done()
        await clock.advance(2)
        for future in (old, new):
            assert isinstance(future.exception(), DeadlineExceeded)
        topic.is_paused = False


async def test_a_child_that_refuses_for_good_says_why(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    await producer.send(b"0", key="a")
    topic.is_paused = True
    old = producer.send_nowait(b"1", key="a")
    await until(lambda: len(topic.sent) == 1)
    topic.attach_errors["p-seg-0"] = NotReady("Its owner is moving.")
    topic.attach_errors["p-seg-1"] = IncompatibleSchema("Not for you.")
    topic.split(0)
    topic.show()
    await until(lambda: 1 in producer._lanes.lanes and producer._lanes.lanes[1].failure is not None)
    topic.attach_errors.pop("p-seg-0")
    with pytest.raises(IncompatibleSchema, match="Not for you"):
        await old


# Closing.


async def test_closing_waits_only_so_long(topic: ScriptedTopic) -> None:
    clock = ManualClock()
    async with braid.connect(topic.url, runtime=Runtime(clock=clock)) as client:
        producer = await client.producer(TOPIC, name="p")
        await producer.send(b"0")
        topic.is_paused = True
        waiting = [producer.send_nowait(b"1")]
        await until(lambda: bool(topic.sent))
        topic.attach_errors[0] = NotReady("Its owner is gone.")
        topic.crash()
        closing = asyncio.gather(producer.close())
        await clock.advance(9)
        assert not closing.done()
        with pytest.raises(Closed, match="being closed"):
            producer.send_nowait(b"2")
        await clock.advance(1.5)
        await closing
        with pytest.raises(Closed):
            waiting[0].result()
        with pytest.raises(Closed):
            await producer.send(b"3")


async def test_closing_the_client_closes_everything_at_the_same_time(topic: ScriptedTopic) -> None:
    clock = ManualClock()
    async with braid.connect(topic.url, runtime=Runtime(clock=clock)) as client:
        topic.attach_errors[0] = NotReady("Its owner is gone.")
        producers = [await client.producer(TOPIC) for _number in range(5)]
        waiting = [producer.send_nowait(b"1") for producer in producers]
        closing = asyncio.gather(client.close())
        await clock.advance(9)
        assert not closing.done()
        await clock.advance(1.5)
        await closing
        assert all(isinstance(each.exception(), Closed) for each in waiting)


async def test_who_gives_up_closing_the_client_leaves_nothing_behind(topic: ScriptedTopic) -> None:
    before = len(asyncio.all_tasks())
    client = braid.connect(topic.url, config=QUICK)
    producer = await client.producer(TOPIC, deduplication=True)
    await producer.send(b"0", key="k")
    topic.is_paused = True
    sent = producer.send_nowait(b"1", key="k")
    await until(lambda: bool(topic.sent))
    topic.split(0)
    closing = asyncio.gather(client.close())
    await asyncio.sleep(0.02)
    assert not closing.done()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await until(lambda: not topic.connections)
    await until(lambda: len(asyncio.all_tasks()) <= before)
    with pytest.raises(Closed):
        sent.result()
    await client.close()


async def test_a_session_ends_with_its_client(topic: ScriptedTopic) -> None:
    client = braid.connect(topic.url, config=QUICK)
    session = LayoutSession(client, TOPIC)
    await session.open()
    heard: list[BraidError] = []
    session.listen(lambda _layout: None, heard.append)
    await client.close()
    await until(lambda: bool(heard))
    assert isinstance(session.failure, Closed)
    await session.close()


# What stays.


async def test_nothing_stays_behind_a_split(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    sender = Sender(producer)
    for _round in range(30):
        sender.send(20)
        topic.is_paused = True
        sender.send(20)
        active = sorted(topic.layout.active_in_order, key=lambda each: each.hash_range)
        if len(active) > 1:
            topic.merge(active[0].segment_id, active[1].segment_id)
        else:
            topic.split(active[0].segment_id)
        topic.is_paused = False
        topic.pump()
        topic.show()
        await sender.all_stored()
    assert topic.by_key() == sender.wanted
    lanes = producer._lanes
    await until(lambda: not lanes._leaving and len(lanes._tasks) == 0)
    assert len(lanes.lanes) <= 2 and not lanes._frozen and not lanes._inquiries
    assert lanes.window.messages == lanes.window.size == 0
    assert all(not lane.blockers for lane in lanes.lanes.values())
    await until(lambda: sum(len(each.producers) for each in topic.connections) <= 2)
    assert len((await client.service_connection()).producers) <= 2


async def test_long_keys_are_not_remembered(client: Client, topic: ScriptedTopic) -> None:
    topic.layout = topic.shown = SegmentLayout.initial(2, 0)
    producer = await client.producer(TOPIC)
    await producer.send(b"x", key="k" * 10_000)
    await producer.send(b"x", key="k")
    assert list(producer._lanes._by_key) == ["k"]


async def test_brokers_learnt_are_tried_when_all_connections_are_gone(topic: ScriptedTopic) -> None:
    bootstrap = await Runtime().network.listen("localhost", 0, lambda: Script(topic))
    async with braid.connect(f"pulsar://localhost:{bootstrap.port}", config=QUICK) as client:
        producer = await client.producer(TOPIC, name="p")
        await producer.send(b"0", key="a")
        bootstrap.close()
        topic.crash()
        await producer.send(b"1", key="a")
        assert len(client.pool.connections) == 2


async def test_a_handshake_nobody_waits_for_is_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever was connecting gave up just when the broker died."""
    connection = Connection(Runtime(), QUICK, "localhost:1")
    connection.connection_lost(None)
    del connection
    gc.collect()
    assert "never retrieved" not in caplog.text
