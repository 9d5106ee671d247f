"""Commands this broker does not serve yet: each gets an answer its client survives, never silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from braid.errors import NotAllowed
from braid.wire import messages
from braid.wire.commands import encode, enum_value
from braid.wire.replies import error
from braid.wire.types import CommandType

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection

_CODE = enum_value(NotAllowed.code)


def _plain(feature: str) -> Callable[[BrokerConnection, Any], None]:
    def refuse(connection: BrokerConnection, body: Any) -> None:
        connection.link.write(error(body.request_id, NotAllowed.code, f"This broker has no {feature} yet."))

    return refuse


def _watch_coordinators(connection: BrokerConnection, body: messages.CommandWatchTcAssignments) -> None:
    reply = messages.CommandWatchTcAssignmentsUpdate(
        watch_id=body.watch_id, error=_CODE, message="This broker has no transactions yet."
    )
    connection.link.write(encode(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE, reply))


_TRANSACTIONS = _plain("transactions")

SYNC: Final[dict[int, Callable[[Any, Any], None]]] = {
    CommandType.NEW_TXN: _TRANSACTIONS,
    CommandType.ADD_PARTITION_TO_TXN: _TRANSACTIONS,
    CommandType.ADD_SUBSCRIPTION_TO_TXN: _TRANSACTIONS,
    CommandType.END_TXN: _TRANSACTIONS,
    CommandType.END_TXN_ON_PARTITION: _TRANSACTIONS,
    CommandType.END_TXN_ON_SUBSCRIPTION: _TRANSACTIONS,
    CommandType.TC_CLIENT_CONNECT_REQUEST: _TRANSACTIONS,
    CommandType.WATCH_TOPIC_LIST: _plain("topic-list watcher"),
    CommandType.WATCH_TOPIC_LIST_CLOSE: _plain("topic-list watcher"),
    CommandType.WATCH_TC_ASSIGNMENTS: _watch_coordinators,
}
