"""Pulsar's spellings of what Braid's admin commands take, next to Braid's own.

`pulsar-admin scalable-topics` names by options what Braid takes by position (`seek orders -s audit -t 1h`). Owns which
spellings there are, and that a value given in two of them must be the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import typer

from braid.errors import ConfigError

Spellings = Mapping[str, tuple[str, ...]]
_SUBSCRIPTION = ("-s", "--subscription")
_SURE = ("-f", "--force")
_OF: Mapping[tuple[str, str], Spellings] = {
    ("scalable-topics", "list"): {"properties": ("-p",)},
    ("scalable-topics", "create"): {"segments": ("-s", "--initial-segments"), "properties": ("-p",)},
    ("scalable-topics", "delete"): {"force": ("-f",)},
    ("scalable-topics", "split-segment"): {"segment": ("-s", "--segment-id")},
    ("scalable-topics", "merge-segments"): {"segment": ("--segment-id-1",), "other": ("--segment-id-2",)},
    ("scalable-topics", "seek"): {"subscription": _SUBSCRIPTION, "to": ("-t", "--time"), "yes": _SURE},
    ("scalable-topics", "clear-backlog"): {"subscription": _SUBSCRIPTION, "yes": _SURE},
    ("scalable-topics", "create-subscription"): {"subscription": _SUBSCRIPTION, "kind": ("-t", "--type")},
    ("scalable-topics", "delete-subscription"): {"subscription": _SUBSCRIPTION, "yes": _SURE},
}
_PREFIX = "pulsar_"


def spellings(noun: str, verb: str) -> Spellings:
    """Further names of a command's parameters."""
    return _OF.get((noun, verb), {})


def further_option(name: str, kind: Any, flags: tuple[str, ...], own: str) -> inspect.Parameter:
    """The option for Pulsar's spelling of a parameter that is called `own`. It may be repeated, so that what contradicts itself
    is seen rather than the last one taken."""
    info = typer.Option([], *flags, metavar=f"<{kind.__name__}>", help=f"Pulsar's spelling of {own}.")
    return inspect.Parameter(_PREFIX + name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=list[kind])


def merge(values: dict[str, Any], further: Spellings, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values with what was given in Pulsar's spelling; `defaults` for what was given in none. Raises ConfigError for what
    is given differently or is missing."""
    found = {name: value for name, value in values.items() if not name.startswith(_PREFIX)}
    for name, flags in further.items():
        if _PREFIX + name not in values:
            continue
        given = [*([] if found[name] is None else [found[name]]), *values[_PREFIX + name]]
        shown = "/".join(flags)
        if len({str(each).lower() if name == "kind" else each for each in given}) > 1:
            told = " and ".join(repr(each) for each in given)
            raise ConfigError(f"The {name} is given as {told}, in its place and by {shown}; give it once.")
        if not given and name not in defaults:
            raise ConfigError(f"Missing argument '{name}'; give it in its place or by {shown}.")
        found[name] = given[0] if given else defaults[name]
    return found
