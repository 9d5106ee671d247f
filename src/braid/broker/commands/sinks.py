"""Commands 1006 to 1009, of Braid: batches of a sink, each begun once and told apart from what is in the output already.

Any broker serves any sink; its record decides. That a batch is in the output is an answer, not a refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from braid.broker.commands.handler import Handler
from braid.errors import BraidError, InvalidArgument, NotAllowed
from braid.model.txn import TxnId
from braid.txn.records import SinkBatch
from braid.wire import messages
from braid.wire.commands import encode, enum_value
from braid.wire.types import CommandType

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection
    from braid.broker.transactions import Transactions


def _transactions(connection: BrokerConnection) -> Transactions:
    found = connection.service.transactions
    found.check_enabled()
    return found


async def begin(connection: BrokerConnection, body: messages.CommandBeginSink) -> None:
    """The decider under which a batch is written; the same one for everybody who asks in the same run."""
    wanted = SinkBatch(body.sink, body.batch, body.run)
    if not body.HasField("batch"):
        raise NotAllowed(f"BEGIN_SINK for {body.sink[:100]!r} names no batch.")
    try:
        txn = await _transactions(connection).sinks.begin(wanted, body.txn_ttl_millis, owner=connection.link.principal)
    except InvalidArgument as error:
        raise NotAllowed(error.message) from error  # the wire has no word for it
    reply = messages.CommandBeginSinkResponse(request_id=body.request_id)
    if txn is None:
        reply.is_duplicate = True
    else:
        reply.txnid_most_bits, reply.txnid_least_bits = txn
    connection.link.write(encode(CommandType.BEGIN_SINK_RESPONSE, reply))


async def get(connection: BrokerConnection, body: messages.CommandGetSink) -> None:
    """How a sink stands, its last decision included; of one that nobody knows, nothing is said."""
    if not body.sink:
        raise NotAllowed("GET_SINK names no sink.")
    view, principal = await _transactions(connection).sinks.look(body.sink), connection.link.principal
    if view is not None and principal is not None and view.sink.value.owner not in (None, principal):
        view = None  # whose it is is nobody's business
    reply = messages.CommandGetSinkResponse(request_id=body.request_id)
    if view is not None and view.last is not None:
        reply.last_batch, reply.last_run = view.last, view.last_run or ""
    if view is not None and view.open is not None:
        reply.current_batch, reply.current_run = view.open.batch, view.sink.value.run
        reply.txnid_most_bits, reply.txnid_least_bits = TxnId.parse(view.open.txn)
    connection.link.write(encode(CommandType.GET_SINK_RESPONSE, reply))


def begin_failed(body: Any, failure: BraidError) -> bytes:
    reply = messages.CommandBeginSinkResponse(
        request_id=body.request_id, error=enum_value(failure.code), message=failure.message
    )
    return encode(CommandType.BEGIN_SINK_RESPONSE, reply)


def get_failed(body: Any, failure: BraidError) -> bytes:
    reply = messages.CommandGetSinkResponse(request_id=body.request_id, error=enum_value(failure.code), message=failure.message)
    return encode(CommandType.GET_SINK_RESPONSE, reply)


HANDLERS: dict[int, Handler] = {
    CommandType.BEGIN_SINK: Handler(begin, begin_failed),
    CommandType.GET_SINK: Handler(get, get_failed),
}
