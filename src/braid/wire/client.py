"""The client's end of a connection, without I/O: received bytes in, deliveries and commands out.

Owns what a client accepts from a broker. A MESSAGE becomes a `Delivery` whose checksum has been looked at; what to do with a
corrupt one is the caller's decision (tell the broker by an ACK with a validation error). Bounded by the frame limit (INV17).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from google.protobuf.message import DecodeError

from braid.errors import Closed, ProtocolError
from braid.wire.bulk import bulk_payload
from braid.wire.commands import Command, decode
from braid.wire.entries import verify
from braid.wire.frames import DEFAULT_MAX_MESSAGE_SIZE, SIZES, FrameBuffer
from braid.wire.messages import BrokerEntryMetadata, CommandMessage
from braid.wire.types import CommandType


class Delivery(msgspec.Struct):
    """One MESSAGE: the command, the entry, and the broker's metadata if the broker exposes it."""

    command: CommandMessage
    entry: bytes
    broker_metadata: BrokerEntryMetadata | None
    is_intact: bool
    """Whether the entry's checksum holds (or it has none)."""


class Bulk(msgspec.Struct):
    """One answer with a payload: the command's type and message, and what followed them."""

    type: int
    body: Any
    data: memoryview | None
    """None if its checksum is wrong."""


Event: TypeAlias = Delivery | Bulk | Command | ProtocolError


class ClientProtocol:
    """One connection as the client sees it."""

    __slots__ = ("_buffer", "_is_failed")

    def __init__(self, max_message_size: int = DEFAULT_MAX_MESSAGE_SIZE) -> None:
        """CONNECTED may raise or lower `max_message_size`; the protocol follows it by itself."""
        self._buffer = FrameBuffer(max_message_size)
        self._is_failed = False

    def receive(self, data: bytes) -> list[Event]:
        """Decode what has arrived; commands of an unknown type are left out.

        If the broker breaks the protocol, the last event is the `ProtocolError`; calling again after that raises `Closed`.
        """
        if self._is_failed:
            raise Closed("The connection broke the protocol and takes no more bytes.")
        return self._decoded(self._buffer.join(data))

    def room(self) -> memoryview:
        """Where the next bytes may be put, which `received` decodes."""
        return self._buffer.room()

    def received(self, count: int) -> list[Event]:
        """As `receive`, with so many bytes that were put into `room`."""
        if self._is_failed:
            raise Closed("The connection broke the protocol and takes no more bytes.")
        return self._decoded(self._buffer.filled(count))

    def _decoded(self, data: bytes | memoryview) -> list[Event]:
        events: list[Event] = []
        try:
            if data:
                self._buffer.keep(data, self._walk(data, events))
        except ProtocolError as error:
            self._is_failed = True
            events.append(error)
        return events

    def _walk(self, data: bytes | memoryview, events: list[Event]) -> int:
        at, end = 0, len(data)
        while at + 8 <= end:
            total, size = SIZES.unpack_from(data, at)
            self._buffer.check(total, size)
            frame_end = at + 4 + total
            if frame_end > end:
                break
            body = at + 8 + size
            command = decode(bytes(data[at + 8 : body]))
            if command is not None:
                self._take(command, data, body, frame_end, events)
            at = frame_end
        return at

    def _take(self, command: Command, data: bytes | memoryview, start: int, end: int, events: list[Event]) -> None:
        if command.type == CommandType.MESSAGE:
            entry = bytes(data[start:end])
            events.append(_delivery(command.body, entry))
            return
        if command.type == CommandType.FETCH_ENTRIES_RESPONSE and start < end:
            events.append(Bulk(command.type, command.body, bulk_payload(data, start, end)))
            return
        if command.type == CommandType.CONNECTED and command.body.max_message_size > 0:
            self._buffer.resize(command.body.max_message_size)
        events.append(command)


def _delivery(command: CommandMessage, payload: bytes) -> Delivery:
    broker_metadata = None
    if payload[:2] == b"\x0e\x02":
        end = 6 + int.from_bytes(payload[2:6], "big")
        try:
            if len(payload) < max(end, 6):
                raise DecodeError
            broker_metadata = BrokerEntryMetadata.FromString(payload[6:end])
        except DecodeError:
            raise ProtocolError("A message came with unreadable broker metadata; the broker is broken.") from None
        payload = payload[end:]
    if len(payload) < 4:
        raise ProtocolError(f"A message came with {len(payload)} bytes instead of an entry; the broker is broken.")
    return Delivery(command, payload, broker_metadata, verify(payload))
