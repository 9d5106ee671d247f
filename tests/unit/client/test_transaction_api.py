"""What applications, clients and brokers say of transactions, compared with what there was before: nothing is gone, nothing new
has to be given, and what only Pulsar's own coordinators said is not said."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
from tests.unit.client.scalable_cluster import TOPIC, Cluster

import braid
from braid.broker.connection import BrokerConnection
from braid.client import blocking, client, consumer, producer, queue_consumer, stream_consumer, transactions
from braid.wire import messages
from braid.wire.types import CommandType, ServerError, TxnAction

ANSWER = {"request_id": 1, "txnid_least_bits": 2, "txnid_most_bits": 3, "error": 4, "message": 5}
ASKED = {"request_id": 1, "txnid_least_bits": 2, "txnid_most_bits": 3}
UPSTREAM: dict[str, dict[str, int]] = {
    "CommandTcClientConnectRequest": {"request_id": 1, "tc_id": 2},
    "CommandTcClientConnectResponse": {"request_id": 1, "error": 2, "message": 3},
    "CommandNewTxn": {"request_id": 1, "txn_ttl_millis": 2, "tc_id": 3},
    "CommandNewTxnResponse": ANSWER,
    "CommandAddPartitionToTxn": {**ASKED, "partitions": 4},
    "CommandAddPartitionToTxnResponse": ANSWER,
    "CommandAddSubscriptionToTxn": {**ASKED, "subscription": 4},
    "CommandAddSubscriptionToTxnResponse": ANSWER,
    "CommandEndTxn": {**ASKED, "txn_action": 4},
    "CommandEndTxnResponse": ANSWER,
    "Subscription": {"topic": 1, "subscription": 2},
    "CommandSend": {"txnid_least_bits": 4, "txnid_most_bits": 5},
    "CommandAck": {"txnid_least_bits": 6, "txnid_most_bits": 7},
    "MessageMetadata": {"txnid_least_bits": 22, "txnid_most_bits": 23},
}
"""The fields that clients of Pulsar 4 use, with their tags."""
NUMBERS = {
    "NEW_TXN": 50,
    "NEW_TXN_RESPONSE": 51,
    "ADD_PARTITION_TO_TXN": 52,
    "ADD_PARTITION_TO_TXN_RESPONSE": 53,
    "ADD_SUBSCRIPTION_TO_TXN": 54,
    "ADD_SUBSCRIPTION_TO_TXN_RESPONSE": 55,
    "END_TXN": 56,
    "END_TXN_RESPONSE": 57,
    "TC_CLIENT_CONNECT_REQUEST": 62,
    "TC_CLIENT_CONNECT_RESPONSE": 63,
}
ERRORS = {
    "TRANSACTION_COORDINATOR_NOT_FOUND": 20,
    "INVALID_TXN_STATUS": 21,
    "NOT_ALLOWED_ERROR": 22,
    "TRANSACTION_CONFLICT": 23,
    "TRANSACTION_NOT_FOUND": 24,
}
SDK: dict[tuple[type[Any], str], list[tuple[str, object]]] = {
    (client.Client, "transaction"): [("timeout", None)],
    (client.Client, "begin_transaction"): [("timeout", None)],
    (transactions.Transaction, "commit"): [],
    (transactions.Transaction, "abort"): [],
}
"""Calls of the SDK with all their parameters and defaults."""
TAKE_ONE = [
    (producer.Producer, "send"),
    (producer.Producer, "send_nowait"),
    (consumer.Consumer, "acknowledge"),
    (consumer.Consumer, "acknowledge_cumulative"),
    (queue_consumer.QueueConsumer, "acknowledge"),
    (stream_consumer.StreamConsumer, "acknowledge_cumulative"),
    (blocking.Producer, "send"),
    (blocking.Consumer, "acknowledge"),
    (blocking.QueueConsumer, "acknowledge"),
    (blocking.StreamConsumer, "acknowledge_cumulative"),
]
"""Calls that join a transaction by `txn=`, and need none."""


@pytest.mark.req("R473-6")
@pytest.mark.parametrize("name", UPSTREAM)
def test_every_field_has_the_tag_it_had_and_nothing_new_is_required(name: str) -> None:
    descriptor = getattr(messages, name).DESCRIPTOR
    tags = {each.name: each.number for each in descriptor.fields}
    assert {field: tags.get(field) for field in UPSTREAM[name]} == UPSTREAM[name]
    others = [each for each in descriptor.fields if each.name not in UPSTREAM[name]]
    if name.startswith(("CommandNew", "CommandAdd", "CommandEnd", "CommandTc")):
        assert not [each.name for each in others if each.is_required]
        # One that came with Pulsar 5, and such as no client but our own sends.
        assert not [each.name for each in others if each.name != "scalable" and each.number < 1000]


@pytest.mark.req("R473-6")
def test_commands_actions_and_errors_have_their_numbers() -> None:
    assert {name: int(CommandType[name]) for name in NUMBERS} == NUMBERS
    assert {name: int(ServerError[name]) for name in ERRORS} == ERRORS
    assert (int(TxnAction.COMMIT), int(TxnAction.ABORT)) == (0, 1)


@pytest.mark.req("R473-6")
@pytest.mark.parametrize("call", SDK, ids=lambda call: f"{call[0].__name__}.{call[1]}")
def test_calls_of_the_sdk_are_what_they_were(call: tuple[type[Any], str]) -> None:
    kind, name = call
    found = list(inspect.signature(getattr(kind, name)).parameters.values())[1:]
    assert [(each.name, each.default) for each in found] == SDK[call]


@pytest.mark.req("R473-6")
@pytest.mark.parametrize("call", TAKE_ONE, ids=lambda call: f"{call[0].__module__}.{call[1]}")
def test_what_joins_a_transaction_is_told_by_one_optional_parameter(call: tuple[type[Any], str]) -> None:
    kind, name = call
    found = inspect.signature(getattr(kind, name)).parameters
    assert "txn" in found, found
    assert (found["txn"].default, found["txn"].kind) == (None, inspect.Parameter.KEYWORD_ONLY)


@pytest.mark.req("R473-37")
@pytest.mark.parametrize("is_commit", [True, False], ids=["commit", "abort"])
async def test_participants_are_never_told_over_the_wire(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_commit: bool
) -> None:
    """Every command that any of three brokers receives while a transaction writes to a scalable and a regular topic,
    acknowledges, meets a split and ends: the client's own, and none of those with which coordinators told participants."""
    heard: Counter[CommandType] = Counter()
    command = BrokerConnection._command

    def noted(connection: BrokerConnection, received: Any) -> None:
        heard[CommandType(received.type)] += 1
        command(connection, received)

    monkeypatch.setattr(BrokerConnection, "_command", noted)
    regular = "persistent://public/default/regular"
    await cluster.create(4)
    async with (
        braid.connect(cluster.broker.service_urls) as made,
        made.producer(str(TOPIC), name="p") as scalable,
        made.producer(regular) as plain,
        made.queue_consumer(str(TOPIC), "q", initial="earliest") as queue,
    ):
        await scalable.send(b"input", key="k")
        txn = await made.begin_transaction()
        await queue.acknowledge(await queue.receive(10), txn=txn)
        for number in range(8):
            await scalable.send(b"x", key=f"{number}", txn=txn)
        await cluster.split(0)
        for number in range(8):
            await scalable.send(b"y", key=f"{number}", txn=txn)
        await plain.send(b"z", txn=txn)
        await (txn.commit() if is_commit else txn.abort())
        if is_commit:
            assert len([await queue.receive(10) for _ in range(16)]) == 16
        else:
            assert (await queue.receive(10)).payload == b"input"
    assert heard[CommandType.END_TXN] == 1
    assert heard[CommandType.NEW_TXN] == 1
    told = {each for each in heard if each.name.startswith(("END_TXN_ON", "END_TXN_RESPONSE"))}
    assert told == set()
