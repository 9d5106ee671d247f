"""Transaction coordinators: how clients of both ages find them, on one broker and on several, and what they collect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import braid
from braid.errors import (
    ConfigError,
    InvalidTransactionStatus,
    MetadataFailure,
    Overloaded,
    TransactionCoordinatorNotFound,
    from_code,
)
from braid.model.names import TopicName
from braid.model.txn import TxnId
from braid.scalable.config import ScalableConfig
from braid.testing.broker import InProcessBroker
from braid.testing.raw_client import RawClient
from braid.txn.config import TransactionConfig
from braid.txn.records import TxnOp, serial_key
from braid.web.config import StandaloneConfig
from braid.wire import requests, txn_requests
from braid.wire.types import CommandType, LookupResult

TOPIC = "persistent://public/default/collected"
ASSIGN = "persistent://pulsar/system/transaction_coordinator_assign"


async def ask(client: RawClient, frame: bytes, request_id: int) -> Any:
    """The answer, an error in it raised."""
    client.send(frame)
    reply = await client.answer(request_id)
    if reply.HasField("error"):
        raise from_code(reply.error, reply.message)
    return reply


async def state_of(broker: Any, txn: TxnId) -> Any:
    found = await broker.service.transactions.store.header(txn, fresh=True)
    return None if found is None else found.value


async def lookup(client: RawClient, number: int) -> Any:
    request_id = client.next_request()
    client.send(requests.lookup(request_id, f"{ASSIGN}-partition-{number}"))
    return await client.answer(request_id)


@pytest.mark.req("R473-6", "R473-36")
async def test_older_clients_find_coordinators_by_the_assign_topic(broker: Any, client: RawClient) -> None:
    client.send(requests.partitioned_metadata(1, ASSIGN))
    assert (await client.answer(1)).partitions == 16
    for number in range(16):
        found = await lookup(client, number)
        assert (found.response, found.brokerServiceUrl) == (LookupResult.CONNECT, broker.url)
        reply = await ask(client, txn_requests.connect(60 + number, number), 60 + number)
        assert reply.request_id == 60 + number
    assert (await lookup(client, 16)).error == TransactionCoordinatorNotFound.code
    with pytest.raises(TransactionCoordinatorNotFound):
        await ask(client, txn_requests.connect(90, 16), 90)
    assert broker.service.topics == {}


async def test_the_watch_tells_all_partitions_at_once(broker: Any) -> None:
    client = await broker.client(handshake=False)
    client.send(requests.connect("test"))
    assert (await client.expect(CommandType.CONNECTED)).feature_flags.supports_tc_metadata_discovery
    client.send(txn_requests.watch_assignments(4))
    update = await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE)
    assert (update.watch_id, update.snapshot.parallelism) == (4, 16)
    assert {each.tc_id: each.broker_service_url for each in update.snapshot.assignments} == dict.fromkeys(range(16), broker.url)


def watched(update: Any) -> dict[int, str]:
    assert update.snapshot.parallelism == 16
    return {each.tc_id: each.broker_service_url for each in update.snapshot.assignments}


@pytest.mark.req("R473-45")
async def test_several_brokers_name_the_leader_and_each_serves_every_partition(world: Any, until: Any) -> None:
    """3 brokers: lookups of all name the leader of each partition; whoever is asked begins and ends transactions of any."""
    brokers = [await world.broker() for _ in range(3)]
    clients = [await each.client() for each in brokers]
    known = {each.url for each in brokers}
    pictures = []
    for broker, client in zip(brokers, clients, strict=True):
        await until(lambda broker=broker: len(broker.service.transactions.partitions.snapshot()) == 16)
        client.send(txn_requests.watch_assignments(1))
        pictures.append(watched(await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE)))
        found = {number: (await lookup(client, number)).brokerServiceUrl for number in range(16)}
        assert found == pictures[-1]
    assert pictures[0] == pictures[1] == pictures[2]
    assert set(pictures[0].values()) <= known
    for number, client in enumerate(clients):
        txn = await client.begin(number)
        await clients[number - 1].end(txn, commit=True)
        assert (await state_of(brokers[number], txn)).state == "COMMITTED"
    begun = [await client.begin(7) for client in clients]
    assert len(set(begun)) == 3


@pytest.mark.req("R473-45")
async def test_the_watch_follows_the_leaders(world: Any, until: Any) -> None:
    """The leader of all partitions is killed: watches at another broker are told once others lead; open transactions go on."""
    first, second = await world.broker(), await world.broker()
    leaving = await first.client()
    txn = await leaving.begin(3)
    client = await second.client()
    client.send(txn_requests.watch_assignments(1))
    update = await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE)
    assert watched(update) == dict.fromkeys(range(16), first.url)
    await first.kill()
    pictures = []

    async def told() -> dict[int, str]:
        pictures.append(watched(await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE)))
        return pictures[-1]

    while await told() != dict.fromkeys(range(16), second.url):
        await world.advance(1)
    assert await client.end(txn, commit=True) == txn


async def test_an_incomplete_picture_is_told_again_every_second_and_a_complete_one_not(world: Any, broker: Any) -> None:
    client = await broker.client(answers_pings=True)
    transactions = broker.service.transactions
    client.send(txn_requests.watch_assignments(1))
    assert len(watched(await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE))) == 16
    await world.advance(2)
    assert await client.settle() == []
    transactions.partitions._show(4, None)
    picture = watched(await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE))
    assert set(range(16)) - set(picture) == {4}
    await client.settle()
    client.inbox.clear()
    for _ in range(2):
        await world.advance(1)
        assert watched(await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE)) == picture
    while len(picture) < 16:  # compared with the store
        await world.advance(1)
        picture = watched(await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE))
    await client.settle()
    client.inbox.clear()
    await world.advance(3)
    assert await client.settle() == []


async def test_a_closed_watch_is_told_nothing(world: Any, broker: Any, until: Any) -> None:
    client, gone = await broker.client(), await broker.client()
    transactions = broker.service.transactions
    client.send(txn_requests.watch_assignments(1), txn_requests.watch_assignments(2), txn_requests.watch_assignments(1))
    gone.send(txn_requests.watch_assignments(1))
    await gone.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE)
    await client.settle()
    assert len(transactions.watches) == 3
    client.send(txn_requests.watch_assignments(9), txn_requests.close_watch(9), txn_requests.close_watch(77))
    client.send(txn_requests.close_watch(2))
    await client.settle()
    client.inbox.clear()
    transactions.partitions._show(4, None)
    update = await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE)
    assert update.watch_id == 1
    assert await client.settle() == []
    gone.close()
    client.close()
    await until(lambda: len(transactions.watches) == 0)


async def test_watches_of_a_connection_are_bounded(world: Any) -> None:
    client = await (await world.broker(scalable=ScalableConfig(max_watches_per_connection=2))).client()
    for number in range(3):
        client.send(txn_requests.watch_assignments(number))
    updates = [await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE) for _ in range(3)]
    assert [each.error for each in updates if each.HasField("error")] == [Overloaded.code]


async def test_a_broker_with_another_number_of_coordinators_does_not_start(world: Any, broker: Any) -> None:
    with pytest.raises(ConfigError, match="set it to 16"):
        await world.broker(transactions=TransactionConfig(coordinators=4))


async def test_a_timeout_ends_a_transaction(world: Any, broker: Any, client: RawClient, until: Any) -> None:
    txn = await client.begin(2, 3000)
    await world.advance(2)
    assert (await state_of(broker, txn)).is_open
    await world.advance(2)
    assert (await state_of(broker, txn)).state == "ABORTED"
    with pytest.raises(InvalidTransactionStatus):
        await client.end(txn, commit=True)


# Collection, wherever topics are.


def late_op(topic: str, incarnation: str) -> TxnOp:
    return TxnOp(kind="write", segment=topic, position="0:0", incarnation=incarnation)


@pytest.mark.req("R473-21")
@pytest.mark.parametrize("serves", ["here", "elsewhere", "nobody", "deleted"])
async def test_ops_behind_everybodys_back_are_collected_by_the_owner_of_their_topic(
    world: Any, until: Any, serves: str
) -> None:
    """An op of an ended transaction that its owner never heard of: a zombie's, or one whose append had no answer."""
    settings = TransactionConfig(retention_seconds=5, collect_seconds=5)
    leader, other = await world.broker(transactions=settings), await world.broker(transactions=settings)
    client = await leader.client(answers_pings=True)
    names = [f"{TOPIC}-{number}" for number in range(100)]
    is_near = {each: (await leader.ownership.find(TopicName.parse(each))).is_mine for each in names}
    topic = next(each for each in names if is_near[each] == (serves != "elsewhere"))
    incarnation = "none"
    if serves != "deleted":
        owner = other if serves == "elsewhere" else leader
        writer = await owner.client(answers_pings=True)
        await writer.producer(topic)
        incarnation = owner.topic(topic).transactions._log.incarnation
        if serves == "nobody":
            await owner.service.unload(owner.topic(topic))
    txn = await client.begin(1)
    store = leader.service.transactions.store
    await client.end(txn, commit=True)
    await store.append_op(txn, late_op(topic, incarnation))
    assert leader.service.transactions.partitions.leads(0)
    for _ in range(6):
        await world.advance(5)
        await client.settle()
    assert await store.ops(txn) == []
    assert await store.header(txn, fresh=True) is None


@pytest.mark.req("R473-21")
@pytest.mark.parametrize("scalable", [True, False])
async def test_the_owner_is_asked_over_http(scalable: bool) -> None:
    config = StandaloneConfig(
        scalable_topics=ScalableConfig(enabled=scalable),
        transactions=TransactionConfig(retention_seconds=0, collect_seconds=0.1),
    )
    async with InProcessBroker(brokers=2, config=config) as brokers:
        first, second = [node.service for node in brokers.nodes]
        partitions = first.transactions.partitions
        leader, other = (first, second) if partitions is not None and partitions.leads(0) else (second, first)
        names = [TopicName.parse(f"{TOPIC}-{number}") for number in range(100)]
        name = next(iter([each for each in names if not (await leader.ownership.find(each)).is_mine]))
        topic = await other.topic(name, create=True)
        txn = await leader.transactions.coordinator.new(0, 60_000, owner=None)
        store = leader.transactions.store
        await store.append_op(txn, late_op(str(name), topic.transactions._log.incarnation))
        await leader.transactions.coordinator.end(txn, commit=True)
        async with asyncio.timeout(15):
            while await store.header(txn, fresh=True) is not None:  # noqa: ASYNC110 - it goes by the machine's clock
                await asyncio.sleep(0.05)
        assert await store.ops(txn) == []
        assert str(name) not in leader.topics


async def test_a_coordinator_whose_serials_cannot_be_read_refuses_alone() -> None:
    """By the name of the record; the SDK takes the next coordinator."""
    async with InProcessBroker() as broker, braid.connect(broker.service_url) as client:
        handle = broker.standalone.metadata.handle("somebody")
        for number in range(3):
            await handle.put(serial_key(number), b'{"next":"x"}')
        await handle.close()
        begun = [await client.begin_transaction() for _ in range(32)]
        assert {txn.id.most for txn in begun} == set(range(3, 16))
        raw = await RawClient.connect(broker.service_url, is_braid=True)
        with pytest.raises(MetadataFailure, match=r"The record /txn-serial/2 cannot be read"):
            await ask(raw, txn_requests.new(5, 2, 60_000), 5)
        raw.close()
        for txn in begun:
            await txn.commit()
