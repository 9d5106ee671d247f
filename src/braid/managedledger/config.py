"""Settings of topic logs; every bound of this package is here (INV17)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from braid.runtime.config import setting


class ManagedLedgerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[managed_ledger]`."""

    max_entries_per_ledger: Annotated[
        int,
        setting(
            "Entries after which a log goes on in a new ledger", ge=1, le=10_000_000, alias="managedLedgerMaxEntriesPerLedger"
        ),
    ] = 50_000
    max_ledger_bytes: Annotated[int, setting("Bytes after which a log goes on in a new ledger", ge=1, le=1 << 40)] = 2048 << 20
    max_ledger_age_ms: Annotated[int, setting("Age after which a log goes on in a new ledger", ge=1, le=366 * 86_400_000)] = (
        240 * 60_000
    )
    min_ledger_age_ms: Annotated[
        int, setting("Age before which a ledger is not left because of its number of entries", ge=0, le=366 * 86_400_000)
    ] = 10 * 60_000
    max_queued_entries: Annotated[
        int, setting("Adds of one log that wait while it changes ledgers; more are refused", ge=1, le=10_000_000)
    ] = 100_000
    max_queued_bytes: Annotated[
        int, setting("Bytes of adds of one log that wait while it changes ledgers; more are refused", ge=1, le=1 << 40)
    ] = 256 << 20
    max_open_readers: Annotated[int, setting("Ledgers one log keeps open for reading", ge=1, le=10_000)] = 4
    cursor_flush_ms: Annotated[
        int, setting("Longest time an acknowledgment without a receipt stays in memory only", ge=1, le=3_600_000)
    ] = 1000
    max_entries_per_cursor_ledger: Annotated[
        int,
        setting(
            "Positions after which a cursor goes on in a new ledger",
            ge=1,
            le=10_000_000,
            alias="managedLedgerCursorMaxEntriesPerLedger",
        ),
    ] = 50_000
    max_persisted_ranges: Annotated[
        int,
        setting(
            "Individually acknowledged ranges kept over a restart; the ones beyond are delivered again",
            ge=0,
            le=1_000_000,
            alias="managedLedgerMaxUnackedRangesToPersist",
        ),
    ] = 10_000
    max_ranges_in_record: Annotated[
        int,
        setting(
            "Ranges up to which a closed cursor lives in its metadata record alone",
            ge=0,
            le=100_000,
            alias="managedLedgerMaxUnackedRangesToPersistInMetadataStore",
        ),
    ] = 1000
    orphan_sweep_minutes: Annotated[
        int,
        setting(
            "Time after a start until ledgers left behind by a crash are looked for, and again until they go; 0 = never",
            ge=0,
            le=7 * 24 * 60,
        ),
    ] = 10
    skip_lost_ledgers: Annotated[
        bool,
        setting(
            "Load topics whose records name ledgers that the store does not know, and give up what was in them; otherwise "
            "such topics are refused"
        ),
    ] = False
    cache_bytes: Annotated[int, setting("Entries kept in memory for all logs of a broker, in bytes", ge=0, le=1 << 40)] = (
        64 << 20
    )


DEFAULTS = ManagedLedgerConfig()
