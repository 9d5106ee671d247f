"""CRC-32C (Castagnoli), the checksum of entries and of topic lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from google_crc32c import value

crc32c: Final[Callable[[bytes], int]] = value
"""The checksum as an unsigned number."""


def topics_hash(names: Iterable[str]) -> str:
    """Digest of a topic list: order does not matter, the empty list is `00000000`."""
    joined = ",".join(sorted(names)).encode()
    return crc32c(joined).to_bytes(4, "little").hex()
