"""The pure parts: the map of ledgers, retention, record formats."""

from __future__ import annotations

import pytest

from braid.errors import StoreMismatch
from braid.managedledger.ledger_map import LedgerMap
from braid.managedledger.records import (
    CursorPosition,
    LedgerInfo,
    MaskRecord,
    PositionRecord,
    RangeRecord,
    decode_position,
    encode_position,
)
from braid.managedledger.retention import Limits, fates
from braid.model.positions import EARLIEST, LATEST, Position


def mapped(*ledgers: tuple[int, int]) -> LedgerMap:
    made = LedgerMap()
    for ledger_id, count in ledgers:
        made.append(ledger_id, count)
    return made


def test_empty_map() -> None:
    empty = mapped()
    assert (empty.start, empty.end, empty.first, empty.last) == (0, 0, EARLIEST, EARLIEST)
    assert empty.clamp(LATEST) == empty.before(LATEST) == empty.after(EARLIEST) == EARLIEST


def test_positions_and_ordinals_against_a_list() -> None:
    made = mapped((3, 2), (7, 0), (9, 4), (12, 1), (20, 0))
    entries = [Position(3, 0), Position(3, 1), *(Position(9, i) for i in range(4)), Position(12, 0)]
    end = Position(20, 0)
    for ledger_id in range(22):
        for entry_id in range(-1, 6):
            position = Position(ledger_id, entry_id)
            later = [entry for entry in entries if entry >= position]
            assert made.clamp(position) == (later[0] if later else end)
            after = [entry for entry in entries if entry > position]
            assert made.after(position) == (after[0] if after else end)
            before = [entry for entry in entries if entry < made.clamp(position)]
            assert made.before(position) == (before[-1] if before else Position(3, -1))
            assert made.contains(position) == (position in entries)
    assert [made.at(made.ordinal(entry)) for entry in entries] == entries
    assert made.first == entries[0] and made.last == entries[-1]


def test_trimming_keeps_ordinals() -> None:
    made = mapped((3, 2), (9, 4), (12, 1))
    ordinal = made.ordinal(Position(9, 2))
    made.drop_first(1)
    assert made.ordinal(Position(9, 2)) == ordinal
    assert made.start == 2 and made.first == Position(9, 0)
    made.grow(5)
    assert made.last == Position(12, 4)
    made.append(13)
    made.drop_last()
    assert made.at(made.end) == Position(12, 5)


def info(ledger_id: int, *, size: int = 0, timestamp: int = 0) -> LedgerInfo:
    return LedgerInfo(ledger_id=ledger_id, entries=10, size=size, timestamp=timestamp)


def test_retention_by_size_walks_from_the_oldest() -> None:
    mb = 1 << 20
    ledgers = [info(i, size=mb, timestamp=1) for i in range(1, 7)]

    def count(slowest: Position | None, minutes: int, megabytes: int, now: int = 1) -> int:
        found = fates(ledgers, slowest, total_size=6 * mb, limits=Limits(minutes, megabytes), now_ms=now)
        return sum(each.goes for each in found)

    assert count(None, 0, 0, 2) == 5
    assert count(None, -1, 3) == 3
    assert count(None, -1, 100) == 0
    assert count(None, 1, -1, 60_001) == 0
    assert count(None, 1, -1, 60_002) == 5
    assert count(Position(3, 8), 0, 0, 2) == 2
    assert count(Position(3, 9), 0, 0, 2) == 3
    assert count(EARLIEST, 0, 0, 2) == 0


def test_position_bytes() -> None:
    position = CursorPosition(
        mark_delete=PositionRecord(7, 3),
        ranges=(RangeRecord(7, 5, 9),),
        masks=(MaskRecord(8, 1, f"{1 << 200:x}"),),
        properties={"p": -1},
    )
    assert decode_position(1, encode_position(position)) == position
    with pytest.raises(StoreMismatch):
        decode_position(1, b"")
    with pytest.raises(StoreMismatch):
        decode_position(1, encode_position(CursorPosition(format_version=2, mark_delete=PositionRecord(0, 0))))
