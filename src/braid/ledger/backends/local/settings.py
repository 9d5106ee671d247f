"""`LocalSettings`: the bounds and intervals of a `local` ledger store (INV17). Holds values only."""

from __future__ import annotations

import msgspec

from braid.errors import ConfigError


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a `local` store uses memory, disk and time. The defaults suit a broker on one machine."""

    sync: bool = True
    """Sync each commit group before its entries are confirmed (INV1). `False` risks losing confirmed messages."""
    group_bytes: int = 4 << 20
    """Most bytes written by one commit group (one entry may exceed it)."""
    pending_bytes: int = 256 << 20
    """Most bytes waiting to be written; beyond, `append` raises LedgerOverloaded."""
    segment_bytes: int = 256 << 20
    """A journal segment is followed by a new one at this size."""
    checkpoint_bytes: int = 128 << 20
    """A checkpoint starts when the journal has grown by this much since the last one."""
    checkpoint_seconds: float = 60.0
    """A checkpoint starts this long after the last one if anything was written."""
    buffer_bytes: int = 64 << 20
    """Most bytes of confirmed entries kept in memory until they are in ledger files; half of it starts a flush."""
    tail_bytes: int = 16 << 10
    """A ledger with fewer buffered bytes goes into the checkpoint's snapshot instead of a file of its own."""
    block_bytes: int = 256 << 10
    """Entries are written to a ledger file in blocks of about this size."""
    open_files: int = 256
    """Most ledger files open at the same time."""
    reserve_bytes: int = 64 << 20
    """Free space kept for checkpoints: with less, the store is read-only until there is room again."""
    probe_seconds: float = 1.0
    """How often a read-only store looks for room."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            low = 0 if name in ("reserve_bytes", "sync", "tail_bytes") else 2 if name == "open_files" else 1e-3
            if not low <= value <= 1 << 40:
                raise ConfigError(f"The ledger setting {name} = {value} is out of range; use a value from {low} to {1 << 40}.")
        if self.group_bytes > 1 << 30:
            raise ConfigError(f"The ledger setting group_bytes = {self.group_bytes} is too large; use at most {1 << 30}.")
