"""A log on a full disk: the kind of error that its producers show at once, and a log file that stays short."""

from __future__ import annotations

from typing import Any

import pytest

from braid.errors import LedgerOverloaded, LedgerStoreReadOnly, StorageFull, StorageUnavailable, StoreUnavailable
from braid.managedledger.api import SingleStore
from braid.managedledger.room import check_room, unavailable
from braid.model.positions import Position


async def test_who_writes_to_a_full_disk_is_told_so(world: Any, kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(2))
    faults.arm(1, after=False, error=LedgerStoreReadOnly("full"))
    with pytest.raises(StorageFull, match="full"):
        log.add(kit.body_of(2), 1, 2)
    faults.arm(1, after=False, error=LedgerStoreReadOnly("still full"))  # of the settling, or of the next ledger
    log.add(kit.body_of(3), 1, 3)
    await listener.until(3)
    assert [type(error) for error, _contexts in listener.failed][-1] is StorageFull
    assert "full" not in caplog.text, "of a full disk its store tells"


async def test_only_a_full_store_refuses_producers() -> None:
    class Store:
        refusal: Exception | None = None

    store: Any = Store()
    check_room("log", SingleStore(store))
    store.refusal = LedgerOverloaded("busy")
    check_room("log", SingleStore(store))
    store.refusal = LedgerStoreReadOnly("full")
    with pytest.raises(StorageFull, match="The log log cannot be written at the moment: full"):
        check_room("log", SingleStore(store))
    assert type(unavailable("log", LedgerOverloaded("busy"))) is StorageUnavailable
    assert (StorageFull.code, LedgerStoreReadOnly.code, StorageUnavailable.code) == (8, 8, 2)


async def test_what_cannot_be_deleted_is_reported_once(world: Any, kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each trim tries all of them again: reported each time, the log grows with the square of the tries."""
    faults = kit.Faults()
    log, _listener = await world.open(faults=faults)
    for error, lines in ((LedgerStoreReadOnly("full"), 0), (StoreUnavailable("away"), 1)):
        caplog.clear()
        faults.arm(1, after=False, error=error)
        await log.ledgers.discard(77, {})
        for _ in range(5):
            faults.arm(1, after=False, error=error)
            await log.ledgers.discard_again()
        assert caplog.text.count("could not be deleted yet") == lines
        await log.ledgers.discard_again()
        assert not log.ledgers._undeleted


async def test_a_position_that_cannot_be_stored_is_reported_once(
    world: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(3))
    said = "is not stored yet"
    for number, lines in ((0, 1), (1, 2)):
        entry = (await kit.everything(log))[number]
        cursor.acknowledge([Position(entry.ledger_id, entry.entry_id)])
        for _ in range(5):
            faults.arm(3 if cursor.ledger_id < 0 else 1, after=False, error=StoreUnavailable("away"))
            with pytest.raises(StoreUnavailable):
                await cursor.flush()
        assert caplog.text.count(said) == lines
        await cursor.flush()


async def test_a_refused_ledger_is_counted_with_what_it_holds(world: Any, kit: Any) -> None:
    """Who looks for something to delete has to see which topics are large."""
    faults = kit.Faults()
    log, listener = await world.open(faults=faults)
    await log.open_cursor("keep", initial="earliest")
    await kit.fill(log, listener, range(2))
    held = log.total_size
    log.add(kit.body_of(2), 1, 2)
    log.tail.ledger_failed(LedgerStoreReadOnly("full"))
    assert held <= log.total_size < held + len(kit.body_of(2)), "what was refused is not held, but for its head"
