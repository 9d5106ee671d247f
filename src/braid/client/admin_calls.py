"""What the namespaces of `AdminClient` share: sending an operation, and names as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from braid.client.admin_transport import AdminTransport, Reply, decode
from braid.client.admin_types import StoredMessage
from braid.client.operations import Operation
from braid.errors import InvalidArgument, NotAllowed, ProtocolError
from braid.model.names import Domain, NamespaceName, TopicName

T = TypeVar("T")
Names = list[str]
HEADER = "x-pulsar-"


class Calls:
    """One group of operations."""

    def __init__(self, transport: AdminTransport) -> None:
        self._transport = transport

    async def _call(
        self, operation: Operation[T], names: Mapping[str, str], query: Mapping[str, Any] | None = None, body: Any = None
    ) -> T:
        return decode(operation, await self._transport.send(operation, names, query, body))

    async def _call_or_none(
        self, operation: Operation[T], names: Mapping[str, str], query: Mapping[str, Any] | None = None
    ) -> T | None:
        """The same for what may not be set, which is answered by nothing."""
        reply = await self._transport.send(operation, names, query)
        return decode(operation, reply) if reply.body.strip() not in (b"", b"null") else None

    async def _message(self, operation: Operation[bytes], names: Mapping[str, str]) -> StoredMessage:
        return stored_message(operation, await self._transport.send(operation, names))


def topic_parts(topic: str) -> dict[str, str]:
    """The parts of a persistent topic's name, short or full; raises InvalidTopicName or NotAllowed."""
    name = TopicName.parse(topic)
    if name.domain is Domain.TOPIC:
        raise NotAllowed(
            f"{name} is a scalable topic: use `braid scalable-topics` or AdminClient.scalable_topics; "
            "persistent topics are administered here."
        )
    if name.domain is Domain.SEGMENT:
        raise NotAllowed(
            f"{name} is a segment of {name.parent}: use `braid scalable-topics` or AdminClient.scalable_topics, "
            "for the segment alone `braid segments` or AdminClient.segments."
        )
    if name.domain is not Domain.PERSISTENT:
        raise NotAllowed(f"{name} cannot be administered: only persistent topics are available in this version of Braid.")
    return {"tenant": name.tenant, "namespace": name.namespace_portion, "topic": name.local_name}


def subscription_parts(topic: str, subscription: str) -> dict[str, str]:
    """The parts of a subscription's path."""
    return {**topic_parts(topic), "subscription": given("subscription", subscription)}


def namespace_parts(namespace: str) -> dict[str, str]:
    """The parts of `tenant/namespace`; raises InvalidTopicName."""
    name = NamespaceName.parse(namespace)
    return {"tenant": name.tenant, "namespace": name.local_name}


def given(what: str, text: str) -> str:
    """A name that must not be empty: it would make another path."""
    if not text.strip():
        raise InvalidArgument(f"The name of the {what} is empty; give one.")
    return text


def number(what: str, value: int, least: int = 0) -> str:
    """A number for a path."""
    if not least <= value < 1 << 63:
        raise InvalidArgument(f"{what} must be a number from {least} to {(1 << 63) - 1}, not {value}.")
    return str(value)


def stored_message(operation: Operation[bytes], reply: Reply) -> StoredMessage:
    """A message from the body and headers of an answer (protocol sheet 9.6)."""
    headers = {key.removeprefix(HEADER): value for key, value in reply.headers.items() if key.startswith(HEADER)}
    if "message-id" not in headers:
        raise ProtocolError(f"{operation.name}: the answer of {reply.url} is no message; is this the admin API of a broker?")
    try:
        return StoredMessage(
            message_id=headers["message-id"],
            payload=reply.body,
            batch_messages=int(headers.get("num-batch-message", "0")),
            key=headers.get("partition-key"),
            properties=msgspec.json.decode(headers.get("property", "{}"), type=dict[str, str]),
            producer_name=headers.get("producer-name"),
            sequence_id=int(headers["sequence-id"]) if "sequence-id" in headers else None,
            publish_time=headers.get("publish-time"),
            event_time=headers.get("event-time"),
            is_encrypted=headers.get("is-encrypted") == "true",
        )
    except (ValueError, msgspec.MsgspecError) as error:
        raise ProtocolError(
            f"{operation.name}: the message from {reply.url} has a header that cannot be read: {error}."
        ) from None
