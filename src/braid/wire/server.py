"""The broker's end of a connection, without I/O: received bytes in, commands out.

Owns what a peer may say when: CONNECT first and once, nothing else before the handshake is over, only commands a client
sends, Braid's own ones only from Braid clients. Every read of every connection passes here, so SEND is decoded by hand
into a `Send` and never becomes a protobuf object. Everything is bounded by the frame limit and the command limit (INV17).
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from typing import Final, TypeAlias

import msgspec

from braid.errors import Closed, ProtocolError
from braid.wire.commands import Command, decode, signed64, type_number
from braid.wire.frames import MAX_COMMAND_SIZE, FrameBuffer
from braid.wire.types import BRAID_COMMANDS, FROM_CLIENT, CommandType

NO_SEQUENCE: Final = -1
"""`Send.highest_sequence_id` when the producer did not give one."""


class Send(msgspec.Struct, gc=False):
    """One SEND: an entry to append. `entry` runs from its checksum magic (or metadata size) to the end of the frame."""

    producer_id: int
    sequence_id: int
    num_messages: int
    highest_sequence_id: int
    txn_most: int | None
    txn_least: int | None
    is_chunk: bool
    entry: bytes


Event: TypeAlias = Send | Command | ProtocolError


class Stage(Enum):
    """How far the handshake is."""

    START = "start"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    FAILED = "failed"


_HEAD: Final = Struct(">IIHBB")
"""Both lengths, then what a SEND begins with: its type, the tag of its sub-message and the size of that."""
_HEAD_SIZE: Final = _HEAD.size
_TYPE_SEND: Final = 0x0806
_TAG_SEND: Final = 0x32


class ServerProtocol:
    """One connection as the broker sees it."""

    __slots__ = ("_buffer", "_requires_auth", "_stage", "is_braid_peer")

    def __init__(self, max_message_size: int, requires_auth: bool = False) -> None:
        """With `requires_auth` the handshake ends when the driver calls `accept`, otherwise with the CONNECT command."""
        self._buffer = FrameBuffer(max_message_size)
        self._requires_auth = requires_auth
        self._stage = Stage.START
        self.is_braid_peer = False

    @property
    def stage(self) -> Stage:
        """How far the handshake is."""
        return self._stage

    def accept(self) -> None:
        """Authentication succeeded: everything is allowed from now on."""
        if self._stage is Stage.CONNECTING:
            self._stage = Stage.CONNECTED

    def receive(self, data: bytes) -> list[Event]:
        """Decode what has arrived. Commands of an unknown type are left out.

        If the peer breaks the protocol, the last event is the `ProtocolError` (a full sentence for the log): handle the
        events before it, then close the connection without a reply. Calling again after that raises `Closed`.
        """
        if self._stage is Stage.FAILED:
            raise Closed("The connection broke the protocol and takes no more bytes.")
        events: list[Event] = []
        try:
            data = self._buffer.join(data)
            if data:
                self._buffer.keep(data, self._walk(data, events))
        except ProtocolError as error:
            self._stage = Stage.FAILED
            events.append(error)
        return events

    def _walk(self, data: bytes, events: list[Event]) -> int:
        """Append the events of all whole frames; returns where the unfinished rest begins."""
        unpack, add, limit = _HEAD.unpack_from, events.append, self._buffer.limit
        at, end = 0, len(data)
        connected = self._stage is Stage.CONNECTED
        while at + _HEAD_SIZE <= end:
            total, size, kind, tag, length = unpack(data, at)
            frame_end = at + 4 + total
            if frame_end > end:
                break
            if not size + 4 <= total <= limit:
                self._buffer.check(total, size)
            body = at + 8 + size
            if kind == _TYPE_SEND and tag == _TAG_SEND and length == size - 4 and length < 0x80 and connected:
                send = _decode_send(data, at + _HEAD_SIZE, body, frame_end)
                if send is not None:
                    add(send)
                    at = frame_end
                    continue
            self._command(data, at + 8, body, frame_end, events)
            connected = self._stage is Stage.CONNECTED
            at = frame_end
        # Frames shorter than a SEND's beginning, at the end of what was read.
        while at + 8 <= end:
            total, size = int.from_bytes(data[at : at + 4], "big"), int.from_bytes(data[at + 4 : at + 8], "big")
            self._buffer.check(total, size)
            frame_end = at + 4 + total
            if frame_end > end:
                break
            self._command(data, at + 8, at + 8 + size, frame_end, events)
            at = frame_end
        return at

    def _command(self, data: bytes, start: int, body: int, end: int, events: list[Event]) -> None:
        """Decode the command `data[start:body]` of a frame that ends at `end`, and hold it against the stage."""
        if body - start > MAX_COMMAND_SIZE:
            raise ProtocolError(f"A command of {body - start} bytes was received; the limit is {MAX_COMMAND_SIZE}.")
        raw = data[start:body]
        command = decode(raw)
        if command is None:
            if (type_number(raw) or 0) >= BRAID_COMMANDS and not self.is_braid_peer:
                raise ProtocolError(_NOT_BRAID)
            if self._stage is not Stage.CONNECTED:
                raise ProtocolError("A command of unknown type was received before the handshake was over.")
            return
        kind = command.type
        self._check_stage(kind)
        if kind == CommandType.SEND:
            events.append(_send_of(command, data[body:end]))
            return
        if body != end:
            raise ProtocolError(f"A {CommandType(kind).name} command came with a payload of {end - body} bytes; it takes none.")
        if kind == CommandType.CONNECT:
            self._stage = Stage.CONNECTING if self._requires_auth else Stage.CONNECTED
            self.is_braid_peer = bool(command.body.feature_flags.supports_braid)
        events.append(command)

    def _check_stage(self, kind: int) -> None:
        if kind not in FROM_CLIENT:
            raise ProtocolError(f"A client sent {CommandType(kind).name}, which only brokers send.")
        if kind >= BRAID_COMMANDS and not self.is_braid_peer:
            raise ProtocolError(_NOT_BRAID)
        if kind in _ANY_STAGE:
            return
        if self._stage is Stage.START:
            if kind != CommandType.CONNECT:
                raise ProtocolError(f"A client sent {CommandType(kind).name} before CONNECT.")
        elif kind == CommandType.CONNECT:
            raise ProtocolError("A client sent CONNECT twice on one connection.")
        elif self._stage is Stage.CONNECTING and kind != CommandType.AUTH_RESPONSE:
            raise ProtocolError(f"A client sent {CommandType(kind).name} before its authentication was answered.")


_ANY_STAGE: Final = frozenset({CommandType.PING, CommandType.PONG})
_NOT_BRAID: Final = "A command of Braid's own was received from a client that did not announce supports_braid."


def _decode_send(data: bytes, i: int, stop: int, end: int) -> Send | None:
    """Read the fields of a SEND, `data[i:stop]`; None if their shape is unusual, so that protobuf decides.

    Usual are the integer fields 1 to 7, in any order, of at most 56 bits. Running over `stop` is noticed at the end.
    """
    values: list[int | None] = [None, None, None, None, None, None, None, None]
    try:
        while i < stop:
            tag = data[i]
            value = data[i + 1]
            i += 2
            if value > 0x7F:
                value &= 0x7F
                shift = 7
                while (byte := data[i]) > 0x7F:
                    value |= (byte & 0x7F) << shift
                    shift += 7
                    i += 1
                    if shift > 49:
                        return None
                value |= byte << shift
                i += 1
            if tag & 7 or tag > 0x38:
                return None
            values[tag >> 3] = value
    except IndexError:
        return None
    _, producer_id, sequence_id, num_messages, txn_least, txn_most, highest, is_chunk = values
    if i != stop or producer_id is None or sequence_id is None or values[0] is not None:
        return None
    if num_messages is None:
        num_messages = 1
    elif num_messages > 0x7FFFFFFF:
        return None
    if highest is None:
        highest = NO_SEQUENCE
    return Send(producer_id, sequence_id, num_messages, highest, txn_most, txn_least, bool(is_chunk), data[stop:end])


def _send_of(command: Command, entry: bytes) -> Send:
    body = command.body
    has = body.HasField
    return Send(
        body.producer_id,
        signed64(body.sequence_id),
        body.num_messages,
        signed64(body.highest_sequence_id) if has("highest_sequence_id") else NO_SEQUENCE,
        body.txnid_most_bits if has("txnid_most_bits") else None,
        body.txnid_least_bits if has("txnid_least_bits") else None,
        body.is_chunk,
        entry,
    )
