"""Commands: the protobuf envelope between frames and the rest of Braid.

Owns encoding and decoding of `BaseCommand`; message classes are in `messages`, numbers in `types`. `decode` accepts nothing
half-formed: a missing sub-message, a missing required field or text that is not UTF-8 is a `ProtocolError`, so a handler may
rely on every field's type.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message

from braid.errors import ProtocolError
from braid.wire import messages
from braid.wire.types import CommandType
from braid.wire.varints import read_varint, varint

FIELDS: Final[dict[int, str]] = {
    CommandType.CONNECT: "connect",
    CommandType.CONNECTED: "connected",
    CommandType.SUBSCRIBE: "subscribe",
    CommandType.PRODUCER: "producer",
    CommandType.SEND: "send",
    CommandType.SEND_RECEIPT: "send_receipt",
    CommandType.SEND_ERROR: "send_error",
    CommandType.MESSAGE: "message",
    CommandType.ACK: "ack",
    CommandType.FLOW: "flow",
    CommandType.UNSUBSCRIBE: "unsubscribe",
    CommandType.SUCCESS: "success",
    CommandType.ERROR: "error",
    CommandType.CLOSE_PRODUCER: "close_producer",
    CommandType.CLOSE_CONSUMER: "close_consumer",
    CommandType.PRODUCER_SUCCESS: "producer_success",
    CommandType.PING: "ping",
    CommandType.PONG: "pong",
    CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES: "redeliverUnacknowledgedMessages",
    CommandType.PARTITIONED_METADATA: "partitionMetadata",
    CommandType.PARTITIONED_METADATA_RESPONSE: "partitionMetadataResponse",
    CommandType.LOOKUP: "lookupTopic",
    CommandType.LOOKUP_RESPONSE: "lookupTopicResponse",
    CommandType.CONSUMER_STATS: "consumerStats",
    CommandType.CONSUMER_STATS_RESPONSE: "consumerStatsResponse",
    CommandType.REACHED_END_OF_TOPIC: "reachedEndOfTopic",
    CommandType.SEEK: "seek",
    CommandType.GET_LAST_MESSAGE_ID: "getLastMessageId",
    CommandType.GET_LAST_MESSAGE_ID_RESPONSE: "getLastMessageIdResponse",
    CommandType.ACTIVE_CONSUMER_CHANGE: "active_consumer_change",
    CommandType.GET_TOPICS_OF_NAMESPACE: "getTopicsOfNamespace",
    CommandType.GET_TOPICS_OF_NAMESPACE_RESPONSE: "getTopicsOfNamespaceResponse",
    CommandType.GET_SCHEMA: "getSchema",
    CommandType.GET_SCHEMA_RESPONSE: "getSchemaResponse",
    CommandType.AUTH_CHALLENGE: "authChallenge",
    CommandType.AUTH_RESPONSE: "authResponse",
    CommandType.ACK_RESPONSE: "ackResponse",
    CommandType.GET_OR_CREATE_SCHEMA: "getOrCreateSchema",
    CommandType.GET_OR_CREATE_SCHEMA_RESPONSE: "getOrCreateSchemaResponse",
    CommandType.NEW_TXN: "newTxn",
    CommandType.NEW_TXN_RESPONSE: "newTxnResponse",
    CommandType.ADD_PARTITION_TO_TXN: "addPartitionToTxn",
    CommandType.ADD_PARTITION_TO_TXN_RESPONSE: "addPartitionToTxnResponse",
    CommandType.ADD_SUBSCRIPTION_TO_TXN: "addSubscriptionToTxn",
    CommandType.ADD_SUBSCRIPTION_TO_TXN_RESPONSE: "addSubscriptionToTxnResponse",
    CommandType.END_TXN: "endTxn",
    CommandType.END_TXN_RESPONSE: "endTxnResponse",
    CommandType.END_TXN_ON_PARTITION: "endTxnOnPartition",
    CommandType.END_TXN_ON_PARTITION_RESPONSE: "endTxnOnPartitionResponse",
    CommandType.END_TXN_ON_SUBSCRIPTION: "endTxnOnSubscription",
    CommandType.END_TXN_ON_SUBSCRIPTION_RESPONSE: "endTxnOnSubscriptionResponse",
    CommandType.TC_CLIENT_CONNECT_REQUEST: "tcClientConnectRequest",
    CommandType.TC_CLIENT_CONNECT_RESPONSE: "tcClientConnectResponse",
    CommandType.WATCH_TOPIC_LIST: "watchTopicList",
    CommandType.WATCH_TOPIC_LIST_SUCCESS: "watchTopicListSuccess",
    CommandType.WATCH_TOPIC_UPDATE: "watchTopicUpdate",
    CommandType.WATCH_TOPIC_LIST_CLOSE: "watchTopicListClose",
    CommandType.TOPIC_MIGRATED: "topicMigrated",
    CommandType.SCALABLE_TOPIC_LOOKUP: "scalableTopicLookup",
    CommandType.SCALABLE_TOPIC_UPDATE: "scalableTopicUpdate",
    CommandType.SCALABLE_TOPIC_CLOSE: "scalableTopicClose",
    CommandType.SCALABLE_TOPIC_SUBSCRIBE: "scalableTopicSubscribe",
    CommandType.SCALABLE_TOPIC_SUBSCRIBE_RESPONSE: "scalableTopicSubscribeResponse",
    CommandType.SCALABLE_TOPIC_ASSIGNMENT_UPDATE: "scalableTopicAssignmentUpdate",
    CommandType.WATCH_SCALABLE_TOPICS: "watchScalableTopics",
    CommandType.WATCH_SCALABLE_TOPICS_UPDATE: "watchScalableTopicsUpdate",
    CommandType.WATCH_SCALABLE_TOPICS_CLOSE: "watchScalableTopicsClose",
    CommandType.WATCH_TC_ASSIGNMENTS: "watchTcAssignments",
    CommandType.WATCH_TC_ASSIGNMENTS_UPDATE: "watchTcAssignmentsUpdate",
    CommandType.WATCH_TC_ASSIGNMENTS_CLOSE: "watchTcAssignmentsClose",
    CommandType.NEW_SUB_TXN: "newSubTxn",
    CommandType.NEW_SUB_TXN_RESPONSE: "newSubTxnResponse",
    CommandType.DECIDE_TXN: "decideTxn",
    CommandType.DECIDE_TXN_RESPONSE: "decideTxnResponse",
    CommandType.RENEW_TXN: "renewTxn",
    CommandType.RENEW_TXN_RESPONSE: "renewTxnResponse",
    CommandType.BEGIN_SINK: "beginSink",
    CommandType.BEGIN_SINK_RESPONSE: "beginSinkResponse",
    CommandType.GET_SINK: "getSink",
    CommandType.GET_SINK_RESPONSE: "getSinkResponse",
    CommandType.DESCRIBE_SEGMENTS: "describeSegments",
    CommandType.DESCRIBE_SEGMENTS_RESPONSE: "describeSegmentsResponse",
    CommandType.FIND_INDEX: "findIndex",
    CommandType.FIND_INDEX_RESPONSE: "findIndexResponse",
    CommandType.FETCH_ENTRIES: "fetchEntries",
    CommandType.FETCH_ENTRIES_RESPONSE: "fetchEntriesResponse",
    CommandType.MOVE_CURSOR: "moveCursor",
    CommandType.MOVE_CURSOR_RESPONSE: "moveCursorResponse",
    CommandType.REPORT_PLACES: "reportPlaces",
    CommandType.REPORT_PLACES_RESPONSE: "reportPlacesResponse",
}
"""Name of the `BaseCommand` field that holds the command of a type."""

_WORD = 1 << 64
_SIGN = 1 << 63


class Command(msgspec.Struct):
    """One decoded command: its type number and its message (the class of `FIELDS[type]`)."""

    type: int
    body: Any


def signed64(value: int) -> int:
    """Read a `uint64` field that carries a Java long: request ids, ledger and entry ids, sequence ids, consumer epochs."""
    return value - _WORD if value >= _SIGN else value


def unsigned64(value: int) -> int:
    """What to put into a `uint64` field for a possibly negative number."""
    return value + _WORD if value < 0 else value


def enum_value(value: int) -> Any:
    """A number for an enum field: protobuf takes plain numbers, only the generated stubs ask for their own types."""
    return value


def encode(kind: int, body: Message) -> bytes:
    """The whole frame of a command without payload."""
    try:
        raw = body.SerializeToString()
    except EncodeError as missing:
        raise ValueError(f"The {CommandType(kind).name} command to send is incomplete: {missing}.") from None
    size = varint(len(raw))
    prefix = _PREFIXES[kind]
    length = len(prefix) + len(size) + len(raw)
    return b"".join(((length + 4).to_bytes(4, "big"), length.to_bytes(4, "big"), prefix, size, raw))


def decode(raw: bytes) -> Command | None:
    """The command in `raw` (the bytes a frame's command size covers); None for a type number nobody defined.

    Raises ProtocolError when the bytes are no complete command.
    """
    kind = raw[1] if len(raw) > 1 and raw[0] == 0x08 else 0
    prefix = _PREFIXES.get(kind)
    if prefix is not None and raw.startswith(prefix):
        # The usual shape: type first, then exactly the one sub-message. Parsing that alone halves the cost.
        start = len(prefix)
        if start < len(raw) and raw[start] < 0x80:
            size, start = raw[start], start + 1
        else:
            size, start = read_varint(raw, start)
        if start + size == len(raw):
            return Command(kind, _checked(kind, _parse(kind, _CLASSES[kind], raw[start:])))
    return _decode_envelope(raw)


def _decode_envelope(raw: bytes) -> Command | None:
    base = _parse(0, messages.BaseCommand, raw)
    if not base.HasField("type"):
        number = type_number(raw)
        if number is None:
            raise ProtocolError("A command without a type was received; the peer does not speak the Pulsar protocol.")
        return None
    kind: int = base.type
    field = FIELDS[kind]
    if not base.HasField(field):
        raise ProtocolError(f"A {CommandType(kind).name} command without its {field} message was received.")
    return Command(kind, _checked(kind, getattr(base, field)))


def _parse(kind: int, cls: Any, raw: bytes) -> Any:
    try:
        return cls.FromString(raw)
    except DecodeError:
        name = CommandType(kind).name if kind else "unnamed"
        raise ProtocolError(f"The bytes of a received {name} command are not valid protobuf.") from None


def _checked(kind: int, body: Any) -> Any:
    """Refuse what protobuf lets through: missing required fields, and bytes where text should be."""
    if not body.IsInitialized():
        missing = ", ".join(body.FindInitializationErrors())
        raise ProtocolError(f"A {CommandType(kind).name} command lacks the required field {missing}.")
    plan = _PLANS[kind]
    if plan:
        _check_text(kind, body, plan)
    return body


def _check_text(kind: int, body: Any, plan: tuple[_TextField, ...]) -> None:
    for name, repeated, nested in plan:
        value = getattr(body, name)
        if repeated:
            values = value
        elif nested is None or body.HasField(name):
            values = (value,)
        else:
            continue
        for one in values:
            if nested is not None:
                _check_text(kind, one, _TEXT[nested])
            elif not isinstance(one, str):
                raise ProtocolError(f"Field {name} of a {CommandType(kind).name} command is not UTF-8 text.")


def type_number(raw: bytes) -> int | None:
    """The type number of an encoded command even if nobody defined it; None if there is none."""
    at, found, end = 0, None, len(raw)
    while at < end:
        tag, at = read_varint(raw, at)
        wire_type = tag & 7
        if wire_type == 0:
            value, at = read_varint(raw, at)
            if tag == 0x08:
                found = value
        elif wire_type == 2:
            size, at = read_varint(raw, at)
            at += size
        elif wire_type in _FIXED:
            at += _FIXED[wire_type]
        else:
            break
    return found


class _TextField(NamedTuple):
    name: str
    repeated: bool
    nested: str | None
    """Message type that holds text; None if the field is text itself."""


_FIXED = {1: 8, 5: 4}


def _classes() -> dict[int, Any]:
    return {int(kind): type(getattr(messages.BaseCommand(), name)) for kind, name in FIELDS.items()}


def _prefixes() -> dict[int, bytes]:
    return {int(kind): b"\x08" + varint(kind) + varint(kind << 3 | 2) for kind in FIELDS}


def _text_plans() -> dict[str, tuple[_TextField, ...]]:
    """Per message type the fields under which text can be found, so that checking an ACK never walks its ids."""
    plans: dict[str, tuple[_TextField, ...]] = {}

    def plan(descriptor: Any) -> tuple[_TextField, ...]:
        if descriptor.name not in plans:
            plans[descriptor.name] = ()  # ends the recursion of MessageIdData, which holds no text
            found = []
            for field in descriptor.fields:
                if field.type == FieldDescriptor.TYPE_STRING:
                    found.append(_TextField(field.name, field.is_repeated, None))
                elif field.type == FieldDescriptor.TYPE_MESSAGE and plan(field.message_type):
                    found.append(_TextField(field.name, field.is_repeated, field.message_type.name))
            plans[descriptor.name] = tuple(found)
        return plans[descriptor.name]

    plan(messages.BaseCommand.DESCRIPTOR)
    return plans


_CLASSES: Final = _classes()
_PREFIXES: Final = _prefixes()
_TEXT: Final = _text_plans()
_PLANS: Final = {kind: _TEXT[cls.DESCRIPTOR.name] for kind, cls in _CLASSES.items()}
