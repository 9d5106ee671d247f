"""A producer's lanes across splits and merges, against a broker that is a script."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime

import pytest
from tests.unit.client.scripted_topic import QUICK, TOPIC, Script, ScriptedTopic, Sender, until

import braid
from braid.client import Client, ClientConfig
from braid.client.layouts import LayoutSession
from braid.errors import (
    BraidError,
    Closed,
    DeadlineExceeded,
    InvalidArgument,
    NotAllowed,
    NotReady,
    Overloaded,
    ProducerBusy,
    TooLarge,
    TopicNotFound,
)
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.runtime.env import Runtime
from braid.scalable.config import ScalableConfig
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock
from braid.web.config import StandaloneConfig
from braid.wire.types import CommandType

# Order.


@pytest.mark.req("R468-47")
@pytest.mark.req("R468-51")
@pytest.mark.parametrize("deduplication", [False, True])
@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("ends_by_error", [False, True])
@pytest.mark.parametrize("shown_first", [False, True])
async def test_what_is_in_flight_at_a_split_goes_to_the_children_in_order(
    client: Client, topic: ScriptedTopic, deduplication: bool, batching: bool, ends_by_error: bool, shown_first: bool
) -> None:
    topic.ends_by_error = ends_by_error
    producer = await client.producer(TOPIC, name="p", batching=batching, deduplication=deduplication)
    sender = Sender(producer)
    sender.send(100)
    await producer.flush()
    topic.is_paused = True
    for _each in range(5):
        sender.send(100)
        await asyncio.sleep(0)
    await until(lambda: len(topic.sent) == (5 if batching else 500))
    topic.store(len(topic.sent) // 2)
    topic.split(0)
    if shown_first:
        topic.show()
    topic.is_paused = False
    topic.pump()
    sender.send(100)
    await until(lambda: topic.seen[CommandType.PRODUCER] >= 1)
    sender.send(100)
    topic.show()
    sender.send(100)
    await sender.all_stored()
    assert topic.by_key() == sender.wanted
    assert topic.count() == 900
    assert topic.segments[1].messages and topic.segments[2].messages


@pytest.mark.req("R468-56")
@pytest.mark.parametrize("deduplication", [False, True])
async def test_what_is_in_flight_at_a_merge_goes_to_the_child_in_order(
    client: Client, topic: ScriptedTopic, deduplication: bool
) -> None:
    topic.layout = topic.shown = SegmentLayout.initial(2, 0)
    producer = await client.producer(TOPIC, name="p", deduplication=deduplication)
    sender = Sender(producer)
    sender.send(50)
    await producer.flush()
    topic.is_paused = True
    for _each in range(10):
        sender.send(50)
        await asyncio.sleep(0)
    await until(lambda: len(topic.sent) == 20)
    topic.store(7)
    topic.merge(0, 1)
    sender.send(50)
    topic.show()
    sender.send(50)
    topic.is_paused = False
    topic.pump()
    await sender.all_stored()
    assert topic.by_key() == sender.wanted
    assert topic.count() == 650


@pytest.mark.parametrize("deduplication", [False, True])
async def test_children_that_are_sealed_again_at_once(client: Client, topic: ScriptedTopic, deduplication: bool) -> None:
    """The client sees every layout, but messages have no time to be stored in between."""
    producer = await client.producer(TOPIC, name="p", deduplication=deduplication)
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    topic.is_paused = True
    sender.send(100)
    await until(lambda: bool(topic.sent))
    for change in ((0,), (1,), (4, 2), (3,)):
        if len(change) == 1:
            topic.split(*change)
        else:
            topic.merge(*change)
        topic.show()
        sender.send(100)
        for _turn in range(random.Random(1).randrange(30)):
            await asyncio.sleep(0)
    topic.is_paused = False
    topic.pump()
    await sender.all_stored()
    assert topic.by_key() == sender.wanted


async def test_a_layout_that_skips_generations(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p")
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    topic.is_paused = True
    sender.send(100)
    await until(lambda: bool(topic.sent))
    topic.split(0)
    topic.split(1)
    topic.split(2)
    topic.show()
    topic.is_paused = False
    sender.send(100)
    await sender.all_stored()
    assert topic.by_key() == sender.wanted
    assert not topic.segments[1].names and not topic.segments[2].names


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("deduplication", [False, True])
async def test_order_under_random_changes_and_crashes(
    client: Client, topic: ScriptedTopic, seed: int, deduplication: bool
) -> None:
    """500 messages in flight, splits, merges, layouts shown late, owners that die after storing and before answering."""
    rng = random.Random(seed)
    producer = await client.producer(TOPIC, name="p", batching=rng.random() < 0.7, deduplication=deduplication)
    sender = Sender(producer, keys=24)
    may_crash = deduplication or rng.random() < 0.5
    for _round in range(40):
        topic.is_paused = rng.random() < 0.6
        sender.send(rng.randrange(60))
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
            sender.send(rng.randrange(20))
        if not topic.answers:
            topic.crash()
            topic.answers = True
        if rng.random() < 0.7:
            topic.show()
        if len([each for each in sender.futures if not each.done()]) > 500:
            topic.is_paused = False
            topic.show()
            topic.pump()
            await sender.all_stored()
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


@pytest.mark.parametrize(("deduplication", "deduplicates_all"), [(False, False), (True, False), (False, True)])
async def test_an_owner_that_dies_after_storing(
    client: Client, topic: ScriptedTopic, deduplication: bool, deduplicates_all: bool
) -> None:
    """With deduplication, asked for or set for all, nothing is stored twice, though the client was told nothing and the segment
    is split."""
    topic.deduplicates_all = deduplicates_all
    producer = await client.producer(TOPIC, name="p", deduplication=deduplication)
    sender = Sender(producer)
    sender.send(100)
    await producer.flush()
    topic.answers = False
    for _each in range(5):
        sender.send(100)
        await asyncio.sleep(0)
    await until(lambda: topic.count() == 600)
    topic.crash()
    topic.split(0)
    topic.answers = True
    topic.show()
    sender.send(100)
    await sender.all_stored()
    if deduplication or deduplicates_all:
        assert topic.by_key() == sender.wanted
    else:
        assert topic.count() == 1200
    assert topic.segments[1].names == ["p-seg-1", "p-seg-0"]


async def test_what_is_re_routed_does_not_pass_lanes_that_still_wait(client: Client, topic: ScriptedTopic) -> None:
    """0 and 1 are merged into 2, which is split into 3 and 4, then 4 again, and nothing tells meanwhile what 0 stored: the lane
    of 2 waits for it, with messages of keys whose older ones were in the lane of 1."""
    topic.layout = topic.shown = SegmentLayout.initial(2, 0)
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    sender = Sender(producer)
    sender.send(32)
    await producer.flush()
    topic.is_paused = True
    sender.send(32)
    await until(lambda: len(topic.sent) == 2)
    topic.attach_errors |= {"p-seg-0": NotReady("Not yet."), "p-seg-1": NotReady("Not yet.")}
    topic.merge(0, 1)
    topic.crash()
    topic.is_paused = False
    topic.show()
    await until(lambda: topic.segments[2].names == ["p-seg-2"])
    sender.send(32)
    topic.split(2)
    topic.show()
    await until(lambda: topic.segments[3].names == ["p-seg-3"] and topic.segments[4].names == ["p-seg-4"])
    sender.send(32)
    del topic.attach_errors["p-seg-1"]
    await until(lambda: topic.segments[4].names == ["p-seg-4", "p-seg-1"])
    await until(lambda: "p-seg-1" not in topic.attached())
    topic.split(4)
    topic.show()
    await until(lambda: topic.segments[5].names == ["p-seg-5"] and topic.segments[6].names == ["p-seg-6"])
    sender.send(32)
    assert topic.count() == 32
    del topic.attach_errors["p-seg-0"]
    await sender.all_stored()
    assert topic.by_key() == sender.wanted


async def test_what_was_sent_again_and_came_too_late_is_asked_for_too(client: Client, topic: ScriptedTopic) -> None:
    """The owner dies after storing, and the next one seals the segment before the messages come again."""
    topic.deduplicates_all = True
    producer = await client.producer(TOPIC, name="p")
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    topic.answers = False
    sender.send(10)
    await until(lambda: topic.count() == 20)
    topic.is_paused = True
    topic.crash()
    topic.answers = True
    await until(lambda: bool(topic.sent))
    topic.split(0)
    topic.is_paused = False
    topic.show()
    await sender.all_stored()
    assert topic.by_key() == sender.wanted


async def test_a_number_that_the_lane_never_sent_is_not_believed(client: Client, topic: ScriptedTopic) -> None:
    """Deduplication was turned on meanwhile, and somebody had used the name before."""
    producer = await client.producer(TOPIC, name="p")
    await producer.send(b"0", key="k")
    topic.is_paused = True
    future = producer.send_nowait(b"1", key="k")
    await until(lambda: bool(topic.sent))
    topic.segments[0].last["p-seg-0"] = 1000
    topic.deduplicates_all = True
    topic.split(0)
    topic.crash()
    topic.is_paused = False
    topic.show()
    await future
    assert topic.by_key()["k"] == [b"0", b"1"]


async def test_keyless_messages_take_turns_and_survive_a_split(client: Client, topic: ScriptedTopic) -> None:
    topic.layout = topic.shown = SegmentLayout.initial(2, 0)
    producer = await client.producer(TOPIC, name="p")
    futures = [producer.send_nowait(b"%d" % number) for number in range(20)]
    await producer.flush()
    assert {len(topic.segments[each].messages) for each in (0, 1)} == {10}
    topic.is_paused = True
    futures += [producer.send_nowait(b"%d" % number) for number in range(20, 40)]
    await until(lambda: len(topic.sent) == 2)
    topic.split(0)
    topic.is_paused = False
    topic.pump()
    topic.show()
    await asyncio.gather(*futures)
    assert sorted(int(payload) for payload in topic.by_key()[None]) == list(range(40))


# What it costs.


@pytest.mark.parametrize("in_flight", [0, 500])
async def test_a_split_costs_two_producers_however_much_is_in_flight(
    client: Client, topic: ScriptedTopic, in_flight: int
) -> None:
    """Planted bug 9: a new producer per retry on a sealed parent."""
    producer = await client.producer(TOPIC, name="p", batching=False)
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    assert topic.seen[CommandType.PRODUCER] == 1
    topic.is_paused = True
    sender.send(in_flight)
    await until(lambda: len(topic.sent) == in_flight)
    topic.split(0)
    await until(lambda: topic.seen[CommandType.PRODUCER] == 2)  # the one that learns that the segment is sealed
    await asyncio.sleep(0.12)  # long enough for retries, and for two requests for the layout
    assert topic.seen[CommandType.PRODUCER] == 2
    assert topic.seen[CommandType.SCALABLE_TOPIC_LOOKUP] in (2, 3, 4)
    topic.is_paused = False
    topic.show()
    sender.send(100)
    await sender.all_stored()
    assert topic.seen[CommandType.PRODUCER] == 4
    assert [len(topic.segments[each].names) for each in (0, 1, 2)] == [1, 1, 1]
    await until(lambda: sum(len(each.producers) for each in topic.connections) == 2)


async def test_lanes_are_opened_when_needed_and_named_after_their_segment(client: Client, topic: ScriptedTopic) -> None:
    topic.layout = topic.shown = SegmentLayout.initial(4, 0)
    producer = await client.producer(TOPIC, name="p")
    assert topic.seen[CommandType.PRODUCER] == 0
    first = await producer.send(b"x", key="a")
    assert first.segment_id == topic.layout.segment_of_key("a").segment_id == 0
    assert topic.seen[CommandType.PRODUCER] == 1
    assert topic.segments[0].names == ["p-seg-0"]
    assert producer.name == "p"


async def test_a_lost_notification_is_asked_for(client: Client, topic: ScriptedTopic) -> None:
    """The layout is never pushed; the lane that is stuck asks for it."""
    producer = await client.producer(TOPIC, name="p")
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    topic.split(0)
    topic.shown = topic.layout
    sender.send(10)
    await sender.all_stored()
    assert topic.by_key() == sender.wanted


async def test_an_owner_that_answers_nothing_is_not_waited_for(topic: ScriptedTopic) -> None:
    clock = ManualClock()
    async with braid.connect(topic.url, config=QUICK, runtime=Runtime(clock=clock)) as client:
        producer = await client.producer(TOPIC, name="p")
        sender = Sender(producer)
        sender.send(10)
        await producer.flush()
        topic.is_paused = topic.ends_by_error = True
        sender.send(10)
        await until(lambda: bool(topic.sent))
        topic.split(0)
        topic.show()
        await until(lambda: len(topic.segments[1].names) == 1 and len(topic.segments[2].names) == 1)
        sender.send(10)
        await clock.advance(1.9)
        assert not sender.futures[-1].done()
        topic.sent.clear()
        topic.is_paused = False
        await clock.advance(0.2)
        await sender.all_stored()
        assert topic.by_key() == sender.wanted


# Flush, limits, time.


async def test_flush_waits_for_the_futures_of_the_callers(client: Client, topic: ScriptedTopic) -> None:
    """Planted bug 22: flush returns early. Here the messages change lanes while it waits."""
    producer = await client.producer(TOPIC, name="p")
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    topic.is_paused = True
    sender.send(500)
    told: list[int] = []
    sender.futures[-1].add_done_callback(lambda _done: told.append(1))
    flushing = asyncio.gather(producer.flush())
    await until(lambda: bool(topic.sent))
    topic.split(0)
    topic.is_paused = False
    topic.pump()
    await asyncio.sleep(0.02)
    assert not flushing.done()
    topic.show()
    await flushing
    assert all(future.done() for future in sender.futures)
    assert told
    assert topic.by_key() == sender.wanted


async def test_flush_does_not_wait_for_what_is_sent_later(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p", batching=False)
    first = producer.send_nowait(b"1")
    await first
    topic.is_paused = True
    second = producer.send_nowait(b"2")
    flushing = asyncio.gather(producer.flush())
    await until(lambda: len(topic.sent) == 1)
    third = producer.send_nowait(b"3")
    await until(lambda: len(topic.sent) == 2)
    topic.store(1)
    await flushing
    assert second.done() and not third.done()


async def test_the_window_counts_over_all_lanes_and_in_bytes(topic: ScriptedTopic) -> None:
    topic.layout = topic.shown = SegmentLayout.initial(4, 0)
    config = ClientConfig(max_pending_messages=6, max_pending_bytes=4096)
    async with braid.connect(topic.url, config=config) as client:
        producer = await client.producer(TOPIC, name="p", batching=False)
        topic.is_paused = True
        for number in range(6):
            producer.send_nowait(b"x", key=f"key-{number}")
        with pytest.raises(Overloaded, match=r"6 unacknowledged.*room"):
            producer.send_nowait(b"x", key="other")
        waiting = [asyncio.gather(producer.send(b"%d" % number, key="k")) for number in range(3)]
        await until(lambda: len(topic.sent) == 6)
        assert not any(each.done() for each in waiting)
        topic.store(1)
        await until(lambda: len(topic.sent) == 6)  # room for one more: the first who waits
        topic.is_paused = False
        topic.pump()
        await asyncio.gather(*waiting)
        assert topic.by_key()["k"] == [b"0", b"1", b"2"]
        topic.is_paused = True
        producer.send_nowait(bytes(5000), key="k")
        with pytest.raises(Overloaded, match="500"):
            producer.send_nowait(b"x", key="k")
        topic.is_paused = False
        topic.pump()
        await producer.room()


async def test_time_counts_from_the_call(topic: ScriptedTopic) -> None:
    clock = ManualClock()
    config = ClientConfig(max_pending_messages=2)
    async with braid.connect(topic.url, config=config, runtime=Runtime(clock=clock)) as client:
        producer = await client.producer(TOPIC, name="p", batching=False)
        await producer.send(b"0")
        topic.is_paused = True
        futures = [producer.send_nowait(b"x"), producer.send_nowait(b"y")]
        await clock.advance(30)
        waiting = asyncio.gather(producer.send(b"late"), return_exceptions=True)
        await clock.advance(29)
        assert not waiting.done() and not futures[0].done()
        await clock.advance(2)
        for future in futures:
            with pytest.raises(DeadlineExceeded, match="60 s"):
                future.result()
        await clock.advance(28)
        assert not waiting.done()
        await clock.advance(2)
        assert isinstance((await waiting)[0], DeadlineExceeded)
        topic.is_paused = False


async def test_a_sealed_segment_without_a_new_layout_fails_after_the_send_timeout(topic: ScriptedTopic) -> None:
    clock = ManualClock()
    async with braid.connect(topic.url, runtime=Runtime(clock=clock)) as client:
        producer = await client.producer(TOPIC, name="p")
        await producer.send(b"0", key="a")
        topic.split(0)
        while topic.seen[CommandType.PRODUCER] < 2:
            await clock.advance(0.01)
        future = producer.send_nowait(b"1", key="a")
        await clock.advance(59)
        assert not future.done()
        await clock.advance(2)
        with pytest.raises(DeadlineExceeded):
            future.result()
        topic.show()
        sent = producer.send_nowait(b"2", key="a")
        while not sent.done():
            await clock.advance(0.01)  # the session may be waiting to ask again
        assert topic.by_key()["a"] == [b"0", b"2"]


async def test_too_old_is_too_old_for_newer_messages_of_the_children_too(topic: ScriptedTopic) -> None:
    """Nobody tells what was stored of the old lane: what waits behind it must not overtake it."""
    clock = ManualClock()
    async with braid.connect(topic.url, runtime=Runtime(clock=clock)) as client:
        producer = await client.producer(TOPIC, name="p", deduplication=True)
        await producer.send(b"0", key="a")
        topic.is_paused = True
        old = producer.send_nowait(b"1", key="a")
        await until(lambda: len(topic.sent) == 1)
        topic.attach_errors["p-seg-0"] = ProducerBusy("Its last owner is not given up yet.")
        topic.split(0)
        topic.show()
        await until(lambda: topic.segments[1].names == ["p-seg-1"])
        topic.is_paused = False
        await clock.advance(30)
        new = producer.send_nowait(b"2", key="a")
        await clock.advance(31)
        for future in (old, new):
            with pytest.raises(DeadlineExceeded):
                future.result()
        third = producer.send_nowait(b"3", key="a")
        await until(third.done)
        assert topic.by_key()["a"] == [b"0", b"3"]


async def test_a_child_that_cannot_tell_yet_is_asked_again(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    topic.answers = False
    sender.send(10)
    await until(lambda: topic.count() == 20)
    topic.attach_errors["p-seg-0"] = ProducerBusy("Its last owner is not given up yet.")
    topic.split(0)
    topic.answers = True
    topic.show()
    await until(lambda: topic.seen[CommandType.PRODUCER] >= 6)
    assert not sender.futures[-1].done()
    topic.attach_errors.clear()
    sender.send(10)
    await sender.all_stored()
    assert topic.by_key() == sender.wanted


async def test_close_sends_what_is_left(client: Client, topic: ScriptedTopic) -> None:
    async with client.producer(TOPIC) as producer:
        future = producer.send_nowait(b"x", key="a")
        assert producer.name
    assert future.result().segment_id == 0
    with pytest.raises(Closed):
        await producer.send(b"x")
    await until(lambda: not topic.connections[0].producers and not topic.connections[0].sessions)


async def test_close_in_the_middle_of_a_split_waits_for_it(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, deduplication=True)
    sender = Sender(producer)
    sender.send(10)
    await producer.flush()
    topic.is_paused = True
    sender.send(50)
    await until(lambda: bool(topic.sent))
    topic.split(0)
    topic.is_paused = False
    closing = asyncio.gather(producer.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    topic.show()
    await closing
    assert topic.by_key() == sender.wanted


# Sequence ids.


async def test_sequence_ids_go_on_where_the_broker_left_off(client: Client, topic: ScriptedTopic) -> None:
    """Messages sent before the lane is attached must not reuse numbers the broker would take for duplicates."""
    topic.segments[0].last["p-seg-0"] = 41
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    await producer.send(b"x", key="a")
    assert producer.last_sequence_id == 42
    assert topic.count() == 1


async def test_explicit_sequence_ids_grow_per_lane_and_survive_a_split(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p", batching=False)
    await producer.send(b"x", key="a", sequence_id=10)
    with pytest.raises(NotAllowed, match="10"):
        await producer.send(b"x", key="a", sequence_id=10)
    topic.is_paused = True
    futures = [producer.send_nowait(b"x", key="a", sequence_id=20 + number) for number in range(3)]
    await until(lambda: len(topic.sent) == 3)
    topic.split(0)
    topic.is_paused = False
    topic.show()
    await asyncio.gather(*futures)
    assert topic.segments[1].last == {"p-seg-0": 10, "p-seg-1": 22}
    refused = producer.send_nowait(b"y", key="a", sequence_id=25)
    assert (await refused).segment_id == 1


async def test_explicit_sequence_ids_survive_a_merge(client: Client, topic: ScriptedTopic) -> None:
    """Those of two lanes are sent in the order of their numbers; in any other, one would get a number that is not its own, and
    the application's next message would be refused, or taken for a duplicate by a later process."""
    producer = await client.producer(TOPIC, name="p", batching=False, deduplication=True)
    await producer.send(b"x", key="a", sequence_id=0)
    topic.split(0)
    topic.show()
    await producer.send(b"x", key="a", sequence_id=1)
    await producer.send(b"x", key="b", sequence_id=2)
    assert topic.attached() == ["p-seg-1", "p-seg-2"]
    topic.is_paused = True
    futures = [producer.send_nowait(b"%d" % number, key="ab"[number % 2], sequence_id=number) for number in range(3, 9)]
    await until(lambda: len(topic.sent) == 6)
    topic.merge(1, 2)
    topic.is_paused = False
    topic.show()
    await asyncio.gather(*futures)
    assert topic.segments[3].last["p-seg-3"] == 8
    assert [producer.last_sequence_id, (await producer.send(b"9", key="a", sequence_id=9)).segment_id] == [8, 3]


async def test_a_duplicate_behind_a_new_message_when_the_segment_is_sealed(client: Client, topic: ScriptedTopic) -> None:
    topic.segments[0].last["p-seg-0"] = 7
    producer = await client.producer(TOPIC, name="p", deduplication=True)
    assert (await producer.send(b"7", key="a", sequence_id=7)).ledger_id == -1
    assert producer.last_sequence_id == 7
    topic.is_paused = True
    new = producer.send_nowait(b"8", key="a", sequence_id=8)
    await until(lambda: len(topic.sent) == 1)
    old = producer.send_nowait(b"6", key="a", sequence_id=6)
    await until(lambda: len(topic.sent) == 2)
    topic.split(0)
    topic.is_paused = False
    topic.show()
    assert (await old).ledger_id == -1
    assert (await new).ledger_id > 0
    assert topic.by_key() == {"a": [b"8"]}


@pytest.mark.parametrize("deduplication", [True, False])
async def test_a_duplicate_that_a_sealed_segment_refused(client: Client, topic: ScriptedTopic, deduplication: bool) -> None:
    """Whoever asked for deduplication: the next lane judges what this one could not."""
    topic.deduplicates_all = True
    topic.ends_by_error = True
    topic.segments[0].last["p-seg-0"] = 7
    producer = await client.producer(TOPIC, name="p", deduplication=deduplication, batching=False)
    topic.is_paused = True
    sent = [producer.send_nowait(b"%d" % number, key="a", sequence_id=number) for number in range(5, 10)]
    await until(lambda: len(topic.sent) == 5)
    topic.split(0)
    topic.is_paused = False
    topic.pump()
    topic.show()
    assert [where.ledger_id > 0 for where in await asyncio.gather(*sent)] == [False] * 3 + [True] * 2
    assert topic.by_key() == {"a": [b"8", b"9"]}


async def test_an_id_that_turns_out_to_be_too_low_is_refused_by_its_future(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p")
    first = producer.send_nowait(b"x", key="a", sequence_id=7)
    second = producer.send_nowait(b"x", key="a", sequence_id=7)
    await first
    with pytest.raises(NotAllowed, match="7"):
        await second


# Errors.


async def test_a_deleted_topic(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p")
    await producer.send(b"x")
    topic.is_paused = True
    waiting = producer.send_nowait(b"y")
    await until(lambda: bool(topic.sent))
    topic.end(TopicNotFound("The topic was deleted."))
    with pytest.raises(TopicNotFound):
        await waiting
    with pytest.raises(TopicNotFound):
        await producer.send(b"z")
    with pytest.raises(TopicNotFound):
        producer.send_nowait(b"z")


async def test_a_topic_that_was_deleted_and_created_again(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, name="p")
    await producer.send(b"x")
    topic.incarnation = "two"
    topic.show()
    with pytest.raises(TopicNotFound, match="created again"):
        while True:
            await producer.send(b"y")


async def test_no_such_topic_and_a_feature_that_is_off(topic: ScriptedTopic) -> None:
    async with braid.connect(topic.url, config=QUICK) as client:
        topic.refusal = TopicNotFound("There is no such topic.")
        with pytest.raises(TopicNotFound):
            await client.producer(TOPIC)
        topic.refusal = NotAllowed("It is off.")
        with pytest.raises(NotAllowed, match="enable them"):
            await client.producer(TOPIC)
        for name in ("non-persistent://public/default/t", "segment://public/default/t/0000-ffff-0"):
            with pytest.raises(NotAllowed, match="cannot be made"):
                await client.producer(name)
        topic.refusal = NotAllowed("It has no layout.")
        session = LayoutSession(client, "persistent://public/default/t")
        with pytest.raises(NotAllowed) as caught:
            await session.open()
        assert caught.value.message == "It has no layout."  # there is no use in advice to use what it is
        await session.close()
    topic.is_enabled = False
    topic.refusal = None
    async with braid.connect(topic.url, config=QUICK) as client:
        for opening in (
            client.producer(TOPIC),
            client.stream_consumer(TOPIC, "s"),
            client.queue_consumer(TOPIC, "s"),
            client.checkpoint_consumer(TOPIC),
            client.stream_consumer("persistent://public/default/t", "s"),
            client.checkpoint_consumer("persistent://public/default/t", group="g"),
        ):
            with pytest.raises(NotAllowed, match=r"scalable_topics\.enabled"):
                await opening
        assert not client._made


@pytest.mark.parametrize("partitions", [0, 3])
async def test_regular_topics_of_brokers_without_scalable_topics(partitions: int) -> None:
    name = "persistent://public/default/regular"
    async with (
        InProcessBroker(with_http=False, config=StandaloneConfig(scalable_topics=ScalableConfig(enabled=False))) as broker,
        braid.connect(broker.service_url, config=QUICK) as client,
    ):
        if partitions:
            await broker.nodes[0].service.create_partitioned(TopicName.parse(name), partitions)
        queue = await client.queue_consumer(name, "q", initial="earliest")
        reader = await client.checkpoint_consumer(name)
        producer = await client.producer(name)
        sent = [f"{number}".encode() for number in range(30)]
        for payload in sent:
            await producer.send(payload, key=payload.decode())
        received = [await queue.receive(5) for _each in sent]
        for message in received:
            await queue.acknowledge(message)
        assert sorted(each.payload for each in received) == sorted(sent)
        assert {each.segment_id for each in received} == set(range(partitions or 1))
        assert sorted([(await reader.receive(5)).payload for _each in sent]) == sorted(sent)
        again = await client.checkpoint_consumer(name, start=reader.checkpoint())
        await producer.send(b"last")
        assert (await again.receive(5)).payload == b"last"


@pytest.mark.req("R468-89")
@pytest.mark.parametrize("name", [TOPIC, "segment://public/default/t/0000-ffff-0"])
async def test_the_ordinary_consumer_points_to_the_others(client: Client, name: str) -> None:
    with pytest.raises(NotAllowed, match="stream_consumer"):
        await client.consumer(name, "s")


@pytest.mark.req("R468-89")
async def test_a_segment_has_neither_producers_nor_readers_of_its_own(client: Client) -> None:
    name = "segment://public/default/t/0000-ffff-0"
    with pytest.raises(NotAllowed, match="give the name of a topic such as topic://public/default/"):
        await client.producer(name)
    for attempt in (client.checkpoint_consumer(name), client.stream_consumer(name, "s"), client.queue_consumer(name, "s")):
        with pytest.raises(NotAllowed, match="give a topic:// or persistent:// name"):
            await attempt


async def test_a_name_that_is_taken(client: Client, topic: ScriptedTopic) -> None:
    topic.attach_errors[0] = ProducerBusy("p-seg-0 is connected.")
    producer = await client.producer(TOPIC, name="p")
    with pytest.raises(ProducerBusy):
        await producer.send(b"x")
    topic.attach_errors.clear()
    await producer.send(b"x")


async def test_a_segment_that_is_not_ready_yet(client: Client, topic: ScriptedTopic) -> None:
    topic.attach_errors[0] = NotReady("Its owner is moving.")
    producer = await client.producer(TOPIC, name="p")
    future = producer.send_nowait(b"x")
    await until(lambda: topic.seen[CommandType.PRODUCER] >= 2)
    topic.attach_errors.clear()
    await future


async def test_a_message_that_is_too_large(topic: ScriptedTopic) -> None:
    topic.max_size = 1000
    async with braid.connect(topic.url, config=QUICK) as client:
        producer = await client.producer(TOPIC, name="p", batching=False)
        await producer.send(b"x")
        with pytest.raises(TooLarge):
            await producer.send(bytes(2000))
        await producer.send(b"x")


# Sessions.


async def test_a_session_that_is_lost_is_opened_again(client: Client, topic: ScriptedTopic) -> None:
    session = LayoutSession(client, TOPIC)
    await session.open()
    assert session.layout == topic.layout
    heard: list[int] = []
    session.listen(lambda layout: heard.append(layout.epoch), lambda error: heard.append(-1))
    topic.split(0)
    topic.show()
    assert (await session.wait_newer(0)).epoch == 1
    topic.crash()
    topic.split(1)
    topic.shown = topic.layout
    assert (await session.wait_newer(1)).epoch == 2
    assert heard == [1, 2]
    await session.close()
    await until(lambda: not any(each.sessions for each in topic.connections))
    with pytest.raises(Closed):
        await session.wait_newer(2)


async def test_brokers_learnt_by_lookups_are_asked_when_the_given_ones_are_gone(topic: ScriptedTopic) -> None:
    network = Runtime().network
    bootstrap = await network.listen("localhost", 0, lambda: Script(topic))
    async with braid.connect(f"pulsar://localhost:{bootstrap.port}", config=QUICK) as client:
        producer = await client.producer(TOPIC, name="p")
        await producer.send(b"0", key="a")
        bootstrap.close()
        given = await client.service_connection()
        assert given.address == f"localhost:{bootstrap.port}"
        given.abort(NotReady("The broker is gone."))
        assert (await client.service_connection()).address == topic.url.removeprefix("pulsar://")
        topic.split(0)
        topic.show()
        await producer.send(b"1", key="a")
        assert topic.by_key()["a"] == [b"0", b"1"]


@pytest.mark.parametrize("incarnation", ["", "one"])
async def test_a_layout_from_the_past_is_ignored_but_a_new_session_of_an_unknown_topic_is_believed(
    client: Client, topic: ScriptedTopic, incarnation: str
) -> None:
    topic.incarnation = incarnation
    session = LayoutSession(client, TOPIC)
    await session.open()
    past = topic.layout
    topic.split(0)
    topic.show()
    await session.wait_newer(0)
    newest, topic.layout = topic.layout, past
    topic.show()
    await client.service_connection()
    await asyncio.sleep(0.01)
    assert session.layout == newest
    session.refresh()
    if not incarnation:
        await until(lambda: session.layout == past)
    else:  # the same topic: this broker lags behind, and will tell when it has caught up
        await until(lambda: topic.seen[CommandType.SCALABLE_TOPIC_LOOKUP] == 2)
        await asyncio.sleep(0.01)
        assert session.layout == newest and session.is_attached
        topic.layout = newest.split(1, 0)
        topic.show()
        assert (await session.wait_newer(newest.epoch)).epoch == newest.epoch + 1
    await session.close()


async def test_a_layout_that_cannot_be_one_is_refused(client: Client, topic: ScriptedTopic) -> None:
    session = LayoutSession(client, TOPIC)
    topic.shown = SegmentLayout(0, 1, {0: SegmentLayout.initial(2, 0).segment(0)})
    with pytest.raises(BraidError, match="not valid"):
        await session.open()
    await session.close()


async def test_errors_after_the_first_layout_only_end_the_session(client: Client, topic: ScriptedTopic) -> None:
    session = LayoutSession(client, TOPIC)
    await session.open()
    topic.end(NotReady("The broker is going away."))
    topic.refusal = None
    topic.split(0)
    topic.shown = topic.layout
    assert (await session.wait_newer(0)).epoch == 1
    topic.end(TopicNotFound("It was deleted."))
    with pytest.raises(TopicNotFound):
        await session.wait_newer(1)
    await session.close()


# Values.


async def test_event_time_is_milliseconds_or_a_time_with_a_zone(client: Client) -> None:
    producer = await client.producer(TOPIC)
    await producer.send(b"x", event_time=5)
    await producer.send(b"x", event_time=datetime(2026, 1, 1, tzinfo=UTC))
    with pytest.raises(InvalidArgument, match="time zone"):
        await producer.send(b"x", event_time=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidArgument, match="takes bytes"):
        await producer.send("text")
