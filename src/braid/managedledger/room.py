"""What is said while a log's storage takes nothing: one sentence for all who are refused, with the kind of trouble."""

from __future__ import annotations

from braid.errors import BraidError, LedgerStoreReadOnly, StorageFull, StorageUnavailable
from braid.managedledger.api import LedgerResolver


def unavailable(log_name: str, cause: BraidError) -> StorageUnavailable:
    """The error for whoever wanted to write to this log."""
    kind = StorageFull if isinstance(cause, LedgerStoreReadOnly) else StorageUnavailable
    return kind(f"The log {log_name} cannot be written at the moment: {cause}")


def check_room(log_name: str, resolver: LedgerResolver) -> None:
    """Raise StorageFull while the store of new ledgers takes no entries for lack of space."""
    refusal = getattr(resolver.active(), "refusal", None)
    if isinstance(refusal, LedgerStoreReadOnly):
        raise unavailable(log_name, refusal)
