"""Settings of the `local` ledger store; every bound of it is here (INV17)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from braid.runtime.config import setting

_MAX = 1 << 40


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[ledger]`. The defaults suit a broker on one machine."""

    sync: Annotated[
        bool,
        setting("Sync each commit group before its entries are acknowledged; off loses messages", alias="journalSyncData"),
    ] = True
    group_bytes: Annotated[
        int, setting("Most bytes written by one commit group (one entry may exceed it)", ge=1, le=1 << 30)
    ] = 4 << 20
    pending_bytes: Annotated[int, setting("Most bytes waiting to be written; beyond, publishing is refused", ge=1, le=_MAX)] = (
        256 << 20
    )
    segment_bytes: Annotated[int, setting("A journal segment is followed by a new one at this size", ge=1, le=_MAX)] = 256 << 20
    checkpoint_bytes: Annotated[
        int, setting("A checkpoint starts when the journal has grown by this much since the last one", ge=1, le=_MAX)
    ] = 128 << 20
    checkpoint_seconds: Annotated[
        float, setting("A checkpoint starts this long after the last one if anything was written", ge=0.001, le=86_400)
    ] = 60.0
    buffer_bytes: Annotated[
        int,
        setting(
            "Most bytes of entries kept in memory until they are in ledger files; half of it starts a flush", ge=1, le=_MAX
        ),
    ] = 64 << 20
    tail_bytes: Annotated[
        int,
        setting(
            "A ledger with fewer buffered bytes goes into the checkpoint's snapshot, not into a file of its own", ge=0, le=_MAX
        ),
    ] = 16 << 10
    block_bytes: Annotated[int, setting("Entries are written to a ledger file in blocks of about this size", ge=1, le=_MAX)] = (
        256 << 10
    )
    open_files: Annotated[
        int,
        setting(
            "Most ledger files open at the same time; never more than a quarter of what the system allows", ge=2, le=1_000_000
        ),
    ] = 4096
    reserve_bytes: Annotated[
        int,
        setting(
            "Free space kept for checkpoints and for deleting: entries that would leave less are refused, and the store is "
            "read-only until there is room again",
            ge=0,
            le=_MAX,
        ),
    ] = 64 << 20
    resume_bytes: Annotated[
        int,
        setting(
            "Free space beyond the reserve with which a read-only store takes entries again; it is at least what was refused, "
            "or what a checkpoint found no room for",
            ge=0,
            le=_MAX,
        ),
    ] = 16 << 20
    probe_seconds: Annotated[float, setting("How often a read-only store looks for room", ge=0.001, le=3600)] = 1.0
