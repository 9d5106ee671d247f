"""Reading by ranges of indexes, against real brokers: layouts, states, where ranges end, bulk reads, cursors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

import braid
from braid.client import Client
from braid.client.config import ClientConfig
from braid.client.segment_reads import Fetched, SegmentReads, SegmentState, TopicView
from braid.errors import IncarnationMismatch, InvalidArgument, NotAllowed, NotReady, TopicNotFound
from braid.model.names import TopicName
from braid.scalable.controller import ScalableTopicController
from braid.testing.broker import InProcessBroker
from braid.wire.batch import decode_batch
from braid.wire.entries import entry_metadata, payload_offset, verify

TOPIC = "topic://public/default/orders"
PLAIN = "persistent://public/default/plain"
NAME = TopicName.parse(TOPIC)
MB = 1 << 20


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker(with_http=False) as one:
        await one.nodes[0].service.create_scalable_topic(NAME, 1)
        yield one


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    async with braid.connect(broker.service_url, config=ClientConfig(operation_timeout=5, backoff_initial=0.01)) as one:
        yield one


@pytest.fixture
def reads(client: Client) -> SegmentReads:
    return client.segment_reads()


async def leader(broker: InProcessBroker) -> ScalableTopicController:
    found = await broker.nodes[0].service.scalable.lead(NAME)
    assert isinstance(found, ScalableTopicController)
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - brokers take their own time, no event tells
            await asyncio.sleep(0.005)


async def produce(client: Client, topic: str, first: int, last: int, *, batching: bool = False) -> None:
    async with client.producer(topic, batching=batching) as producer:
        await asyncio.gather(*[producer.send(b"%d" % number, key=f"key-{number % 8}") for number in range(first, last)])


def values(fetched: Fetched) -> dict[int, bytes]:
    """Messages by index."""
    found: dict[int, bytes] = {}
    at = 0
    for size, last in zip(fetched.size, fetched.last_index, strict=True):
        entry = bytes(fetched.data[at : at + size])
        at += size
        assert verify(entry)
        metadata = entry_metadata(entry)
        payload = entry[payload_offset(entry) :]
        if metadata.HasField("num_messages_in_batch"):
            messages = [body for _metadata, body in decode_batch(payload, metadata.num_messages_in_batch)]
        else:
            messages = [payload]
        found |= dict(enumerate(messages, last - len(messages) + 1))
    assert at == len(fetched.data)
    return found


async def read_all(reads: SegmentReads, state: SegmentState, start: int, stop: int, max_bytes: int = MB) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while start < stop:
        got = await reads.fetch(state.topic, state.incarnation, start, stop, max_bytes=max_bytes)
        assert start < got.covered_to <= stop
        found |= {index: body for index, body in values(got).items() if start <= index < got.covered_to}
        start = got.covered_to
    return found


async def only(reads: SegmentReads, topic: str) -> tuple[TopicView, SegmentState]:
    """A topic with one segment, and what that holds."""
    view = await reads.topic(topic)
    (segment,) = view.segments.values()
    states = await reads.states([segment.topic])
    return view, states[segment.topic]


@pytest.mark.parametrize("topic", [TOPIC, PLAIN])
@pytest.mark.parametrize("batching", [False, True], ids=["single", "batches"])
async def test_a_range_is_read_in_pieces(client: Client, reads: SegmentReads, topic: str, batching: bool) -> None:
    await produce(client, topic, 0, 500, batching=batching)
    view, state = await only(reads, topic)
    assert (state.low, state.stable, state.end, state.is_sealed) == (0, 500, 500, False)
    assert state.incarnation == view.incarnation != ""
    assert state.stored_bytes > 500
    found = await read_all(reads, state, 0, 500, 2000)
    assert [found[index] for index in range(500)] == [b"%d" % number for number in range(500)]
    inside = await read_all(reads, state, 123, 321)
    assert inside == {index: b"%d" % index for index in range(123, 321)}
    empty = await reads.fetch(state.topic, state.incarnation, 500, 500, max_bytes=MB)
    assert (empty.covered_to, empty.last_index, bytes(empty.data)) == (500, [], b"")


async def test_a_known_layout_costs_no_request_and_follows_splits(
    broker: InProcessBroker, client: Client, reads: SegmentReads
) -> None:
    await produce(client, TOPIC, 0, 100)
    view = await reads.topic(TOPIC)
    assert await reads.topic(TOPIC) is view
    assert (view.next_id, list(view.segments)) == (1, [0])
    await (await leader(broker)).split_segment(0)
    async with asyncio.timeout(10):
        while (after := await reads.topic(TOPIC)).next_id == 1:  # noqa: ASYNC110 - brokers tell in their own time
            await asyncio.sleep(0.005)
    assert after.incarnation == view.incarnation
    assert {number: (each.parents, each.is_sealed) for number, each in after.segments.items()} == {
        0: ((), True),
        1: ((0,), False),
        2: ((0,), False),
    }
    assert after.segments[0].children == (1, 2)
    states = await reads.states([each.topic for each in after.segments.values()])
    assert [states[each.topic].end for each in after.segments.values()] == [100, 0, 0]
    assert [states[each.topic].is_sealed for each in after.segments.values()] == [True, False, False]
    assert len(await read_all(reads, states[after.segments[0].topic], 0, 100)) == 100


async def test_limits(client: Client, reads: SegmentReads) -> None:
    await produce(client, TOPIC, 0, 1000)
    _view, state = await only(reads, TOPIC)
    topic, incarnation = state.topic, state.incarnation

    async def offset(start: int, messages: int | None = None, size: int | None = None) -> int:
        return await reads.offset_for(topic, incarnation, start, max_messages=messages, max_bytes=size)

    assert await offset(0) == 1000
    assert await offset(0, 10) == 10
    assert await offset(990, 100) == 1000
    assert await offset(1000, 100) == 1000
    assert await offset(1000) == 1000
    assert await offset(5, 0) == 6, "never empty"
    assert await offset(5, None, 1) == 6
    by_size = await offset(0, None, state.stored_bytes // 2)
    assert 450 <= by_size <= 550
    assert await offset(0, 10, state.stored_bytes // 2) == 10
    assert await offset(0, 900, state.stored_bytes // 2) == by_size
    assert await offset(0, None, state.stored_bytes * 2) == 1000


async def test_an_index_by_time(client: Client, reads: SegmentReads) -> None:
    await produce(client, TOPIC, 0, 10, batching=True)
    _view, state = await only(reads, TOPIC)
    whole = await reads.fetch(state.topic, state.incarnation, 0, 10, max_bytes=MB)
    first, last = whole.append_ms[0], whole.append_ms[-1]
    assert await reads.index_at_time(state.topic, state.incarnation, 0) == 0
    assert await reads.index_at_time(state.topic, state.incarnation, first) == 0
    assert await reads.index_at_time(state.topic, state.incarnation, last + 1) == 10


@pytest.mark.inv("INV5")
async def test_partitions_of_a_regular_topic_have_incarnations_of_their_own(
    broker: InProcessBroker, client: Client, reads: SegmentReads
) -> None:
    service = broker.nodes[0].service
    name = TopicName.parse("persistent://public/default/parts")
    await service.create_partitioned(name, 3)
    await produce(client, str(name), 0, 30)
    view = await reads.topic(str(name))
    assert [each.topic for each in view.segments.values()] == [str(name.partition(number)) for number in range(3)]
    states = await reads.states([each.topic for each in view.segments.values()])
    assert states[view.segments[0].topic].incarnation == view.incarnation
    assert len({state.incarnation for state in states.values()}) == 3
    assert sum(state.end for state in states.values()) == 30
    found = [body for state in states.values() for body in (await read_all(reads, state, 0, state.end)).values()]
    assert sorted(map(int, found)) == list(range(30))
    last = view.segments[2].topic
    with pytest.raises(IncarnationMismatch):
        await reads.fetch(last, "other", 0, 1, max_bytes=MB)
    # One partition can be deleted alone, and comes back with its first use: its numbers mean other messages then.
    noted = states[last].incarnation
    await service.delete_topic(TopicName.parse(last), force=True)
    await produce(client, str(name), 30, 90)
    for _ in range(2):  # also by whoever asks for the first time
        with pytest.raises(IncarnationMismatch, match="begin anew"):
            await reads.fetch(last, noted, 0, 1, max_bytes=MB)
    assert (await reads.states([last]))[last].incarnation != noted
    assert (await reads.topic(str(name))).incarnation == view.incarnation


async def test_another_incarnation_is_refused_by_name(broker: InProcessBroker, client: Client, reads: SegmentReads) -> None:
    await produce(client, TOPIC, 0, 10)
    await produce(client, PLAIN, 0, 10)
    _view, old = await only(reads, TOPIC)
    _view, old_plain = await only(reads, PLAIN)
    service = broker.nodes[0].service
    await service.scalable.delete_topic(NAME, force=True)
    assert await reads.states([old.topic]) == {}
    with pytest.raises(TopicNotFound):
        await reads.fetch(old.topic, old.incarnation, 0, 10, max_bytes=MB)
    await service.delete_topic(TopicName.parse(PLAIN), force=True)
    await service.create_scalable_topic(NAME, 1)
    await produce(client, TOPIC, 0, 20)
    await produce(client, PLAIN, 0, 20)
    for state in (old, old_plain):
        for call in (
            lambda each: reads.fetch(each.topic, each.incarnation, 0, 10, max_bytes=MB),
            lambda each: reads.offset_for(each.topic, each.incarnation, 0, max_messages=1, max_bytes=None),
            lambda each: reads.index_at_time(each.topic, each.incarnation, 0),
            lambda each: reads.move_cursor(each.topic, each.incarnation, "sub", 5),
        ):
            with pytest.raises(IncarnationMismatch, match="begin anew"):
                await call(state)
    for topic, known in ((TOPIC, old), (PLAIN, old_plain)):
        async with asyncio.timeout(10):
            while (new := await only(reads, topic))[0].incarnation == known.incarnation:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        assert len(await read_all(reads, new[1], 0, 20)) == 20


async def test_what_is_not_stable_is_waited_for(client: Client, reads: SegmentReads) -> None:
    await produce(client, TOPIC, 0, 5)
    txn = await client.begin_transaction()
    async with client.producer(TOPIC, batching=False) as producer:
        await producer.send(b"open", txn=txn)
        await producer.send(b"after")
        _view, state = await only(reads, TOPIC)
        assert (state.stable, state.end) == (5, 7)
        assert await reads.offset_for(state.topic, state.incarnation, 5, max_messages=9, max_bytes=None) == 5
        waiting = asyncio.create_task(reads.fetch(state.topic, state.incarnation, 0, 7, max_bytes=MB))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await txn.commit()
        assert sorted(values(await waiting)) == list(range(7))
        await producer.send(b"kept")
        txn = await client.begin_transaction()
        await producer.send(b"dropped", txn=txn)
        await producer.send(b"also kept")
        await txn.abort()
    found = await reads.fetch(state.topic, state.incarnation, 5, 10, max_bytes=MB)
    assert found.covered_to == 10
    assert values(found) == {5: b"open", 6: b"after", 7: b"kept", 9: b"also kept"}
    hidden = await reads.fetch(state.topic, state.incarnation, 8, 9, max_bytes=MB)
    assert (hidden.covered_to, hidden.last_index) == (9, [])


async def test_what_never_comes_is_refused_in_time(broker: InProcessBroker) -> None:
    config = ClientConfig(operation_timeout=0.3, backoff_initial=0.01)
    async with braid.connect(broker.service_url, config=config) as client:
        await produce(client, TOPIC, 0, 5)
        reads = client.segment_reads()
        _view, state = await only(reads, TOPIC)
        with pytest.raises(NotReady, match="up to message 5"):
            await reads.fetch(state.topic, state.incarnation, 0, 6, max_bytes=MB)
        with pytest.raises(NotReady, match="cannot be read already"):
            await reads.move_cursor(state.topic, state.incarnation, "spark", 6)


async def test_a_cursor_follows_a_reader(broker: InProcessBroker, client: Client, reads: SegmentReads) -> None:
    for topic in (TOPIC, PLAIN):
        await produce(client, topic, 0, 10)
        _view, state = await only(reads, topic)
        cursors = broker.nodes[0].service.topics[state.topic].log.cursors
        await reads.move_cursor(state.topic, state.incarnation, "spark", 0)
        assert cursors["spark"].backlog() == 10
        await reads.move_cursor(state.topic, state.incarnation, "spark", 7)
        assert cursors["spark"].backlog() == 3
        await reads.move_cursor(state.topic, state.incarnation, "spark", 4)
        assert cursors["spark"].backlog() == 3, "never back"
        await reads.move_cursor(state.topic, state.incarnation, "spark", 10)
        assert cursors["spark"].backlog() == 0
    record = await broker.nodes[0].service.records.subscription(NAME, "spark")
    assert record is not None
    assert record.type == "QUEUE"


async def test_topics_by_pattern(broker: InProcessBroker, client: Client, reads: SegmentReads) -> None:
    service = broker.nodes[0].service
    await produce(client, PLAIN, 0, 1)
    await service.create_partitioned(TopicName.parse("persistent://public/default/orders-p"), 2)
    await service.create_scalable_topic(TopicName.parse("topic://public/default/orders-2"), 1)
    two = ["topic://public/default/orders", "topic://public/default/orders-2"]
    assert await reads.topics_matching("topic://public/default/orders.*") == two
    assert await reads.topics_matching("persistent://public/default/.*") == ["persistent://public/default/orders-p", PLAIN]
    assert await reads.topics_matching("public/default/orders.*") == ["persistent://public/default/orders-p", *two]
    assert await reads.topics_matching("orders") == two[:1]
    assert await reads.topics_matching("topic://public/default/none") == []
    for pattern, error in (
        ("topic://public/default/(", InvalidArgument),
        ("topic://public/default", InvalidArgument),
        ("segment://public/default/x", NotAllowed),
        ("topic://no-such/namespace/x", TopicNotFound),
    ):
        with pytest.raises(error):
            await reads.topics_matching(pattern)


async def test_bad_input(client: Client, reads: SegmentReads) -> None:
    with pytest.raises(TopicNotFound):
        await reads.topic("topic://public/default/missing")
    with pytest.raises(TopicNotFound):
        await reads.topic("persistent://public/default/missing")
    await produce(client, TOPIC, 0, 5)
    _view, state = await only(reads, TOPIC)
    with pytest.raises(InvalidArgument, match="ends before"):
        await reads.fetch(state.topic, state.incarnation, 3, 2, max_bytes=MB)
    for start, stop, size in ((-1, 2, MB), (0, 1 << 63, MB), (0, 2, -1), (True, 2, MB)):
        with pytest.raises(InvalidArgument, match="cannot be used"):
            await reads.fetch(state.topic, state.incarnation, start, stop, max_bytes=size)
    with pytest.raises(NotAllowed, match="segments are read"):
        await reads.fetch(TOPIC, state.incarnation, 0, 1, max_bytes=MB)
    assert (await reads.fetch(state.topic, state.incarnation, 0, 5, max_bytes=0)).covered_to == 1, "at least one entry"
