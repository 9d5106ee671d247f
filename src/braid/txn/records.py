"""What transactions leave in the metadata store: paths, values, index entries (PIP-473, settled questions).

| path | value | index entries |
|---|---|---|
| `/txn/<root>` | `TxnHeader` | OPEN: open by deadline; else: final by state and time |
| `/txn-op/<root>/<sub>-<seq>` | `TxnOp` | writes by segment, or acks by segment, subscription and root |
| `/txn-sub/<root>/s-<seq>` | empty; the sequence number is the sub number | |
| `/txn-aborted/<encSegment>/<txn>` | `AbortedTxn` | |
| `/txn-serial/<coordinator>` | `SerialBlock` | |
| `/sinks/<encSink>` | `SinkRecord` | by the time it expires |

Everything of a root has the partition key `<root>`; sinks have none. Owns names and shapes only; pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec

from braid.metadata.names import encode_name
from braid.metadata.values import MAX_INT64, read_json
from braid.model.positions import Position
from braid.model.txn import TxnId

HEADERS = "/txn"
OPS = "/txn-op"
SUBS = "/txn-sub"
ABORTED = "/txn-aborted"
SERIALS = "/txn-serial"
SINKS = "/sinks"
COORDINATORS = "/txn-tc/leader"
PARALLELISM = "/txn-tc/parallelism"

WRITES_BY_SEGMENT = "writes-by-segment"
ACKS_BY_SEGMENT_SUBSCRIPTION = "acks-by-segment-subscription"
TXN_BY_DEADLINE = "txn-by-deadline"
TXN_BY_FINAL_STATE = "txn-by-final-state"
SINKS_BY_EXPIRY = "sinks-by-expiry"

State = Literal["OPEN", "COMMITTED", "ABORTED"]
Kind = Literal["write", "ack"]
T = TypeVar("T")
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]
Place = Annotated[str, msgspec.Meta(pattern="^-?[0-9]{1,19}:-?[0-9]{1,19}$")]
"""`ledger:entry`."""
Mask = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$")]


class TxnHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one record that decides."""

    state: State
    timeout_ms: Number
    """Absolute, since the epoch."""
    created_ms: Number
    finalized_ms: Number | None = None
    owner: str | None = None
    """Principal that began it; None if there was none."""
    is_decider: bool = msgspec.field(name="decider", default=False)
    """Has sub-transactions; `winners` counts, and the deadline may be renewed."""
    winners: tuple[Number, ...] = ()
    """Sub numbers that a committed decider lets live; everything else of it is aborted, except its own sub 0."""
    sink: str | None = None
    """Of a decider that holds a batch of a sink: which sink, as the next two."""
    batch: Number | None = None
    run: str | None = None
    format_version: int = msgspec.field(name="formatVersion", default=1)

    @property
    def is_open(self) -> bool:
        return self.state == "OPEN"

    def outcome(self, sub: int) -> State:
        """What became of one of its sub-transactions (0 = itself)."""
        if self.state == "COMMITTED" and sub and sub not in self.winners:
            return "ABORTED"
        return self.state


class TxnOp(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A transactional write or acknowledgment, written down before it happens (INV10)."""

    kind: Kind
    segment: str
    """The topic's full name, `segment://` or `persistent://`."""
    subscription: str | None = None
    position: Place
    """`ledger:entry`. Of a write: the floor, the last position of the log at that moment; its entries come after it."""
    incarnation: str = ""
    """Of the log: an op of an earlier log of that name counts for nothing (INV5)."""
    is_cumulative: bool = msgspec.field(name="cumulative", default=False)
    ack_set: Mask = ""
    """Of an acknowledged batch: hex mask of the messages that are NOT acknowledged by this op; empty = the whole entry."""
    batch_size: Number = 0
    entries: Number = 1
    """How many entries a write op covers (decision 8)."""
    format_version: int = msgspec.field(name="formatVersion", default=1)


class AbortedTxn(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of this transaction in this segment stay hidden until everything up to `last` is trimmed."""

    last: Place
    """`ledger:entry`."""
    incarnation: str = ""
    format_version: int = msgspec.field(name="formatVersion", default=1)


class SerialBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Serials below `next` are taken."""

    next: Number
    format_version: int = msgspec.field(name="formatVersion", default=1)


class SinkBatch(msgspec.Struct, frozen=True):
    """A batch that one run of a job writes to a sink."""

    sink: str
    batch: int
    run: str


class SinkCurrent(msgspec.Struct, frozen=True, kw_only=True):
    """The batch a sink was last asked to take, of the run that the sink belongs to."""

    batch: Number
    txn: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,19}_[0-9]{1,19}$")]
    """Its decider, whose header says what became of it."""


class SinkRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is in a sink's output, and who may add to it."""

    run: str
    """The run the sink belongs to; another one takes it over and retires this one."""
    run_epoch: Number = msgspec.field(name="runEpoch", default=1)
    """How many runs it has belonged to."""
    current: SinkCurrent | None = None
    """None: the last one is in `last`."""
    last: Number | None = None
    """The highest batch that is certainly in the output; that of a committed `current` may be higher."""
    last_run: str | None = msgspec.field(name="lastRun", default=None)
    """Who wrote it."""
    retired_runs: tuple[str, ...] = msgspec.field(name="retiredRuns", default=())
    """Runs that lost the sink to a later one, the latest last; bounded."""
    owner: str | None = None
    """Principal that began it; None if there was none."""
    expires_ms: Number
    """When it is forgotten unless it is used before; absolute, since the epoch."""
    format_version: int = msgspec.field(name="formatVersion", default=1)


def sink_key(sink: str) -> str:
    return f"{SINKS}/{encode_name(sink)}"


def sink_index(record: SinkRecord) -> Mapping[str, str]:
    return {SINKS_BY_EXPIRY: padded(record.expires_ms)}


def header_key(root: TxnId) -> str:
    return f"{HEADERS}/{root}"


def ops_of(root: TxnId) -> str:
    """The collection of a root's ops; also the prefix of `op_prefix`."""
    return f"{OPS}/{root}"


def op_prefix(txn: TxnId) -> str:
    """For `append`, which adds `-<20 digits>`."""
    return f"{OPS}/{txn.root}/{txn.sub}"


def op_txn(key: str) -> TxnId:
    """The transaction, sub number included, of an op's key."""
    root, _, name = key.removeprefix(f"{OPS}/").partition("/")
    return TxnId.parse(root).with_sub(int(name.partition("-")[0]))


def subs_of(root: TxnId) -> str:
    return f"{SUBS}/{root}"


def aborted_in(segment: str) -> str:
    """The collection of a segment's aborted records."""
    return f"{ABORTED}/{encoded(segment)}"


def aborted_key(segment: str, txn: TxnId) -> str:
    return f"{aborted_in(segment)}/{txn}"


def serial_key(coordinator: int) -> str:
    return f"{SERIALS}/{coordinator}"


def leader_path(coordinator: int) -> str:
    return f"{COORDINATORS}/{coordinator}"


def padded(number: int) -> str:
    return f"{number:020d}"


def header_index(header: TxnHeader) -> Mapping[str, str]:
    if header.is_open:
        return {TXN_BY_DEADLINE: padded(header.timeout_ms)}
    return {TXN_BY_FINAL_STATE: f"{header.state}:{padded(header.finalized_ms or 0)}"}


def op_index(txn: TxnId, op: TxnOp) -> Mapping[str, str]:
    if op.kind == "write":
        return {WRITES_BY_SEGMENT: encoded(op.segment)}
    return {ACKS_BY_SEGMENT_SUBSCRIPTION: acks_secondary_of(op.segment, op.subscription or "", txn.root)}


@lru_cache(maxsize=4096)
def encoded(name: str) -> str:
    """A name without `/` and `:`, so that `:` separates. Asked for with every op, hence remembered."""
    return encode_name(name).replace(":", "%3A")


def acks_secondary(segment: str, subscription: str) -> str:
    """What the secondary keys of a subscription's acks begin with. Earlier versions wrote no more than this."""
    return f"{encoded(segment)}:{encoded(subscription)}"


def acks_secondary_of(segment: str, subscription: str, root: TxnId) -> str:
    """With the root, so that one transaction is found without a look at what the others hold there."""
    return f"{acks_secondary(segment, subscription)}:{root}"


def position_text(position: Position) -> str:
    return f"{position.ledger_id}:{position.entry_id}"


def text_position(text: str) -> Position:
    ledger, _, entry = text.partition(":")
    return Position(int(ledger), int(entry))


def encode(record: TxnHeader | TxnOp | AbortedTxn | SerialBlock | SinkRecord) -> bytes:
    return msgspec.json.encode(record)


def decode_header(key: str, value: bytes) -> TxnHeader:
    return _decode(TxnHeader, key, value)


def decode_op(key: str, value: bytes) -> TxnOp:
    return _decode(TxnOp, key, value)


def decode_aborted(key: str, value: bytes) -> AbortedTxn:
    return _decode(AbortedTxn, key, value)


def decode_serials(key: str, value: bytes) -> SerialBlock:
    return _decode(SerialBlock, key, value)


def decode_sink(key: str, value: bytes) -> SinkRecord:
    return _decode(SinkRecord, key, value)


def _decode(kind: type[T], key: str, value: bytes) -> T:
    return read_json(kind, key, value)
