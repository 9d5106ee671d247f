"""Plug-ins: backends and extensions found by entry point, loaded by configured name only."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import Any

from braid.errors import ConfigError


def load(group: str, name: str) -> Any:
    """The object behind entry point `name` of `group`; an installed plug-in that nobody names stays unloaded."""
    found = entry_points(group=group)
    for point in found:
        if point.name == name:
            return point.load()
    known = sorted(point.name for point in found)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"installed: {', '.join(known) or 'none'}."
    raise ConfigError(f"There is no {group} plug-in named {name!r}; {hint}")
