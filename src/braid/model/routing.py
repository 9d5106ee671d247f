"""`Routing`: how a key finds its segment. A layout carries its routing as data, so that all producers agree. Pure."""

from __future__ import annotations

from enum import StrEnum

from braid.model.hashing import bucket_hash, murmur3_x86_32, segment_hash


class Routing(StrEnum):
    """What of a key's hash chooses the segment."""

    HIGH16 = "high16"
    """The upper half of the raw hash, looked up in the ranges (Pulsar's main branch; our default)."""
    LOW16 = "low16"
    """The lower half, looked up in the ranges (the released Pulsar 5.0.0-M1 client)."""
    MOD_N = "mod-N"
    """The masked hash modulo the number of active segments: regular topics, whose ranges mean nothing."""


def ring_hash(routing: Routing, key: str) -> int:
    """The 16-bit hash of a key under a routing by ranges."""
    raw = murmur3_x86_32(key.encode())
    return bucket_hash(raw) if routing is Routing.LOW16 else segment_hash(raw)
