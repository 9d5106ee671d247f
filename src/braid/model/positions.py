"""`Position`: where an entry stands in a log. A tuple, because one is made per entry."""

from __future__ import annotations

from typing import Final, NamedTuple


class Position(NamedTuple):
    """Ledger id and entry id, ordered by both. Entry -1 stands before a ledger's first entry."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


EARLIEST: Final = Position(-1, -1)
"""Before everything."""
LATEST: Final = Position((1 << 63) - 1, (1 << 63) - 1)
"""After everything."""
