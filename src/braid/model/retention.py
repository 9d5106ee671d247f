"""`RetentionPolicies`: how long messages are kept, as a namespace or topic says. `NextTrim`: what a log or a topic deletes
next, a value of stats, made by whoever keeps the messages. Pure."""

from __future__ import annotations

import msgspec


class RetentionPolicies(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How long acknowledged messages are kept; -1 = no limit."""

    retention_time_in_minutes: int = 0
    retention_size_in_mb: int = msgspec.field(default=0, name="retentionSizeInMB")


class NextTrim(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a log deletes next: its oldest ledger that is closed."""

    rule: str = "newest"
    """What decides: `read` (nothing keeps it), `unread` (kept although no subscription has read it), `time` or `size` (the
    policy), `needed` (a subscription or an open transaction), `newest` (there is no other ledger)."""
    at_ms: int | None = None
    """When it goes, as things stand; None if no time is known."""
    entries: int = 0
    messages: int | None = 0
    """None if that is not known."""
    bytes: int = 0
    unread_bytes: int = 0
    """Of all ledgers that stay only because no subscription has read them."""
    unread_minutes: int = 0
    """How long such messages are kept, -1 = for ever; 0 if the topic has a subscription or a policy of its own."""
