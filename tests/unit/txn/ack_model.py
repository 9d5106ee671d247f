"""A cursor in memory, message by message, and what transactional acknowledgments mean on that level."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from braid.errors import LedgerFenced
from braid.model.positions import Position

SIZE = 3
"""Messages of each entry."""
Message = tuple[int, int]
"""Entry and number inside its batch."""


def place(entry: int) -> Position:
    return Position(1, entry)


def bits(numbers: set[int]) -> int:
    return sum(1 << each for each in numbers)


def upto(message: Message) -> set[Message]:
    """This message and all before it."""
    return {(entry, number) for entry in range(message[0] + 1) for number in range(SIZE) if (entry, number) <= message}


class ModelCursor:
    """Remembers single messages; the last entry is given."""

    def __init__(self, entries: int) -> None:
        self.acked: set[Message] = set()
        self.stored: set[Message] = set()
        """What a crash leaves."""
        self.entries = entries
        self.is_lost = False
        self.flushes = 0
        self.failures: list[BaseException] = []
        """What the next flushes raise."""
        self.may_flush: asyncio.Event | None = None

    @property
    def incarnation(self) -> str:
        return "a1"

    @property
    def last_position(self) -> Position:
        return place(self.entries - 1)

    @property
    def mark_delete(self) -> Position:
        entry = 0
        while entry < self.entries and self.is_acknowledged(place(entry)):
            entry += 1
        return place(entry - 1)

    def position_before(self, position: Position) -> Position:
        return place(position.entry_id - 1)

    def is_acknowledged(self, position: Position) -> bool:
        return all((position.entry_id, each) in self.acked for each in range(SIZE))

    def unacked_mask(self, position: Position) -> int | None:
        unacked = {each for each in range(SIZE) if (position.entry_id, each) not in self.acked}
        return bits(unacked) if 0 < len(unacked) < SIZE else None

    def acknowledge(self, positions: Sequence[Position], masks: Mapping[Position, int]) -> None:
        for position in positions:
            self.acked |= {(position.entry_id, each) for each in range(SIZE)}
        for position, mask in masks.items():
            self.acked |= {(position.entry_id, each) for each in range(SIZE) if not mask >> each & 1}

    def acknowledge_cumulative(self, position: Position, mask: int | None) -> None:
        self.acked |= upto((position.entry_id - 1, SIZE))
        self.acknowledge((), {position: mask or 0})

    async def flush(self) -> None:
        self.flushes += 1
        if self.may_flush is not None:
            await self.may_flush.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.stored = set(self.acked)

    async def check_owner(self) -> None:
        if self.is_lost:
            raise LedgerFenced("The log was taken over by another owner.")
