"""The journal and the catalog below the store: what replay accepts and what it refuses."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

import pytest

from braid.errors import EntryCorrupt, LedgerStoreReadOnly
from braid.ledger.backends.local import records
from braid.ledger.backends.local.journal import Journal, Replay, segment_name
from braid.ledger.backends.local.records import CreateBody, Kind
from braid.ledger.backends.local.state import Catalog
from braid.testing.files import ForgetfulFiles, Operation

PATH = Path("/journal")
STORE_ID = b"12345678"
CREATED = records.encode_body(CreateBody(1, {}))


def new_journal(disk: ForgetfulFiles, *, segment_bytes: int = 1 << 20) -> Journal:
    disk.make_dir(PATH)
    rng = Random(6)
    return Journal(disk, PATH, STORE_ID, lambda: rng.randbytes(8), segment_bytes=segment_bytes, reserve_bytes=0, sync=True)


def replayed(disk: ForgetfulFiles) -> list[bytes]:
    return [payload for payload, _ in Replay(disk, PATH, STORE_ID, 1).groups()]


def test_groups_come_back_in_order_across_segments() -> None:
    disk = ForgetfulFiles(Random(1))
    journal = new_journal(disk, segment_bytes=300)
    journal.start(1, 1)
    groups = [b"%d" % number * 30 for number in range(20)]
    for group in groups:
        journal.append_group(group)
    assert journal.segment > 3
    assert replayed(disk.power_cut()) == groups


def test_a_roll_that_fails_leaves_no_segment_behind() -> None:
    """With a leftover segment, a torn group before it would be taken for damage and the store would not start."""
    for seed in range(30):
        disk = ForgetfulFiles(Random(seed))
        journal = new_journal(disk)
        journal.start(1, 1)
        journal.append_group(b"first")
        disk.fail("sync", segment_name(2), errno.ENOSPC)
        with pytest.raises(LedgerStoreReadOnly):
            journal.roll()
        journal.append_group(b"second")
        disk.fail("sync", segment_name(1), errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            journal.append_group(b"torn" * 500)
        assert replayed(disk.power_cut())[:2] == [b"first", b"second"]


@pytest.mark.parametrize("operation", ["append", "sync"])
def test_a_refused_group_is_gone_even_if_the_power_fails_at_once(operation: Operation) -> None:
    """Its writers were told that it was not written, so the truncation must be durable before that."""
    for seed in range(30):
        disk = ForgetfulFiles(Random(seed))
        journal = new_journal(disk)
        journal.start(1, 1)
        journal.append_group(b"kept")
        disk.fail(operation, "journal", errno.ENOSPC)
        with pytest.raises(LedgerStoreReadOnly):
            journal.append_group(b"refused")
        assert replayed(disk.power_cut()) == [b"kept"]


def test_another_stores_segment_is_refused() -> None:
    disk = ForgetfulFiles(Random(1))
    journal = new_journal(disk)
    journal.start(1, 1)
    with pytest.raises(EntryCorrupt, match="another place or store"):
        list(Replay(disk, PATH, b"othersto", 1).groups())


def test_replay_refuses_a_gap_in_a_ledger() -> None:
    catalog = Catalog()
    catalog.apply(records.record(Kind.CREATE, 1, 0, CREATED) + records.record(Kind.ENTRY, 1, 0, b"x"), "here")
    with pytest.raises(EntryCorrupt, match="here: entry 2 of ledger 1 follows entry 0"):
        catalog.apply(records.record(Kind.ENTRY, 1, 2, b"x"), "here")


def test_replay_refuses_entries_after_the_end() -> None:
    catalog = Catalog()
    catalog.apply(records.record(Kind.CREATE, 1, 0, CREATED) + records.record(Kind.CLOSE, 1, -1), "here")
    with pytest.raises(EntryCorrupt):
        catalog.apply(records.record(Kind.ENTRY, 1, 0, b"x"), "here")
    with pytest.raises(EntryCorrupt, match="closed at entry 3"):
        catalog.apply(records.record(Kind.CLOSE, 1, 3), "here")


def test_replay_refuses_records_of_a_ledger_nobody_created_unless_it_was_deleted() -> None:
    catalog = Catalog()
    catalog.apply(records.record(Kind.ENTRY, 1, 0, b"x"), "here")
    with pytest.raises(EntryCorrupt, match="here: a record of ledger 1"):
        catalog.check_complete()
    catalog.apply(records.record(Kind.CLOSE, 1, 0) + records.record(Kind.DELETE, 1, 0), "there")
    catalog.check_complete()


def test_applying_records_twice_changes_nothing() -> None:
    """A snapshot may already hold what the journal after it says."""
    payload = b"".join(
        (
            records.record(Kind.CREATE, 1, 0, CREATED),
            records.record(Kind.ENTRY, 1, 0, b"x"),
            records.record(Kind.ENTRY, 1, 1, b"y"),
            records.record(Kind.CLOSE, 1, 1),
        )
    )
    catalog = Catalog()
    catalog.apply(payload, "here")
    catalog.apply(payload, "here")
    state = catalog.find(1)
    assert (state.tail, state.last, state.length, state.is_closed) == ([b"x", b"y"], 1, 2, True)


def test_an_unknown_record_is_refused() -> None:
    catalog = Catalog()
    catalog.apply(records.record(Kind.CREATE, 1, 0, CREATED), "here")
    with pytest.raises(EntryCorrupt, match="unknown kind 8"):
        catalog.apply(records.record(Kind.END, 1, 0), "here")
