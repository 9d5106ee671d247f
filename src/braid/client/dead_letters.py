"""`DeadLetters`: where messages go that were delivered too often: another topic, with a note of where they come from.

A message is acknowledged only after the other topic has it durable, so that a failure on the way keeps it where it was.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from braid.client.consumer_origin import checked_text, is_count
from braid.client.messages import Message
from braid.errors import InvalidArgument
from braid.model.names import Domain, TopicName

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.producer import Producer

REAL_TOPIC = "REAL_TOPIC"
REAL_SUBSCRIPTION = "REAL_SUBSCRIPTION"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"


class DeadLetterPolicy(msgspec.Struct, frozen=True):
    """After `max_redeliveries` a message that comes again goes to `topic`, by default `{its topic}-DLQ`."""

    max_redeliveries: int
    topic: str | None = None

    def __post_init__(self) -> None:
        if not is_count(self.max_redeliveries, 0):
            raise InvalidArgument(f"max_redeliveries={self.max_redeliveries!r} cannot be used; give 0 or more.")


class DeadLetters:
    """The dead letters of one consumer."""

    def __init__(self, client: Client, topic: str, subscription: str, policy: DeadLetterPolicy) -> None:
        name = TopicName.parse(topic)
        self.topic = f"{name.domain}://{name.tenant}/{name.namespace_portion}/{name.local_name}-DLQ"
        if policy.topic is not None:
            self.topic = str(_checked_topic(policy.topic, name))
        self._client = client
        self._origin = topic
        self._subscription = subscription
        self._max = policy.max_redeliveries
        self._producer: Producer | None = None
        self._opening = asyncio.Lock()

    def is_due(self, message: Message) -> bool:
        return message.redelivery_count > self._max

    async def send(self, message: Message) -> None:
        """Store the message in the other topic; returns once it is durable there."""
        async with self._opening:
            if self._producer is None:
                self._producer = await self._client.producer(self.topic)
        properties = {
            **message.properties,
            REAL_TOPIC: self._origin,
            REAL_SUBSCRIPTION: self._subscription,
            ORIGIN_MESSAGE_ID: str(message.id),
        }
        event_time = message.event_ms or None
        await self._producer.send(message.payload, key=message.key, properties=properties, event_time=event_time)

    async def close(self) -> None:
        if self._producer is not None:
            await self._producer.close()


def _checked_topic(given: object, origin: TopicName) -> TopicName:
    """Where an application wants its dead letters; checked when the consumer is made: later nobody hears of a mistake."""
    topic = TopicName.parse(checked_text("topic of the dead letters", given))
    if topic.domain not in (Domain.TOPIC, Domain.PERSISTENT) or topic.scalable == origin.scalable:
        raise InvalidArgument(
            f"Dead letters of {origin} cannot go to {topic}; give another topic://... or persistent://... name, or none: -DLQ."
        )
    return topic
