"""Sending under transactions to a scripted broker: entries of one transaction each, refusals, lost places, and what a commit
waits for."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.client.scripted_topic import TOPIC, ScriptedTopic, until

import braid
from braid.client import Client, ClientConfig
from braid.errors import ConnectionLost, NotAllowed, Overloaded, TooLarge, TransactionConflict
from braid.wire import replies
from braid.wire.entries import entry_metadata


async def test_a_batch_is_of_one_transaction_or_of_none(client: Client, topic: ScriptedTopic) -> None:
    one, two = await client.begin_transaction(), await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first")
    topic.is_paused = True
    for txn in (one, one, two, None, None, one):
        producer.send_nowait(b"x", txn=txn)
    await until(lambda: len(topic.sent) == 4)
    for _connection, send in topic.sent:
        metadata = entry_metadata(send.entry)
        assert (metadata.txnid_most_bits, metadata.txnid_least_bits) == (send.txn_most or 0, send.txn_least or 0)
        assert metadata.HasField("txnid_most_bits") == (send.txn_most is not None)
    topic.is_paused = False
    topic.pump()
    await producer.flush()
    assert topic.segments[0].transactions[1:] == [(one.id, 2), (two.id, 1), (None, 2), (one.id, 1)]


async def test_a_transaction_with_the_numbers_zero_is_named_all_the_same(client: Client, topic: ScriptedTopic) -> None:
    topic.transactions.count = 1
    txn = await client.begin_transaction()
    assert txn.id.most == 0
    await (await client.producer(TOPIC)).send(b"x", txn=txn)
    assert topic.segments[0].transactions == [(txn.id, 1)]


@pytest.mark.inv("INV14")
async def test_a_commit_waits_for_every_send(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first", txn=txn)
    topic.is_paused = True
    producer.send_nowait(b"second", txn=txn)
    sending = asyncio.ensure_future(producer.send(b"third", txn=txn))
    await until(lambda: bool(topic.sent))
    ending = asyncio.ensure_future(txn.commit())
    await asyncio.sleep(0.02)
    assert not topic.transactions.ended
    topic.is_paused = False
    topic.pump()
    await ending
    assert sending.done()
    assert topic.transactions.ended == [(txn.id, "COMMIT")]


async def test_a_commit_does_not_wait_for_a_batch_to_fill(topic: ScriptedTopic) -> None:
    config = ClientConfig(batch_delay=60, operation_timeout=5)
    async with braid.connect(topic.url, config=config) as client:
        producer = await client.producer(TOPIC)
        producer.send_nowait(b"first")
        await until(lambda: topic.count() == 1)  # attached: from now on it collects
        async with asyncio.timeout(5):
            async with client.transaction() as txn:
                producer.send_nowait(b"second", txn=txn)
        assert topic.count() == 2


@pytest.mark.inv("INV14")
@pytest.mark.req("R473-41")
@pytest.mark.parametrize("error", [TransactionConflict("It is over."), NotAllowed("TransactionConflict: it is over.")])
async def test_a_refused_send_fails_alone_and_the_transaction_with_it(
    client: Client, topic: ScriptedTopic, error: TransactionConflict
) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first")
    topic.is_paused = True
    topic.refuses[txn.id] = error
    before = producer.send_nowait(b"before", key="k")
    refused = producer.send_nowait(b"refused", key="k", txn=txn)
    after = producer.send_nowait(b"after", key="k")
    await until(lambda: len(topic.sent) == 3)
    topic.is_paused = False
    topic.pump()
    with pytest.raises(type(error)):
        await refused
    await asyncio.gather(before, after)
    assert topic.by_key()["k"] == [b"before", b"after"]
    with pytest.raises(TransactionConflict, match=f"{txn.id} was aborted") as raised:
        await txn.commit()
    assert isinstance(raised.value.__cause__, type(error))
    assert topic.transactions.ended == [(txn.id, "ABORT")]
    assert producer._window.messages == producer._window.size == 0


async def test_a_refusal_may_overtake_the_receipts_before_it(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first")
    topic.is_paused = True
    topic.refuses[txn.id] = TransactionConflict("It is over.")
    before = producer.send_nowait(b"before")
    refused = producer.send_nowait(b"refused", txn=txn)
    await until(lambda: len(topic.sent) == 2)
    topic.sent.reverse()
    topic.store(1)
    with pytest.raises(TransactionConflict):
        await refused
    topic.store(1)
    await before
    assert [payload for _key, payload in topic.segments[0].messages] == [b"first", b"before"]


@pytest.mark.inv("INV14")
async def test_a_send_whose_place_was_lost_is_not_sent_again(client: Client, topic: ScriptedTopic) -> None:
    """It may be stored: sent again it could be there twice when the transaction is committed."""
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first", txn=txn)
    topic.answers = False
    lost = producer.send_nowait(b"lost", txn=txn)
    plain = producer.send_nowait(b"plain")
    await until(lambda: topic.count() == 3)
    topic.answers = True
    topic.crash()
    with pytest.raises(ConnectionLost, match="may be stored"):
        await lost
    await plain
    assert [payload for _key, payload in topic.segments[0].messages] == [b"first", b"lost", b"plain", b"plain"]
    with pytest.raises(TransactionConflict, match="may be stored"):
        await txn.commit()
    assert topic.transactions.ended == [(txn.id, "ABORT")]
    assert producer._window.messages == producer._window.size == 0


async def test_with_deduplication_it_is_sent_again_and_stored_once(client: Client, topic: ScriptedTopic) -> None:
    producer = await client.producer(TOPIC, deduplication=True)
    async with client.transaction() as txn:
        await producer.send(b"first", txn=txn)
        topic.answers = False
        sent = producer.send_nowait(b"second", txn=txn)
        await until(lambda: topic.count() == 2)
        topic.answers = True
        topic.crash()
        await sent
    assert topic.segments[0].transactions == [(txn.id, 1), (txn.id, 1)]


@pytest.mark.parametrize("is_settled", [True, False])
async def test_a_place_that_the_broker_closes(client: Client, topic: ScriptedTopic, is_settled: bool) -> None:
    """One that says that nothing unanswered is stored has moved the topic; another one may have failed to store something."""
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first", txn=txn)
    topic.is_paused = True
    sent = producer.send_nowait(b"second", txn=txn)
    await until(lambda: bool(topic.sent))
    topic.sent.clear()
    (connection,) = topic.connections
    (number,) = connection.producers
    connection.transport.write(replies.close_producer(number, is_settled=is_settled))
    del connection.producers[number]
    topic.is_paused = False
    if is_settled:
        await sent
        await txn.commit()
        assert topic.count() == 2
    else:
        with pytest.raises(ConnectionLost):
            await sent
        with pytest.raises(TransactionConflict):
            await txn.commit()
        assert topic.count() == 1


@pytest.mark.req("R473-2")
async def test_sends_move_to_the_children_of_a_segment_sealed_under_them(client: Client, topic: ScriptedTopic) -> None:
    topic.ends_by_error = True
    producer = await client.producer(TOPIC)
    async with client.transaction() as txn:
        await producer.send(b"0", key="k", txn=txn)
        topic.is_paused = True
        sends = [producer.send_nowait(b"%d" % number, key="k", txn=txn) for number in range(1, 5)]
        await until(lambda: bool(topic.sent))
        topic.split(0)
        topic.is_paused = False
        topic.pump()
        topic.show()
        await asyncio.gather(*sends)
    assert topic.by_key()["k"] == [b"%d" % number for number in range(5)]
    assert {each for segment in topic.segments.values() for each, _count in segment.transactions} == {txn.id}


@pytest.mark.inv("INV14")
async def test_a_send_that_somebody_gave_up_cannot_be_committed(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first", txn=txn)
    topic.is_paused = True
    sending = asyncio.ensure_future(producer.send(b"second", txn=txn))
    await until(lambda: bool(topic.sent))
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(TransactionConflict, match="gave up waiting"):
        await txn.commit()


@pytest.mark.parametrize("is_waited", [True, False])
async def test_without_a_message_that_is_refused_here_nothing_is_committed(
    client: Client, topic: ScriptedTopic, is_waited: bool
) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first", txn=txn)
    with pytest.raises(TooLarge):
        await (producer.send if is_waited else producer.send_nowait)(b"x" * (6 << 20), txn=txn)
    with pytest.raises(TransactionConflict, match="above the broker's limit"):
        await txn.commit()


async def test_a_full_window_is_no_reason_to_abort(topic: ScriptedTopic) -> None:
    config = ClientConfig(max_pending_messages=1, operation_timeout=5)
    async with braid.connect(topic.url, config=config) as client:
        producer = await client.producer(TOPIC)
        async with client.transaction() as txn:
            producer.send_nowait(b"1", txn=txn)
            with pytest.raises(Overloaded):
                producer.send_nowait(b"2", txn=txn)
            await producer.send(b"2", txn=txn)
    assert topic.count() == 2


async def test_an_abort_waits_for_no_send(client: Client, topic: ScriptedTopic) -> None:
    txn = await client.begin_transaction()
    producer = await client.producer(TOPIC)
    await producer.send(b"first", txn=txn)
    topic.is_paused = True
    sent = producer.send_nowait(b"second", txn=txn)
    await txn.abort()
    assert not sent.done()
    topic.refuses[txn.id] = TransactionConflict("It is over.")
    topic.is_paused = False
    topic.pump()
    with pytest.raises(TransactionConflict):
        await sent
