"""A stored entry as an HTTP response: the payload as body, everything else in headers (protocol sheet 9.6)."""

from __future__ import annotations

import base64
import json
from urllib.parse import quote

from litestar.response import Response

from braid.managedledger.api import Entry
from braid.web.stats import iso
from braid.wire.commands import signed64
from braid.wire.compression import decompress
from braid.wire.entries import entry_metadata, payload_offset
from braid.wire.messages import MessageMetadata
from braid.wire.types import CompressionType

MAX_UNCOMPRESSED_BYTES = 256 << 20
FIELDS = (
    ("partition-key", "partition_key"),
    ("partition-key-b64-encoded", "partition_key_b64_encoded"),
    ("ordering-key", "ordering_key"),
    ("uuid", "uuid"),
    ("replicated-from", "replicated_from"),
    ("num-chunks-from-msg", "num_chunks_from_msg"),
    ("total-chunk-msg-size", "total_chunk_msg_size"),
    ("chunk-id", "chunk_id"),
    ("marker-type", "marker_type"),
    ("txnid-least-bits", "txnid_least_bits"),
    ("txnid-most-bits", "txnid_most_bits"),
    ("highest-sequence-id", "highest_sequence_id"),
    ("encryption-algo", "encryption_algo"),
    ("uncompressed-size", "uncompressed_size"),
    ("schema-version", "schema_version"),
    ("null-value", "null_value"),
    ("null-partition-key", "null_partition_key"),
)
_PRINTABLE = "".join(map(chr, range(32, 127))).replace("%", "")


def message_response(entry: Entry, *, is_aborted: bool = False, is_undecided: bool = False) -> Response[bytes]:
    """The entry's payload, decompressed unless it is encrypted or a chunk; a batch comes as a whole. What consumers do not see
    because of a transaction is shown too, and marked."""
    metadata = entry_metadata(entry.body)
    payload = entry.body[payload_offset(entry.body) :]
    is_chunk = metadata.num_chunks_from_msg > 1
    if not metadata.encryption_keys and not is_chunk:
        payload = decompress(metadata.compression, payload, metadata.uncompressed_size, MAX_UNCOMPRESSED_BYTES)
    headers = {"X-Pulsar-Message-ID": f"{entry.ledger_id}:{entry.entry_id}", **_headers(metadata, len(payload))}
    headers["X-Pulsar-Broker-Entry-METADATA-timestamp"] = iso(entry.append_ms)
    headers["X-Pulsar-Broker-Entry-METADATA-index"] = str(entry.index)
    if entry.txn is not None:
        headers["X-Pulsar-txn-aborted"] = "true" if is_aborted else "false"
        headers["X-Pulsar-txn-uncommitted"] = "true" if is_undecided else "false"
    return Response(payload, media_type="application/octet-stream", headers=headers)


def _headers(metadata: MessageMetadata, size: int) -> dict[str, str]:
    found: dict[str, str] = {
        "producer-name": _safe(metadata.producer_name),
        "sequence-id": str(signed64(metadata.sequence_id)),
        "publish-time": iso(metadata.publish_time),
    }
    _add_fields(found, metadata)
    if metadata.properties:
        found["PROPERTY"] = json.dumps({each.key: each.value for each in metadata.properties})
    for name, field in (("event-time", "event_time"), ("deliver-at-time", "deliver_at_time")):
        if metadata.HasField(field) and 0 < getattr(metadata, field) < 1 << 45:
            found[name] = iso(getattr(metadata, field))
    if metadata.HasField("compression"):
        found["compression"] = CompressionType(metadata.compression).name
    if metadata.HasField("num_messages_in_batch"):
        found["num-batch-message"] = str(metadata.num_messages_in_batch)
        found["batch-size"] = str(size)
    if metadata.num_chunks_from_msg > 1:
        found["PROPERTY-TOTAL-CHUNKS"] = str(metadata.num_chunks_from_msg)
        found["PROPERTY-CHUNK-ID"] = str(metadata.chunk_id)
    if metadata.encryption_keys:
        found["Is-Encrypted"] = "true"
    return {f"X-Pulsar-{name}": value for name, value in found.items()}


def _add_fields(found: dict[str, str], metadata: MessageMetadata) -> None:
    """Fields that go into a header as they are."""
    for name, field in FIELDS:
        if not metadata.HasField(field):
            continue
        value = getattr(metadata, field)
        if isinstance(value, bool):
            found[name] = "true" if value else "false"
        elif isinstance(value, bytes):
            found[f"Base64-{name}"] = base64.b64encode(value).decode()
        else:
            found[name] = _safe(str(value))


def _safe(text: str) -> str:
    """Text from a producer that may stand in a header: anything unprintable is percent-encoded."""
    return quote(text, safe=_PRINTABLE)
