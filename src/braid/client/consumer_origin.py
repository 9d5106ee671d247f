"""`Origin`: which consumer a message was received by, so that no other one acknowledges it.

Positions of different topics cannot be told apart by their numbers: an acknowledgement that reached the wrong consumer would
pass for one of its own messages. Also says which arguments of consumers can be used. Sends nothing.
"""

from __future__ import annotations

import math
from typing import Final

from braid.client.messages import Message, MessageId
from braid.errors import InvalidArgument
from braid.wire.types import InitialPosition, SubType

MAX_LEDGERS: Final = 4096
"""So many ledgers of a topic are known at a time; ids alone (not messages) of older ones are refused."""


class Origin:
    """One consumer, as its messages know it."""

    __slots__ = ("_ledgers", "consumer", "topic")

    def __init__(self, topic: str, consumer: str) -> None:
        self.topic = topic
        self.consumer = consumer
        self._ledgers: dict[int, None] = {}
        """Where messages came from, oldest first; a ledger belongs to one topic of the whole cluster."""

    def __repr__(self) -> str:
        return f"<{self.consumer} of {self.topic}>"

    def note(self, ledger_id: int) -> None:
        """Something of this ledger was received."""
        if ledger_id not in self._ledgers:
            if len(self._ledgers) >= MAX_LEDGERS:
                del self._ledgers[next(iter(self._ledgers))]
            self._ledgers[ledger_id] = None

    def own(self, message: Message | MessageId) -> MessageId:
        """The id of a message that this consumer has received; raises InvalidArgument for everything else."""
        if isinstance(message, Message):
            if message.origin is self:
                return message.id
            if message.origin is not None:
                whose = message.origin.consumer if isinstance(message.origin, Origin) else "another one"
                raise InvalidArgument(
                    f"The message {message.id} of {message.topic} was received by the consumer {whose}, not by {self.consumer} "
                    f"of {self.topic}; acknowledge it with the consumer that received it."
                )
            topic, found = message.topic, message.id
        elif isinstance(message, MessageId):
            topic, found = "another topic", message
        else:
            raise InvalidArgument(f"{message!r:.100} is no message of {self.topic}; give a Message or its MessageId.")
        if found.ledger_id not in self._ledgers:
            raise InvalidArgument(
                f"The message {found} is of {topic}, or was not received by the consumer {self.consumer} of {self.topic}; "
                "acknowledge it with the consumer that received it."
            )
        return found


def initial_position(value: object) -> InitialPosition:
    """Where a new subscription begins, as an application says it; raises InvalidArgument."""
    if value not in ("earliest", "latest"):
        raise InvalidArgument(f'initial={value!r} cannot be used; give "earliest" or "latest".')
    return InitialPosition[str(value).upper()]


def subscription_type(value: object) -> SubType:
    """How a subscription of a regular topic is shared; raises InvalidArgument."""
    if value not in ("exclusive", "shared", "failover"):
        raise InvalidArgument(f'type={value!r} cannot be used; give "exclusive", "shared" or "failover".')
    return SubType[str(value).upper()]


def checked_text(what: str, value: object) -> str:
    """A topic's, subscription's, group's or consumer's name; raises InvalidArgument."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidArgument(f"{what}={value!r} cannot be used; give a text that is not empty.")
    return value


def is_count(value: object, least: int) -> bool:
    """Whether an application gave a whole number that is not too small."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_seconds(value: object) -> bool:
    """Whether an application gave a time to wait above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def is_none_or(value: object, kind: type) -> bool:
    return value is None or isinstance(value, kind)


def checked_name(what: str, value: object, default: str) -> str:
    """The same for a name that may be left out."""
    return default if value is None else checked_text(what, value)
