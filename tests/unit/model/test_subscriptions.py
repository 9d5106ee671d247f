"""Where a missing cursor begins: the whole table, and everybody who asks."""

from __future__ import annotations

import pytest

from braid.model.hashranges import HashRange
from braid.model.segments import SegmentInfo
from braid.model.subscriptions import Initial, cursor_start
from braid.scalable.draining import initial_for
from braid.scalable.records import SubscriptionMetadata

TABLE: list[tuple[Initial, int, int, Initial]] = [
    # wanted, subscription made at, segment made at, begins
    ("earliest", 0, 0, "earliest"),
    ("earliest", 3, 1, "earliest"),
    ("earliest", 3, 4, "earliest"),
    ("earliest", -1, 0, "earliest"),
    ("earliest", -1, 2, "earliest"),
    ("latest", 0, 0, "latest"),
    ("latest", 3, 0, "latest"),
    ("latest", 3, 3, "latest"),
    ("latest", 3, 4, "earliest"),
    ("latest", 0, 1, "earliest"),
    ("latest", -1, 0, "latest"),
    ("latest", -1, 1, "earliest"),
]


@pytest.mark.inv("INV7")
@pytest.mark.parametrize(("wanted", "subscribed_at", "created_at", "begins"), TABLE)
def test_where_a_missing_cursor_begins(wanted: Initial, subscribed_at: int, created_at: int, begins: Initial) -> None:
    assert cursor_start(wanted, subscribed_at=subscribed_at, created_at=created_at) == begins
    record = SubscriptionMetadata(initial=wanted, created_at_epoch=subscribed_at)
    segment = SegmentInfo(segment_id=9, hash_range=HashRange(0, 0xFFFF), created_at_epoch=created_at)
    assert initial_for(record, segment) == begins
