"""The protocol's numbers: command types with their direction, server errors and the other enums, as `IntEnum`s.

The generated classes stay inside `braid.wire`; everybody else names numbers through this module. A test holds it equal to
`schema/pulsar.proto`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

PROTOCOL_VERSION: Final = 21
"""The highest protocol version Braid speaks."""

BRAID_COMMANDS: Final = 1000
"""Command types from here on are Braid's own; only peers that announced `supports_braid` may send them."""


class CommandType(IntEnum):
    """`BaseCommand.type`; also the number of the field that holds the command."""

    CONNECT = 2
    CONNECTED = 3
    SUBSCRIBE = 4
    PRODUCER = 5
    SEND = 6
    SEND_RECEIPT = 7
    SEND_ERROR = 8
    MESSAGE = 9
    ACK = 10
    FLOW = 11
    UNSUBSCRIBE = 12
    SUCCESS = 13
    ERROR = 14
    CLOSE_PRODUCER = 15
    CLOSE_CONSUMER = 16
    PRODUCER_SUCCESS = 17
    PING = 18
    PONG = 19
    REDELIVER_UNACKNOWLEDGED_MESSAGES = 20
    PARTITIONED_METADATA = 21
    PARTITIONED_METADATA_RESPONSE = 22
    LOOKUP = 23
    LOOKUP_RESPONSE = 24
    CONSUMER_STATS = 25
    CONSUMER_STATS_RESPONSE = 26
    REACHED_END_OF_TOPIC = 27
    SEEK = 28
    GET_LAST_MESSAGE_ID = 29
    GET_LAST_MESSAGE_ID_RESPONSE = 30
    ACTIVE_CONSUMER_CHANGE = 31
    GET_TOPICS_OF_NAMESPACE = 32
    GET_TOPICS_OF_NAMESPACE_RESPONSE = 33
    GET_SCHEMA = 34
    GET_SCHEMA_RESPONSE = 35
    AUTH_CHALLENGE = 36
    AUTH_RESPONSE = 37
    ACK_RESPONSE = 38
    GET_OR_CREATE_SCHEMA = 39
    GET_OR_CREATE_SCHEMA_RESPONSE = 40
    NEW_TXN = 50
    NEW_TXN_RESPONSE = 51
    ADD_PARTITION_TO_TXN = 52
    ADD_PARTITION_TO_TXN_RESPONSE = 53
    ADD_SUBSCRIPTION_TO_TXN = 54
    ADD_SUBSCRIPTION_TO_TXN_RESPONSE = 55
    END_TXN = 56
    END_TXN_RESPONSE = 57
    END_TXN_ON_PARTITION = 58
    END_TXN_ON_PARTITION_RESPONSE = 59
    END_TXN_ON_SUBSCRIPTION = 60
    END_TXN_ON_SUBSCRIPTION_RESPONSE = 61
    TC_CLIENT_CONNECT_REQUEST = 62
    TC_CLIENT_CONNECT_RESPONSE = 63
    WATCH_TOPIC_LIST = 64
    WATCH_TOPIC_LIST_SUCCESS = 65
    WATCH_TOPIC_UPDATE = 66
    WATCH_TOPIC_LIST_CLOSE = 67
    TOPIC_MIGRATED = 68
    SCALABLE_TOPIC_LOOKUP = 70
    SCALABLE_TOPIC_UPDATE = 71
    SCALABLE_TOPIC_CLOSE = 72
    SCALABLE_TOPIC_SUBSCRIBE = 73
    SCALABLE_TOPIC_SUBSCRIBE_RESPONSE = 74
    SCALABLE_TOPIC_ASSIGNMENT_UPDATE = 75
    WATCH_SCALABLE_TOPICS = 76
    WATCH_SCALABLE_TOPICS_UPDATE = 77
    WATCH_SCALABLE_TOPICS_CLOSE = 78
    WATCH_TC_ASSIGNMENTS = 79
    WATCH_TC_ASSIGNMENTS_UPDATE = 80
    WATCH_TC_ASSIGNMENTS_CLOSE = 81
    NEW_SUB_TXN = 1000
    NEW_SUB_TXN_RESPONSE = 1001
    DECIDE_TXN = 1002
    DECIDE_TXN_RESPONSE = 1003
    RENEW_TXN = 1004
    RENEW_TXN_RESPONSE = 1005
    BEGIN_SINK = 1006
    BEGIN_SINK_RESPONSE = 1007
    GET_SINK = 1008
    GET_SINK_RESPONSE = 1009
    DESCRIBE_SEGMENTS = 1010
    DESCRIBE_SEGMENTS_RESPONSE = 1011
    FIND_INDEX = 1012
    FIND_INDEX_RESPONSE = 1013
    FETCH_ENTRIES = 1014
    FETCH_ENTRIES_RESPONSE = 1015
    MOVE_CURSOR = 1016
    MOVE_CURSOR_RESPONSE = 1017
    REPORT_PLACES = 1018
    REPORT_PLACES_RESPONSE = 1019


class ServerError(IntEnum):
    """Why a request was refused."""

    UNKNOWN_ERROR = 0
    METADATA_ERROR = 1
    PERSISTENCE_ERROR = 2
    AUTHENTICATION_ERROR = 3
    AUTHORIZATION_ERROR = 4
    CONSUMER_BUSY = 5
    SERVICE_NOT_READY = 6
    PRODUCER_BLOCKED_QUOTA_EXCEEDED_ERROR = 7
    PRODUCER_BLOCKED_QUOTA_EXCEEDED_EXCEPTION = 8
    CHECKSUM_ERROR = 9
    UNSUPPORTED_VERSION_ERROR = 10
    TOPIC_NOT_FOUND = 11
    SUBSCRIPTION_NOT_FOUND = 12
    CONSUMER_NOT_FOUND = 13
    TOO_MANY_REQUESTS = 14
    TOPIC_TERMINATED_ERROR = 15
    PRODUCER_BUSY = 16
    INVALID_TOPIC_NAME = 17
    INCOMPATIBLE_SCHEMA = 18
    CONSUMER_ASSIGN_ERROR = 19
    TRANSACTION_COORDINATOR_NOT_FOUND = 20
    INVALID_TXN_STATUS = 21
    NOT_ALLOWED_ERROR = 22
    TRANSACTION_CONFLICT = 23
    TRANSACTION_NOT_FOUND = 24
    PRODUCER_FENCED = 25


class AuthMethod(IntEnum):
    """Deprecated way to name an authentication method."""

    AUTH_METHOD_NONE = 0
    AUTH_METHOD_YCA_V1 = 1
    AUTH_METHOD_ATHENS = 2


class AckType(IntEnum):
    """How an acknowledgement counts."""

    INDIVIDUAL = 0
    CUMULATIVE = 1


class ValidationError(IntEnum):
    """Why a client threw an entry away."""

    UNCOMPRESSED_SIZE_CORRUPTION = 0
    DECOMPRESSION_ERROR = 1
    CHECKSUM_MISMATCH = 2
    BATCH_DESERIALIZE_ERROR = 3
    DECRYPTION_ERROR = 4


class TopicsMode(IntEnum):
    """Which topics a listing shows."""

    PERSISTENT = 0
    NON_PERSISTENT = 1
    ALL = 2


class LookupResult(IntEnum):
    """What a lookup answer asks for."""

    REDIRECT = 0
    CONNECT = 1
    FAILED = 2


class PartitionsResult(IntEnum):
    """Outcome of a partitions request."""

    SUCCESS = 0
    FAILED = 1


class InitialPosition(IntEnum):
    """Where a new subscription starts."""

    LATEST = 0
    EARLIEST = 1


class SubType(IntEnum):
    """How a subscription shares its messages."""

    EXCLUSIVE = 0
    SHARED = 1
    FAILOVER = 2
    KEY_SHARED = 3


class ResourceType(IntEnum):
    """What was migrated."""

    PRODUCER = 0
    CONSUMER = 1


class CompressionType(IntEnum):
    """Codec of a payload."""

    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


class KeySharedMode(IntEnum):
    """Who chooses the hash ranges."""

    AUTO_SPLIT = 0
    STICKY = 1


class ProducerAccessMode(IntEnum):
    """How many producers a topic takes."""

    SHARED = 0
    EXCLUSIVE = 1
    WAIT_FOR_EXCLUSIVE = 2
    EXCLUSIVE_WITH_FENCING = 3


class ScalableConsumerType(IntEnum):
    """Kind of scalable-topic consumer."""

    STREAM = 0
    CHECKPOINT = 1


class SchemaType(IntEnum):
    """Kind of a schema."""

    NONE = 0
    STRING = 1
    JSON = 2
    PROTOBUF = 3
    AVRO = 4
    BOOL = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FLOAT = 10
    DOUBLE = 11
    DATE = 12
    TIME = 13
    TIMESTAMP = 14
    KEY_VALUE = 15
    INSTANT = 16
    LOCAL_DATE = 17
    LOCAL_TIME = 18
    LOCAL_DATE_TIME = 19
    PROTOBUF_NATIVE = 20
    AUTO_CONSUME = 21
    EXTERNAL = 22


class SegmentState(IntEnum):
    """Whether a segment takes messages."""

    ACTIVE = 0
    SEALED = 1


class TxnAction(IntEnum):
    """How a transaction ends."""

    COMMIT = 0
    ABORT = 1


FROM_CLIENT: Final = frozenset(
    {
        CommandType.CONNECT,
        CommandType.SUBSCRIBE,
        CommandType.PRODUCER,
        CommandType.SEND,
        CommandType.ACK,
        CommandType.FLOW,
        CommandType.UNSUBSCRIBE,
        CommandType.CLOSE_PRODUCER,
        CommandType.CLOSE_CONSUMER,
        CommandType.PING,
        CommandType.PONG,
        CommandType.REDELIVER_UNACKNOWLEDGED_MESSAGES,
        CommandType.PARTITIONED_METADATA,
        CommandType.LOOKUP,
        CommandType.CONSUMER_STATS,
        CommandType.SEEK,
        CommandType.GET_LAST_MESSAGE_ID,
        CommandType.GET_TOPICS_OF_NAMESPACE,
        CommandType.GET_SCHEMA,
        CommandType.AUTH_RESPONSE,
        CommandType.GET_OR_CREATE_SCHEMA,
        CommandType.NEW_TXN,
        CommandType.ADD_PARTITION_TO_TXN,
        CommandType.ADD_SUBSCRIPTION_TO_TXN,
        CommandType.END_TXN,
        CommandType.END_TXN_ON_PARTITION,
        CommandType.END_TXN_ON_SUBSCRIPTION,
        CommandType.TC_CLIENT_CONNECT_REQUEST,
        CommandType.WATCH_TOPIC_LIST,
        CommandType.WATCH_TOPIC_LIST_CLOSE,
        CommandType.SCALABLE_TOPIC_LOOKUP,
        CommandType.SCALABLE_TOPIC_CLOSE,
        CommandType.SCALABLE_TOPIC_SUBSCRIBE,
        CommandType.WATCH_SCALABLE_TOPICS,
        CommandType.WATCH_SCALABLE_TOPICS_CLOSE,
        CommandType.WATCH_TC_ASSIGNMENTS,
        CommandType.WATCH_TC_ASSIGNMENTS_CLOSE,
        CommandType.NEW_SUB_TXN,
        CommandType.DECIDE_TXN,
        CommandType.RENEW_TXN,
        CommandType.BEGIN_SINK,
        CommandType.GET_SINK,
        CommandType.DESCRIBE_SEGMENTS,
        CommandType.FIND_INDEX,
        CommandType.FETCH_ENTRIES,
        CommandType.MOVE_CURSOR,
        CommandType.REPORT_PLACES,
    }
)
"""Types a broker takes; every other known type goes from broker to client only."""
