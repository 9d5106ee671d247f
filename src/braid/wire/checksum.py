"""CRC-32C (Castagnoli), the checksum of entries and of topic lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fastcrc.crc32 import iscsi

crc32c: Final = iscsi
"""The checksum as an unsigned number, of anything that has bytes; of more of them if that of those before is given as well.
Other threads run meanwhile."""


def topics_hash(names: Iterable[str]) -> str:
    """Digest of a topic list: order does not matter, the empty list is `00000000`."""
    joined = ",".join(sorted(names)).encode()
    return crc32c(joined).to_bytes(4, "little").hex()
