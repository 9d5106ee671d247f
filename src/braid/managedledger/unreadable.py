"""`UnreadableCursors`: the cursors of a log whose records cannot be read, and why.

Each costs its own subscription: that is refused with an error that names the record until somebody repairs the record or
deletes the subscription. Nobody knows where such a cursor stands, so nothing is trimmed while there are any. Owns no record.
"""

from __future__ import annotations

import logging

from braid.errors import StoreMismatch

log = logging.getLogger(__name__)


class UnreadableCursors(dict[str, StoreMismatch]):
    """By name of the cursor."""

    def pass_over(self, name: str, log_name: str, error: StoreMismatch) -> None:
        """Leave one out, and keep what it may need."""
        log.warning("the cursor %s of log %s is passed over, and everything is kept for it: %s", name, log_name, error)
        self[name] = error

    def check(self, name: str) -> None:
        """Raise StoreMismatch if the cursor of this name is one of them."""
        if (error := self.get(name)) is not None:
            raise StoreMismatch(f"{error.message} Repair it, or delete the subscription {name}.")
