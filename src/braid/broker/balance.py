"""Balance by count: the leader moves one bundle at a time from the fullest broker to the emptiest.

Owns the choice (pure) and nothing else; `Ownership` carries moves out. Never flaps: a bundle moves only if the counts differ by
two or more, so each move brings them closer together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Move(NamedTuple):
    """A bundle (by the key of its lock) and where it shall go."""

    key: str
    destination: str


def emptiest(counts: Mapping[str, int]) -> str:
    """The broker with the fewest bundles; of several, the first by id, so that all brokers choose the same one."""
    return min(counts, key=lambda broker_id: (counts[broker_id], broker_id))


def next_move(bundles: Mapping[str, Collection[str]]) -> Move | None:
    """The next move for brokers and the bundles they have; None if they are balanced."""
    if len(bundles) < 2:
        return None
    counts = {broker_id: len(keys) for broker_id, keys in bundles.items()}
    target = emptiest(counts)
    fullest = max(counts, key=lambda broker_id: (counts[broker_id], broker_id))
    if counts[fullest] - counts[target] < 2:
        return None
    return Move(min(bundles[fullest]), target)
