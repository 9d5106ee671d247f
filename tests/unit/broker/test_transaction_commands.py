"""Transactions on the wire: beginning and ending them, finding their coordinators, sub-transactions, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from braid.errors import (
    ConfigError,
    InvalidTransactionStatus,
    NotAllowed,
    Overloaded,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
    from_code,
)
from braid.model.txn import TxnId
from braid.scalable.config import ScalableConfig
from braid.testing.raw_client import RawClient
from braid.txn.config import TransactionConfig
from braid.wire import messages as pb
from braid.wire import requests, txn_requests
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, LookupResult, ServerError, TxnAction

ASSIGN = "persistent://pulsar/system/transaction_coordinator_assign"
UNKNOWN = TxnId.of(3, 777)


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


# 50 to 57.


@pytest.mark.req("R473-32", "R473-36")
async def test_new_and_end(world: Any, broker: Any, client: RawClient) -> None:
    txn = await client.begin(5, 30_000)
    assert (txn.most, txn.sub) == (5, 0)
    header = await state_of(broker, txn)
    assert header.state == "OPEN"
    assert header.timeout_ms == header.created_ms + 30_000
    assert await client.end(txn, commit=True) == txn
    assert (await state_of(broker, txn)).state == "COMMITTED"
    other = await client.begin(5, 30_000)
    assert other != txn
    await client.end(other, commit=False)
    assert (await state_of(broker, other)).state == "ABORTED"


@pytest.mark.req("R473-36")
async def test_the_scalable_flag_makes_no_difference(broker: Any, client: RawClient) -> None:
    """Clients of both ages: one transaction system (decision 5)."""
    client.send(encode(CommandType.NEW_TXN, pb.CommandNewTxn(request_id=70, txn_ttl_millis=1000, tc_id=1)))
    old = await client.answer(70)
    assert not old.HasField("error")
    assert old.HasField("txnid_most_bits")
    txn = TxnId(old.txnid_most_bits, old.txnid_least_bits)
    body = pb.CommandEndTxn(
        request_id=71, txnid_most_bits=txn.most, txnid_least_bits=txn.least, txn_action=enum_value(TxnAction.COMMIT)
    )
    client.send(encode(CommandType.END_TXN, body))
    reply = await client.expect(CommandType.END_TXN_RESPONSE)
    assert (reply.txnid_most_bits, reply.txnid_least_bits, reply.HasField("error")) == (*txn, False)


@pytest.mark.req("R473-36")
async def test_ending_again_is_fine_and_ending_otherwise_is_not(client: RawClient) -> None:
    txn = await client.begin()
    await client.end(txn, commit=True)
    await client.end(txn, commit=True)
    with pytest.raises(InvalidTransactionStatus):
        await client.end(txn, commit=False)


@pytest.mark.parametrize(
    ("ttl", "word"), [(0, "1 to"), (86_400_001, "86400000"), ((1 << 64) - 1, "1 to")], ids=["none", "long", "negative"]
)
async def test_absurd_timeouts_are_refused(client: RawClient, ttl: int, word: str) -> None:
    with pytest.raises(NotAllowed, match=word):
        await client.begin(0, ttl)


async def test_unknown_transactions_and_coordinators(client: RawClient) -> None:
    with pytest.raises(TransactionNotFound):
        await client.end(UNKNOWN, commit=True)
    with pytest.raises(TransactionCoordinatorNotFound):
        await client.begin(16)
    with pytest.raises(TransactionCoordinatorNotFound):
        await client.end(TxnId((1 << 64) - 1, (1 << 64) - 1), commit=True)
    with pytest.raises(NotAllowed, match="sub-transaction"):
        await client.end(UNKNOWN.with_sub(4), commit=True)


async def test_an_end_that_says_nothing_is_refused(broker: Any, client: RawClient) -> None:
    """Protobuf would read COMMIT out of it."""
    txn = await client.begin()
    body = pb.CommandEndTxn(request_id=9, txnid_most_bits=txn.most, txnid_least_bits=txn.least)
    with pytest.raises(NotAllowed, match="neither COMMIT nor ABORT"):
        await ask(client, encode(CommandType.END_TXN, body), 9)
    assert (await state_of(broker, txn)).is_open


async def test_a_full_coordinator_answers(world: Any) -> None:
    client = await (await world.broker(transactions=TransactionConfig(max_open_per_coordinator=2))).client()
    first = await client.begin(1)
    await client.begin(1)
    with pytest.raises(Overloaded, match="max_open_per_coordinator"):
        await client.begin(1)
    await client.begin(2)
    await client.end(first, commit=False)
    await client.begin(1)


@pytest.mark.req("R473-33")
async def test_adding_partitions_and_subscriptions_is_accepted_and_writes_nothing(broker: Any, client: RawClient) -> None:
    txn = await client.begin()
    writes = []
    store = broker.service.metadata
    for name in ("put", "append", "delete"):
        real = getattr(store, name)

        async def noted(*given: Any, _real: Any = real, **named: Any) -> Any:
            writes.append(given[0])
            return await _real(*given, **named)

        setattr(store, name, noted)
    topics = ["persistent://public/default/a", "segment://public/default/b/0000-ffff-0", "not even a name"]
    reply = await ask(client, txn_requests.add_partitions(50, txn, topics), 50)
    assert TxnId(reply.txnid_most_bits, reply.txnid_least_bits) == txn
    reply = await ask(client, txn_requests.add_subscriptions(51, txn, [(topics[0], "sub")]), 51)
    assert TxnId(reply.txnid_most_bits, reply.txnid_least_bits) == txn
    assert [each for each in writes if each.startswith("/txn")] == []
    await client.end(txn, commit=True)
    assert [each for each in writes if each.startswith("/txn")] == [f"/txn/{txn}"]


@pytest.mark.req("R473-33")
async def test_adding_to_what_is_over_or_unknown_is_refused(client: RawClient) -> None:
    txn = await client.begin()
    await client.end(txn, commit=False)
    with pytest.raises(InvalidTransactionStatus):
        await ask(client, txn_requests.add_partitions(50, txn, ["persistent://public/default/a"]), 50)
    with pytest.raises(TransactionNotFound):
        await ask(client, txn_requests.add_subscriptions(51, UNKNOWN, [("persistent://public/default/a", "sub")]), 51)


@pytest.mark.req("R473-23", "R473-37")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CommandType.END_TXN_ON_PARTITION, pb.CommandEndTxnOnPartition(request_id=5, txnid_most_bits=1, topic="t")),
        (CommandType.END_TXN_ON_SUBSCRIPTION, pb.CommandEndTxnOnSubscription(request_id=5, txnid_most_bits=1)),
    ],
)
async def test_participants_are_not_told_by_commands(client: RawClient, kind: CommandType, body: Any) -> None:
    client.send(encode(kind, body))
    reply = await client.expect(CommandType(kind + 1))
    assert (reply.request_id, reply.error, reply.txnid_most_bits) == (5, ServerError.NOT_ALLOWED_ERROR, 1)
    await client.settle()


@pytest.mark.req("R473-34")
@pytest.mark.parametrize("commit", [True, False])
async def test_an_end_is_one_write_however_much_was_named_before(broker: Any, client: RawClient, commit: bool) -> None:
    txn = await client.begin()
    await ask(client, txn_requests.add_partitions(50, txn, [f"persistent://public/default/t{n}" for n in range(200)]), 50)
    writes, scans = [], []
    store = broker.service.metadata
    put, scan = store.put, store.scan

    async def noted(*given: Any, **named: Any) -> Any:
        writes.append((given[0], named.get("expected")))
        return await put(*given, **named)

    def scanned(*given: Any, **named: Any) -> Any:
        scans.append(given)
        return scan(*given, **named)

    store.put, store.scan = noted, scanned
    before = (await broker.service.transactions.store.header(txn, fresh=True)).version
    await client.end(txn, commit=commit)
    assert [each for each in writes if each[0].startswith("/txn")] == [(f"/txn/{txn}", before)]
    assert scans == []


# Whose transaction it is.


def principal(broker: Any, client: RawClient, name: str) -> None:
    """What authentication would have said of the only connection so far without a name."""
    (link,) = [each.link for each in broker.server.connections if each.link.principal is None]
    link.principal = name


async def test_a_foreign_transaction_is_one_that_does_not_exist(broker: Any) -> None:
    alice = await broker.client(is_braid=True)
    principal(broker, alice, "alice")
    bob = await broker.client(is_braid=True)
    principal(broker, bob, "bob")
    txn = await alice.begin(0, is_decider=True)
    assert (await state_of(broker, txn)).owner == "alice"
    for frame in (
        txn_requests.end(90, txn, TxnAction.COMMIT),
        txn_requests.add_partitions(90, txn, ["persistent://public/default/a"]),
        txn_requests.add_subscriptions(90, txn, [("persistent://public/default/a", "sub")]),
        txn_requests.new_sub(90, txn),
        txn_requests.decide(90, txn, []),
        txn_requests.renew(90, txn, 1000),
    ):
        with pytest.raises(TransactionNotFound):
            await ask(bob, frame, 90)
    assert (await state_of(broker, txn)).is_open
    await alice.end(txn, commit=True)


# Switched off.


async def test_switched_off_every_command_is_refused_in_its_own_reply(world: Any) -> None:
    broker = await world.broker(transactions=TransactionConfig(enabled=False))
    client = await broker.client(is_braid=True)
    for frame in (
        txn_requests.new(6, 0, 1000),
        txn_requests.end(6, UNKNOWN, TxnAction.COMMIT),
        txn_requests.add_partitions(6, UNKNOWN, ["persistent://public/default/a"]),
        txn_requests.add_subscriptions(6, UNKNOWN, [("persistent://public/default/a", "sub")]),
        txn_requests.connect(6, 0),
        txn_requests.new_sub(6, UNKNOWN),
        txn_requests.decide(6, UNKNOWN, [1]),
        txn_requests.renew(6, UNKNOWN, 1000),
        requests.partitioned_metadata(6, ASSIGN),
        requests.lookup(6, f"{ASSIGN}-partition-0"),
    ):
        with pytest.raises(NotAllowed, match=r"transactions\.enabled"):
            await ask(client, frame, 6)
    client.send(txn_requests.watch_assignments(3))
    update = await client.expect(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE)
    assert (update.watch_id, update.error) == (3, ServerError.NOT_ALLOWED_ERROR)
    fresh = await broker.client(handshake=False)
    fresh.send(requests.connect("test"))
    flags = (await fresh.expect(CommandType.CONNECTED)).feature_flags
    assert not flags.supports_tc_metadata_discovery


# Coordinators.


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


# Sub-transactions.


async def test_sub_transactions_of_a_decider(broker: Any) -> None:
    client = await broker.client(is_braid=True)
    decider = await client.begin(2, is_decider=True)
    subs = []
    for number in (80, 81, 82):
        reply = await ask(client, txn_requests.new_sub(number, decider), number)
        subs.append(TxnId(reply.txnid_most_bits, reply.txnid_least_bits))
    assert [each.root for each in subs] == [decider] * 3
    assert len({each.sub for each in subs} - {0}) == 3
    before = (await state_of(broker, decider)).timeout_ms
    await ask(client, txn_requests.renew(83, decider, 120_000), 83)
    assert (await state_of(broker, decider)).timeout_ms == before + 60_000
    winners = [subs[0].sub, subs[2].sub]
    for number in (84, 85):
        reply = await ask(client, txn_requests.decide(number, decider, winners), number)
        assert TxnId(reply.txnid_most_bits, reply.txnid_least_bits) == decider
    header = await state_of(broker, decider)
    assert [header.outcome(each.sub) for each in subs] == ["COMMITTED", "ABORTED", "COMMITTED"]
    for frame in (
        txn_requests.decide(86, decider, winners[:1]),
        txn_requests.renew(86, decider, 1000),
        txn_requests.new_sub(86, decider),
    ):
        with pytest.raises(InvalidTransactionStatus):
            await ask(client, frame, 86)


async def test_only_a_decider_has_sub_transactions(broker: Any) -> None:
    client = await broker.client(is_braid=True)
    plain = await client.begin()
    for frame in (
        txn_requests.new_sub(86, plain),
        txn_requests.decide(86, plain, [1]),
        txn_requests.renew(86, plain, 1000),
    ):
        with pytest.raises(NotAllowed, match="decider"):
            await ask(client, frame, 86)
    decider = await client.begin(is_decider=True)
    with pytest.raises(NotAllowed, match="winners are numbers from 1"):
        await ask(client, txn_requests.decide(87, decider, [0]), 87)
    with pytest.raises(TransactionNotFound):
        await ask(client, txn_requests.new_sub(88, UNKNOWN), 88)
    with pytest.raises(NotAllowed, match="sub-transaction"):
        await ask(client, txn_requests.new_sub(89, decider.with_sub(1)), 89)


async def test_sub_transactions_are_for_clients_that_know_them(broker: Any) -> None:
    client = await broker.client()
    with pytest.raises(NotAllowed, match="Braid's own clients"):
        await client.begin(is_decider=True)
    client.send(txn_requests.new_sub(5, UNKNOWN))
    await client.expect_close()
