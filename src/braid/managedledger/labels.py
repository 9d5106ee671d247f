"""Custom metadata of the ledgers this package creates: who made a ledger and what for.

For audits and for finding orphans (`orphans.py`); never for routing.
"""

from __future__ import annotations

from collections.abc import Mapping

APPLICATION = b"braid"


def ledger_labels(component: str, name: str, incarnation: str) -> dict[str, bytes]:
    """Labels of a ledger that belongs to the object `name`."""
    return {
        "application": APPLICATION,
        "component": component.encode(),
        "braid/name": name.encode(),
        "braid/incarnation": incarnation.encode(),
    }


def labelled_for(custom: Mapping[str, bytes]) -> tuple[str, str] | None:
    """Component and name given to `ledger_labels`; None if these are not our labels."""
    if custom.get("application") != APPLICATION or not custom.get("component") or not custom.get("braid/name"):
        return None
    try:
        return custom["component"].decode(), custom["braid/name"].decode()
    except UnicodeDecodeError:
        return None
