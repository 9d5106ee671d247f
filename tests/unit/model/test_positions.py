"""Positions and their order."""

from __future__ import annotations

from braid.model.positions import EARLIEST, LATEST, Position


def test_order_and_form() -> None:
    assert EARLIEST < Position(0, 0) < Position(0, 1) < Position(1, -1) < Position(1, 0) < LATEST
    assert str(Position(5, 3)) == "5:3"
    assert Position(5, 3) == (5, 3)
    assert LATEST == (2**63 - 1, 2**63 - 1)
    assert EARLIEST == (-1, -1)
