"""What a client asks of sinks: one function per request, arguments in, the whole frame out. Braid only. Owns shapes only."""

from __future__ import annotations

from braid.wire import messages
from braid.wire.commands import encode
from braid.wire.types import CommandType


def begin(request_id: int, sink: str, batch: int, run: str, ttl_ms: int) -> bytes:
    """BEGIN_SINK: the decider of a batch, or that the batch is in the output. Can be repeated."""
    body = messages.CommandBeginSink(request_id=request_id, sink=sink, batch=batch, run=run, txn_ttl_millis=ttl_ms)
    return encode(CommandType.BEGIN_SINK, body)


def get(request_id: int, sink: str) -> bytes:
    """GET_SINK: which batches a sink has."""
    return encode(CommandType.GET_SINK, messages.CommandGetSink(request_id=request_id, sink=sink))
