"""A reader at the end of a log whose last entries are acknowledged one by one asks once, not for ever (found by simulation)."""

from __future__ import annotations

from typing import Any

from braid.model.positions import Position


async def test_acknowledged_entries_at_the_end_are_passed(world: Any, kit: Any) -> None:
    log, listener = await world.open()
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(12))
    positions = [Position(entry.ledger_id, entry.entry_id) for entry, _ in listener.added]
    cursor.acknowledge(positions[-3:])
    seen: list[Position] = []
    while entries := await cursor.read(5, 1 << 20):
        seen += [Position(entry.ledger_id, entry.entry_id) for entry in entries]
    assert seen == positions[:-3]
    assert cursor.read_position > log.last_position
    assert cursor.read_cached(5, 1 << 20) == []
    await kit.fill(log, listener, range(12, 14))
    assert len(await cursor.read(5, 1 << 20)) > 0
