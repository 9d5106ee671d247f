"""Commands this broker does not serve yet: each gets an answer its client survives, never silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from braid.errors import NotAllowed
from braid.wire.replies import error
from braid.wire.types import CommandType

if TYPE_CHECKING:
    from braid.broker.connection import BrokerConnection


def _plain(feature: str) -> Callable[[BrokerConnection, Any], None]:
    def refuse(connection: BrokerConnection, body: Any) -> None:
        connection.link.write(error(body.request_id, NotAllowed.code, f"This broker has no {feature} yet."))

    return refuse


SYNC: Final[dict[int, Callable[[Any, Any], None]]] = {
    CommandType.WATCH_TOPIC_LIST: _plain("topic-list watcher"),
    CommandType.WATCH_TOPIC_LIST_CLOSE: _plain("topic-list watcher"),
}
