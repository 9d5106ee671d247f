"""Custom metadata of the ledgers this package creates: who made a ledger and what for. For audits only, never for routing."""

from __future__ import annotations


def ledger_labels(component: str, name: str, incarnation: str) -> dict[str, bytes]:
    """Labels of a ledger that belongs to the object `name`."""
    return {
        "application": b"braid",
        "component": component.encode(),
        "braid/name": name.encode(),
        "braid/incarnation": incarnation.encode(),
    }
