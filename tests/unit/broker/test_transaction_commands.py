"""Transactions on the wire: beginning and ending them, sub-transactions, refusals, and what topics show of it."""

from __future__ import annotations

from typing import Any

import pytest

from braid.errors import (
    InvalidTransactionStatus,
    NotAllowed,
    Overloaded,
    TransactionConflict,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
    from_code,
)
from braid.model.names import TopicName
from braid.model.txn import TxnId
from braid.testing.raw_client import RawClient
from braid.txn.config import TransactionConfig
from braid.wire import messages as pb
from braid.wire import requests, txn_requests
from braid.wire.client import Delivery
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, InitialPosition, ServerError, TxnAction

TOPIC = "persistent://public/default/in-transactions"
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
    with pytest.raises(TransactionNotFound, match=str(UNKNOWN.with_sub(4))):
        await client.end(UNKNOWN.with_sub(4), commit=True)


async def test_a_sub_transaction_of_no_decider_is_unknown_to_every_command(broker: Any, until: Any) -> None:
    """Its entries would be stored and vanish at the commit; only a decider's sub-transactions exist."""
    client = await broker.client(is_braid=True)
    txn = await client.begin(2)
    stray = txn.with_sub(7)
    await client.producer(TOPIC)
    await client.subscribe(TOPIC, permits=10)
    stored = await client.store(b"plain", 0)
    assert (await refusal_of(client, stray, 1))[0] == TransactionConflict.code
    assert (await client.acked(stored, txn=stray)).error == TransactionConflict.code
    for commit in (True, False):
        with pytest.raises(TransactionNotFound, match=str(stray)):
            await client.end(stray, commit=commit)
    with pytest.raises(TransactionNotFound, match=str(stray)):
        await ask(client, txn_requests.add_partitions(90, stray, [TOPIC]), 90)
    assert not (await client.acked(stored, txn=txn)).HasField("error")  # what was refused holds nothing
    await client.end(txn, commit=True)
    topic = broker.topic(TOPIC)
    await until(lambda: not topic.transactions._held and not topic.subscriptions["sub"].pending_acks._roots)
    assert await broker.service.transactions.store.ops(txn) == []
    decider = await client.begin(is_decider=True)
    with pytest.raises(NotAllowed, match=f"{decider} decides it"):
        await client.end(decider.with_sub(1), commit=True)


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


async def test_what_was_open_when_they_were_switched_off_still_times_out(world: Any, until: Any) -> None:
    broker = await world.broker(transactions=TransactionConfig(enabled=False))
    coordinator = broker.service.transactions.coordinator  # as a broker with transactions would have left it
    txn = await coordinator.new(0, 2000, owner=None)
    partitions = broker.service.transactions.partitions
    await until(lambda: partitions is not None and partitions.leads(0))
    await world.advance(4)
    assert (await state_of(broker, txn)).state == "ABORTED"


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


# What a transaction does to topics, seen from the wire.


async def refusal_of(client: RawClient, txn: TxnId, sequence_id: int) -> tuple[int, str]:
    client.publish(b"late", sequence_id, txn=txn)
    error = await client.expect(CommandType.SEND_ERROR)
    assert error.sequence_id == sequence_id
    return error.error, error.message


@pytest.mark.req("R473-41")
@pytest.mark.parametrize("is_braid", [True, False])
async def test_a_publish_in_what_is_not_open_is_refused(broker: Any, is_braid: bool) -> None:
    """With code 23 to those who understand it; others would connect anew and send it again for ever."""
    client = await broker.client(is_braid=is_braid)
    await client.producer(TOPIC)
    committed, aborted = await client.begin(1), await client.begin(2)
    await client.store(b"kept", 0, txn=committed)
    await client.store(b"dropped", 1, txn=aborted)
    await client.end(committed, commit=True)
    await client.end(aborted, commit=False)
    for number, txn in enumerate((committed, aborted, UNKNOWN), 2):
        code, text = await refusal_of(client, txn, number)
        assert code == (TransactionConflict.code if is_braid else NotAllowed.code)
        assert is_braid or text.startswith("TransactionConflict: ")
    await client.store(b"plain", 9)
    await client.subscribe(TOPIC, permits=10, initial=InitialPosition.EARLIEST)
    assert await client.payloads(2) == [b"kept", b"plain"]
    assert [each for each in await client.settle() if isinstance(each, Delivery)] == []


@pytest.mark.req("R473-23", "R473-34", "R473-37")
@pytest.mark.parametrize("commit", [True, False])
async def test_no_broker_is_told_anything_when_a_transaction_ends(world: Any, until: Any, commit: bool) -> None:
    """3 brokers, a topic on each, ended at one of them: no command and no call goes to another, and all learn the outcome."""
    brokers = [await world.broker() for _ in range(3)]
    writers = {}
    for number in range(1000):
        topic = f"{TOPIC}-{number}"
        found = await brokers[0].ownership.find(TopicName.parse(topic))
        owner = next(each for each in brokers if each.url == found.broker.service_url)
        if owner not in writers:
            writers[owner] = (topic, await owner.client(answers_pings=True))
        if len(writers) == 3:
            break
    assert len(writers) == 3
    ender = writers[brokers[0]][1]
    txn = await ender.begin(4)
    for topic, client in writers.values():
        await client.producer(topic)
        await client.subscribe(topic, permits=10, initial=InitialPosition.EARLIEST)
        await client.store(b"in", 0, txn=txn)
        await client.store(b"behind", 1)
    heard: list[tuple[str, int]] = []
    for broker in brokers:
        note_commands(broker, heard)
        broker.service.remote_segments = None
    await ender.end(txn, commit=commit)
    for _topic, client in writers.values():
        assert await client.payloads(2 if commit else 1) == ([b"in", b"behind"] if commit else [b"behind"])
    assert [each for each in heard if each[1] not in (CommandType.PING, CommandType.PONG)] == [
        (brokers[0].url, CommandType.END_TXN)
    ]


def note_commands(broker: Any, heard: list[tuple[str, int]]) -> None:
    for connection in broker.server.connections:
        real = connection._command

        def noted(command: Any, _real: Any = real) -> None:
            heard.append((broker.url, command.type))
            _real(command)

        connection._command = noted
