"""Topic logs over ledgers: `ManagedLedger`, `ManagedCursor`, retention, entry cache, schema storage."""
