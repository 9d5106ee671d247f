"""Every call of the admin API that Braid's client makes, as data.

An `Operation` says once what a call is: method, path, query, body, reply, and the noun and verb under which users know it. The
transport sends what it says, `AdminClient` has one method per noun and verb, the command line one command. Tests hold the
table against the routes of the broker, against `AdminClient` and against the commands. Pure.
"""

from __future__ import annotations

from typing import Any

from braid.client import (
    operations_cluster,
    operations_namespaces,
    operations_scalable,
    operations_topics,
    operations_transactions,
)
from braid.client.operation import Operation as Operation

OPERATIONS: tuple[Operation[Any], ...] = tuple(
    each
    for module in (
        operations_cluster,
        operations_namespaces,
        operations_topics,
        operations_scalable,
        operations_transactions,
    )
    for each in vars(module).values()
    if isinstance(each, Operation)
)
"""All of them."""


def operations_of(noun: str, verb: str) -> list[Operation[Any]]:
    """The operations behind a noun and verb; the first one describes the command."""
    return [each for each in OPERATIONS if (each.noun, each.verb) == (noun, verb)]
