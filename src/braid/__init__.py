"""Braid: a message-streaming platform whose topics grow and shrink while they are in use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braid.client import connect as connect
    from braid.client.admin import AdminClient as AdminClient

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`braid.connect` and `braid.AdminClient`, imported when first used: importing `braid` alone stays cheap."""
    if name == "connect":
        from braid.client import connect

        return connect
    if name == "AdminClient":
        from braid.client.admin import AdminClient

        return AdminClient
    raise AttributeError(f"module 'braid' has no attribute {name!r}")
