"""The SDK against a real broker: sending, receiving, acknowledging, seeking, partitions, batches, compression, chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

import braid
from braid.client import EARLIEST, Client, ClientConfig
from braid.errors import (
    Closed,
    ConfigError,
    ConnectFailed,
    ConsumerBusy,
    DeadlineExceeded,
    InvalidTopicName,
    NotAllowed,
    Overloaded,
    ProducerBusy,
    TooLarge,
    TopicNotFound,
    TopicTerminated,
)
from braid.runtime.env import Runtime
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock


@pytest.fixture
async def broker() -> AsyncIterator[InProcessBroker]:
    async with InProcessBroker() as running:
        yield running


@pytest.fixture
async def client(broker: InProcessBroker) -> AsyncIterator[Client]:
    config = ClientConfig(operation_timeout=5, redelivery_delay=0.01)
    async with braid.connect(broker.service_url, config=config) as made:
        yield made


async def test_what_is_sent_is_received(client: Client) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t", name="me")
    sent = await producer.send(b"hello", key="k", properties={"a": "b"})
    message = await consumer.receive(5)
    assert (message.payload, message.key, message.properties) == (b"hello", "k", {"a": "b"})
    assert message.id == sent
    assert (message.producer, message.sequence_id, message.redelivery_count) == ("me", 0, 0)
    assert message.topic == "persistent://public/default/t"
    with pytest.raises(DeadlineExceeded):
        await consumer.receive(0.01)


@pytest.mark.parametrize("compression", ["none", "lz4", "zlib", "zstd", "snappy"])
@pytest.mark.parametrize("batching", [True, False])
async def test_order_with_every_codec(client: Client, compression: str, batching: bool) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t", batching=batching, compression=compression)  # type: ignore[arg-type]
    futures = [producer.send_nowait(b"%d" % number * 20, key=str(number)) for number in range(200)]
    await producer.flush()
    assert all(future.done() for future in futures)
    got = [await consumer.receive(5) for _number in range(200)]
    assert [message.payload for message in got] == [b"%d" % number * 20 for number in range(200)]
    assert [message.id for message in got] == [future.result() for future in futures]
    if batching:
        assert got[1].id.batch_size > 1


async def test_the_window_is_bounded(broker: InProcessBroker) -> None:
    config = ClientConfig(max_pending_messages=3)
    async with braid.connect(broker.service_url, config=config) as client:
        producer = await client.producer("t")
        for _number in range(3):
            producer.send_nowait(b"x")
        with pytest.raises(Overloaded, match="room"):
            producer.send_nowait(b"x")
        await producer.room()
        producer.send_nowait(b"x")


async def test_sequence_ids_are_the_applications_if_it_wants(client: Client) -> None:
    producer = await client.producer("t", name="p")
    await producer.send(b"x", sequence_id=10)
    assert producer.last_sequence_id == 10
    with pytest.raises(NotAllowed, match="10"):
        await producer.send(b"x", sequence_id=10)
    await producer.send(b"x")
    assert producer.last_sequence_id == 11


async def test_a_message_that_is_too_large(client: Client) -> None:
    producer = await client.producer("t")
    with pytest.raises(TooLarge, match="5242880"):
        await producer.send(bytes(6 << 20))
    await producer.send(b"small")


async def test_acknowledged_messages_do_not_come_again(client: Client) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t", batching=False)
    for number in range(3):
        await producer.send(b"%d" % number)
    first = await consumer.receive(5)
    await consumer.acknowledge(first, wait=True)
    await consumer.close()
    consumer = await client.consumer("t", "s")
    assert [(await consumer.receive(5)).payload for _number in range(2)] == [b"1", b"2"]


async def test_single_messages_of_a_batch_are_acknowledged(client: Client) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t")
    for number in range(5):
        producer.send_nowait(b"%d" % number)
    await producer.flush()
    got = [await consumer.receive(5) for _number in range(5)]
    assert got[0].id.batch_size == 5
    for index in (0, 3):
        await consumer.acknowledge(got[index], wait=True)
    await consumer.close()
    consumer = await client.consumer("t", "s")
    assert [(await consumer.receive(5)).payload for _number in range(3)] == [b"1", b"2", b"4"]


async def test_cumulative_acknowledgement_inside_a_batch(client: Client) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t")
    for number in range(5):
        producer.send_nowait(b"%d" % number)
    await producer.flush()
    got = [await consumer.receive(5) for _number in range(5)]
    await consumer.acknowledge_cumulative(got[2], wait=True)
    await consumer.close()
    consumer = await client.consumer("t", "s")
    assert [(await consumer.receive(5)).payload for _number in range(2)] == [b"3", b"4"]


async def test_a_refused_message_comes_again_on_shared(client: Client) -> None:
    consumer = await client.consumer("t", "s", type="shared")
    producer = await client.producer("t", batching=False)
    await producer.send(b"1")
    await producer.send(b"2")
    first, second = await consumer.receive(5), await consumer.receive(5)
    await consumer.acknowledge(second)
    await consumer.negative_acknowledge(first)
    again = await consumer.receive(5)
    assert (again.payload, again.redelivery_count) == (b"1", 1)
    with pytest.raises(NotAllowed):
        await consumer.acknowledge_cumulative(again)


async def test_a_refused_message_comes_again_in_order_on_exclusive(broker: InProcessBroker) -> None:
    clock = ManualClock()
    async with braid.connect(broker.service_url, runtime=Runtime(clock=clock)) as client:
        consumer = await client.consumer("t", "s")
        producer = await client.producer("t", batching=False)
        for number in range(4):
            await producer.send(b"%d" % number)
        first = await consumer.receive(5)
        await consumer.acknowledge(first)
        second = await consumer.receive(5)
        await consumer.negative_acknowledge(second)
        await clock.advance(1)
        assert [(await consumer.receive()).payload for _number in range(3)] == [b"1", b"2", b"3"]


async def test_shared_consumers_share_and_a_leaver_gives_back(client: Client) -> None:
    one = await client.consumer("t", "s", type="shared")
    producer = await client.producer("t", batching=False)
    for number in range(10):
        await producer.send(b"%d" % number)
    await one.receive(5)
    two = await client.consumer("t", "s", type="shared")
    await one.close()
    assert sorted([(await two.receive(5)).payload for _number in range(10)]) == [b"%d" % number for number in range(10)]


async def test_more_messages_than_permits(broker: InProcessBroker) -> None:
    async with braid.connect(broker.service_url, config=ClientConfig(receiver_queue=5)) as client:
        consumer = await client.consumer("t", "s")
        producer = await client.producer("t", batching=False)
        for number in range(50):
            await producer.send(b"%d" % number)
        assert [(await consumer.receive(5)).payload for _number in range(50)] == [b"%d" % number for number in range(50)]


async def test_seek_to_a_message_a_time_and_the_start(client: Client) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t", batching=False)
    ids = [await producer.send(b"%d" % number) for number in range(5)]
    for _number in range(5):
        await consumer.acknowledge(await consumer.receive(5))
    await consumer.seek(ids[3])
    assert (await consumer.receive(5)).payload == b"3"
    await consumer.seek(EARLIEST)
    assert (await consumer.receive(5)).payload == b"0"
    await consumer.seek(1)
    assert (await consumer.receive(5)).payload == b"0"
    await consumer.seek(1 << 42)
    with pytest.raises(DeadlineExceeded):
        await consumer.receive(0.05)


async def test_seek_into_a_batch(client: Client) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t")
    futures = [producer.send_nowait(b"%d" % number) for number in range(5)]
    await producer.flush()
    await consumer.seek(futures[2].result())
    assert [(await consumer.receive(5)).payload for _number in range(3)] == [b"2", b"3", b"4"]


async def test_partitions_by_key_and_by_turn(client: Client, broker: InProcessBroker) -> None:
    async with httpx.AsyncClient(base_url=broker.http_url) as http:
        assert (await http.put("/admin/v2/persistent/public/default/p/partitions", json=3)).status_code == 204
    consumer = await client.consumer("p", "s")
    producer = await client.producer("p")
    same = {(await producer.send(b"x", key="k")).partition for _number in range(5)}
    spread = {(await producer.send(b"y")).partition for _number in range(6)}
    assert len(same) == 1
    assert spread == {0, 1, 2}
    got = [await consumer.receive(5) for _number in range(11)]
    for message in got:
        await consumer.acknowledge(message, wait=True)
    assert {message.topic[-1] for message in got} == {"0", "1", "2"}
    await consumer.seek(got[0].id)
    assert (await consumer.receive(5)).id.partition == got[0].id.partition


async def test_the_end_of_a_terminated_topic(client: Client, broker: InProcessBroker) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t")
    await producer.send(b"last")
    async with httpx.AsyncClient(base_url=broker.http_url) as http:
        assert (await http.post("/admin/v2/persistent/public/default/t/terminate")).status_code == 200
    with pytest.raises(TopicTerminated):
        while True:
            await producer.send(b"too late")
    got = []
    async for message in consumer:
        got.append(message.payload)
        await consumer.acknowledge(message)
    assert got == [b"last"]


async def test_unsubscribe_forgets_the_position(client: Client) -> None:
    consumer = await client.consumer("t", "s")
    producer = await client.producer("t")
    await producer.send(b"1")
    await consumer.unsubscribe()
    consumer = await client.consumer("t", "s", initial="latest")
    await producer.send(b"2")
    assert (await consumer.receive(5)).payload == b"2"


async def test_typed_errors(client: Client) -> None:
    with pytest.raises(TopicNotFound):
        await client.producer("no/such/namespace")
    with pytest.raises(InvalidTopicName):
        await client.producer("a/b")
    with pytest.raises(NotAllowed):
        await client.producer("non-persistent://public/default/t")
    await client.producer("t", name="one")
    with pytest.raises(ProducerBusy):
        await client.producer("t", name="one")
    await client.consumer("t", "s")
    with pytest.raises(ConsumerBusy):
        await client.consumer("t", "s")


async def test_use_after_close(client: Client) -> None:
    producer = await client.producer("t")
    consumer = await client.consumer("t", "s")
    waiting = asyncio.gather(consumer.receive(), return_exceptions=True)
    await asyncio.sleep(0)
    await client.close()
    assert isinstance((await waiting)[0], Closed)
    with pytest.raises(Closed):
        await producer.send(b"x")


@pytest.mark.parametrize("url", ["http://localhost:1", "pulsar://", "localhost", "pulsar+ssl://localhost:1", "pulsar://h:x"])
async def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="pulsar"):
        braid.connect(url)


async def test_nobody_is_there() -> None:
    with pytest.raises(ConnectFailed, match="Is a broker running"):
        async with braid.connect("pulsar://localhost:1"):
            pass
