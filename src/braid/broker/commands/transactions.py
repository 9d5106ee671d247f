"""Commands 50 to 63, 79 to 81 and 1000 to 1005: transactions, their coordinators, and sub-transactions.

Every broker serves every coordinator partition: who leads one is where clients are sent, what decides is the compare-and-swap
on a header. No command asks a participant for anything, and END_TXN_ON_* have nothing to do here. Refusals are answered in the
command's own reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from braid.broker.commands.handler import Handler
from braid.broker.commands.scalable import check_watches, close_soon
from braid.errors import BraidError, InvalidArgument, NotAllowed
from braid.model.txn import TxnId
from braid.wire import messages
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType, TxnAction

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection
    from braid.broker.transactions import Transactions


def _transactions(connection: BrokerConnection) -> Transactions:
    found = connection.service.transactions
    found.check_enabled()
    return found


def _txn(body: Any) -> TxnId:
    return TxnId(body.txnid_most_bits, body.txnid_least_bits)


def _named(body: Any, transactions: Transactions) -> TxnId:
    """The transaction a command is about."""
    txn = _txn(body)
    transactions.check_coordinator(txn.most)
    return txn


def _answer(connection: BrokerConnection, kind: CommandType, reply: Callable[..., Any], request_id: int, txn: TxnId) -> None:
    body = reply(request_id=request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least)
    connection.link.write(encode(kind, body))


def _refusing(kind: CommandType, reply: Callable[..., Any]) -> Callable[[Any, BraidError], bytes]:
    """How a command whose reply names a transaction is refused."""

    def fail(body: Any, failure: BraidError) -> bytes:
        refused = reply(request_id=body.request_id, error=enum_value(failure.code), message=failure.message)
        if hasattr(body, "txnid_most_bits"):
            refused.txnid_most_bits, refused.txnid_least_bits = _txn(body)
        return encode(kind, refused)

    return fail


# Transactions.


async def connect(connection: BrokerConnection, body: messages.CommandTcClientConnectRequest) -> None:
    """A client is about to use this broker for a coordinator partition."""
    transactions = _transactions(connection)
    transactions.check_coordinator(body.tc_id)
    reply = messages.CommandTcClientConnectResponse(request_id=body.request_id)
    connection.link.write(encode(CommandType.TC_CLIENT_CONNECT_RESPONSE, reply))


def connect_failed(body: messages.CommandTcClientConnectRequest, failure: BraidError) -> bytes:
    reply = messages.CommandTcClientConnectResponse(
        request_id=body.request_id, error=enum_value(failure.code), message=failure.message
    )
    return encode(CommandType.TC_CLIENT_CONNECT_RESPONSE, reply)


async def new(connection: BrokerConnection, body: messages.CommandNewTxn) -> None:
    """Begin a transaction; its deadline counts from now."""
    transactions = _transactions(connection)
    transactions.check_coordinator(body.tc_id)
    if body.is_decider and not connection.link.is_braid:
        raise NotAllowed("Only Braid's own clients begin transactions with sub-transactions.")
    txn = await transactions.coordinator.new(
        body.tc_id, body.txn_ttl_millis, owner=connection.link.principal, is_decider=body.is_decider
    )
    _answer(connection, CommandType.NEW_TXN_RESPONSE, messages.CommandNewTxnResponse, body.request_id, txn)


async def add_partitions(connection: BrokerConnection, body: messages.CommandAddPartitionToTxn) -> None:
    """Nothing is noted: each write leaves its own record. The answer tells whether the transaction can still be used."""
    await _check_usable(connection, body)
    _answer(
        connection,
        CommandType.ADD_PARTITION_TO_TXN_RESPONSE,
        messages.CommandAddPartitionToTxnResponse,
        body.request_id,
        _txn(body),
    )


async def add_subscriptions(connection: BrokerConnection, body: messages.CommandAddSubscriptionToTxn) -> None:
    """As `add_partitions`: each acknowledgment leaves its own record."""
    await _check_usable(connection, body)
    _answer(
        connection,
        CommandType.ADD_SUBSCRIPTION_TO_TXN_RESPONSE,
        messages.CommandAddSubscriptionToTxnResponse,
        body.request_id,
        _txn(body),
    )


async def _check_usable(connection: BrokerConnection, body: Any) -> None:
    transactions = _transactions(connection)
    principal = connection.link.principal
    await transactions.coordinator.check(_named(body, transactions), principal, is_super=principal is None)


async def end(connection: BrokerConnection, body: messages.CommandEndTxn) -> None:
    """Decide: answered when it is decided, participants follow (R473-38)."""
    transactions = _transactions(connection)
    txn = _named(body, transactions)
    if not body.HasField("txn_action"):
        raise NotAllowed(f"END_TXN for transaction {txn} says neither COMMIT nor ABORT.")
    principal = connection.link.principal
    await transactions.coordinator.end(
        txn, commit=TxnAction(body.txn_action) is TxnAction.COMMIT, principal=principal, is_super=principal is None
    )
    _answer(connection, CommandType.END_TXN_RESPONSE, messages.CommandEndTxnResponse, body.request_id, txn)


async def end_on_participant(connection: BrokerConnection, body: Any) -> None:
    """What coordinators tell participants elsewhere; here these learn it from the header (R473-23, R473-37)."""
    raise NotAllowed("This broker's transactions end without telling topics and subscriptions; END_TXN is all there is.")


# Sub-transactions, for Braid's own clients.


async def new_sub(connection: BrokerConnection, body: messages.CommandNewSubTxn) -> None:
    """A further sub-transaction of a decider."""
    transactions = _transactions(connection)
    decider = _named(body, transactions)
    principal = connection.link.principal
    txn = await transactions.coordinator.new_sub(decider, principal=principal, is_super=principal is None)
    _answer(connection, CommandType.NEW_SUB_TXN_RESPONSE, messages.CommandNewSubTxnResponse, body.request_id, txn)


async def decide(connection: BrokerConnection, body: messages.CommandDecideTxn) -> None:
    """Commit a decider with those of its sub-transactions that count."""
    transactions = _transactions(connection)
    decider = _named(body, transactions)
    principal = connection.link.principal
    try:
        await transactions.coordinator.decide(decider, body.winners, principal=principal, is_super=principal is None)
    except InvalidArgument as error:
        raise NotAllowed(error.message) from error  # the wire has no word for it
    _answer(connection, CommandType.DECIDE_TXN_RESPONSE, messages.CommandDecideTxnResponse, body.request_id, decider)


async def renew(connection: BrokerConnection, body: messages.CommandRenewTxn) -> None:
    """Give a decider more time."""
    transactions = _transactions(connection)
    decider = _named(body, transactions)
    principal = connection.link.principal
    await transactions.coordinator.renew(decider, body.txn_ttl_millis, principal=principal, is_super=principal is None)
    _answer(connection, CommandType.RENEW_TXN_RESPONSE, messages.CommandRenewTxnResponse, body.request_id, decider)


# Who leads the coordinators.


async def watch(connection: BrokerConnection, body: messages.CommandWatchTcAssignments) -> None:
    """Tell who serves which coordinator partition, all of it, now and after each change."""
    transactions = _transactions(connection)
    number = body.watch_id
    if (old := connection.coordinator_watches.pop(number, None)) is not None:
        old.close()
    check_watches(connection)
    connection.coordinator_watches[number] = transactions.watches.open(number, connection.link.write)


def close_watch(connection: BrokerConnection, body: messages.CommandWatchTcAssignmentsClose) -> None:
    """End a watch; an unknown one is fine."""
    close_soon(connection, connection.coordinator_watches, "coordinator watch", body.watch_id)


def watch_failed(body: messages.CommandWatchTcAssignments, failure: BraidError) -> bytes:
    reply = messages.CommandWatchTcAssignmentsUpdate(
        watch_id=body.watch_id, error=enum_value(failure.code), message=failure.message
    )
    return encode(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE, reply)


HANDLERS: dict[int, Handler] = {
    CommandType.TC_CLIENT_CONNECT_REQUEST: Handler(connect, connect_failed),
    CommandType.NEW_TXN: Handler(new, _refusing(CommandType.NEW_TXN_RESPONSE, messages.CommandNewTxnResponse)),
    CommandType.ADD_PARTITION_TO_TXN: Handler(
        add_partitions,
        _refusing(CommandType.ADD_PARTITION_TO_TXN_RESPONSE, messages.CommandAddPartitionToTxnResponse),
    ),
    CommandType.ADD_SUBSCRIPTION_TO_TXN: Handler(
        add_subscriptions,
        _refusing(CommandType.ADD_SUBSCRIPTION_TO_TXN_RESPONSE, messages.CommandAddSubscriptionToTxnResponse),
    ),
    CommandType.END_TXN: Handler(end, _refusing(CommandType.END_TXN_RESPONSE, messages.CommandEndTxnResponse)),
    CommandType.END_TXN_ON_PARTITION: Handler(
        end_on_participant,
        _refusing(CommandType.END_TXN_ON_PARTITION_RESPONSE, messages.CommandEndTxnOnPartitionResponse),
    ),
    CommandType.END_TXN_ON_SUBSCRIPTION: Handler(
        end_on_participant,
        _refusing(CommandType.END_TXN_ON_SUBSCRIPTION_RESPONSE, messages.CommandEndTxnOnSubscriptionResponse),
    ),
    CommandType.NEW_SUB_TXN: Handler(new_sub, _refusing(CommandType.NEW_SUB_TXN_RESPONSE, messages.CommandNewSubTxnResponse)),
    CommandType.DECIDE_TXN: Handler(decide, _refusing(CommandType.DECIDE_TXN_RESPONSE, messages.CommandDecideTxnResponse)),
    CommandType.RENEW_TXN: Handler(renew, _refusing(CommandType.RENEW_TXN_RESPONSE, messages.CommandRenewTxnResponse)),
    CommandType.WATCH_TC_ASSIGNMENTS: Handler(watch, watch_failed),
}
