"""What a client asks of transaction coordinators: one function per request, arguments in, the whole frame out.

Owns shapes only. A transaction is `(most, least)`, both unsigned, as everywhere on the wire. `scalable` is set on everything:
Braid has one transaction system and does not look at it, Pulsar's brokers route by it.
"""

from __future__ import annotations

from collections.abc import Iterable

from braid.wire import messages
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, TxnAction

Txn = tuple[int, int]


def watch_assignments(watch_id: int) -> bytes:
    """WATCH_TC_ASSIGNMENTS: answered by an update, and by one more after each change."""
    return encode(CommandType.WATCH_TC_ASSIGNMENTS, messages.CommandWatchTcAssignments(watch_id=watch_id))


def close_watch(watch_id: int) -> bytes:
    """WATCH_TC_ASSIGNMENTS_CLOSE; not answered."""
    return encode(CommandType.WATCH_TC_ASSIGNMENTS_CLOSE, messages.CommandWatchTcAssignmentsClose(watch_id=watch_id))


def connect(request_id: int, coordinator: int) -> bytes:
    """TC_CLIENT_CONNECT_REQUEST: whether this broker serves that coordinator."""
    body = messages.CommandTcClientConnectRequest(request_id=request_id, tc_id=coordinator, scalable=True)
    return encode(CommandType.TC_CLIENT_CONNECT_REQUEST, body)


def new(request_id: int, coordinator: int, ttl_ms: int, *, is_decider: bool = False) -> bytes:
    """NEW_TXN; a decider is Braid's own and has sub-transactions."""
    body = messages.CommandNewTxn(request_id=request_id, tc_id=coordinator, txn_ttl_millis=ttl_ms, scalable=True)
    if is_decider:
        body.is_decider = True
    return encode(CommandType.NEW_TXN, body)


def add_partitions(request_id: int, txn: Txn, topics: Iterable[str]) -> bytes:
    """ADD_PARTITION_TO_TXN; Braid's broker needs none."""
    body = messages.CommandAddPartitionToTxn(
        request_id=request_id, txnid_most_bits=txn[0], txnid_least_bits=txn[1], partitions=topics, scalable=True
    )
    return encode(CommandType.ADD_PARTITION_TO_TXN, body)


def add_subscriptions(request_id: int, txn: Txn, subscriptions: Iterable[tuple[str, str]]) -> bytes:
    """ADD_SUBSCRIPTION_TO_TXN, of (topic, subscription); Braid's broker needs none."""
    body = messages.CommandAddSubscriptionToTxn(
        request_id=request_id, txnid_most_bits=txn[0], txnid_least_bits=txn[1], scalable=True
    )
    for topic, subscription in subscriptions:
        body.subscription.add(topic=topic, subscription=subscription)
    return encode(CommandType.ADD_SUBSCRIPTION_TO_TXN, body)


def end(request_id: int, txn: Txn, action: TxnAction) -> bytes:
    """END_TXN; can be repeated."""
    body = messages.CommandEndTxn(
        request_id=request_id,
        txnid_most_bits=txn[0],
        txnid_least_bits=txn[1],
        txn_action=enum_value(action),
        scalable=True,
    )
    return encode(CommandType.END_TXN, body)


def new_sub(request_id: int, decider: Txn) -> bytes:
    """NEW_SUB_TXN, of Braid: the answer's least bits name the sub-transaction."""
    body = messages.CommandNewSubTxn(request_id=request_id, txnid_most_bits=decider[0], txnid_least_bits=decider[1])
    return encode(CommandType.NEW_SUB_TXN, body)


def decide(request_id: int, decider: Txn, winners: Iterable[int]) -> bytes:
    """DECIDE_TXN, of Braid: commit the decider and these of its sub-transactions, abort the others. Can be repeated."""
    body = messages.CommandDecideTxn(
        request_id=request_id, txnid_most_bits=decider[0], txnid_least_bits=decider[1], winners=winners
    )
    return encode(CommandType.DECIDE_TXN, body)


def renew(request_id: int, decider: Txn, ttl_ms: int) -> bytes:
    """RENEW_TXN, of Braid: the decider times out so long after now."""
    body = messages.CommandRenewTxn(
        request_id=request_id, txnid_most_bits=decider[0], txnid_least_bits=decider[1], txn_ttl_millis=ttl_ms
    )
    return encode(CommandType.RENEW_TXN, body)
