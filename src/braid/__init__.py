"""Braid: a message-streaming platform whose topics grow and shrink while they are in use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braid.client import EARLIEST as EARLIEST
    from braid.client import LATEST as LATEST
    from braid.client import Checkpoint as Checkpoint
    from braid.client import DeadLetterPolicy as DeadLetterPolicy
    from braid.client import connect as connect
    from braid.client.admin import AdminClient as AdminClient

__version__ = "0.1.0"

_EXPORTS = {
    "AdminClient": "braid.client.admin",
    "Checkpoint": "braid.client",
    "DeadLetterPolicy": "braid.client",
    "EARLIEST": "braid.client",
    "LATEST": "braid.client",
    "connect": "braid.client",
}


def __getattr__(name: str) -> Any:
    """What users need at once, imported when first used: importing `braid` alone stays cheap."""
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'braid' has no attribute {name!r}")
