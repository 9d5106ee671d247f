"""A ledger that a record may name is kept, whoever has the record now: its next owner may know the ledger (INV2, INV16)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from braid.errors import BraidError, LedgerFenced, OutcomeUnknown, StoreUnavailable, VersionConflict
from braid.managedledger.api import SingleStore
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.owned_record import ConflictInDoubt, swap
from braid.managedledger.schemas import SchemaStorage
from braid.metadata.api import ABSENT
from braid.model.positions import Position

pytestmark = pytest.mark.inv("INV2", "INV16")
CONFIG = ManagedLedgerConfig(max_entries_per_ledger=5, min_ledger_age_ms=0, max_entries_per_cursor_ledger=2)


class Doubtful:
    """A metadata handle one of whose puts is applied, then `meanwhile` happens, then its caller is told that nobody knows."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.key = ""
        """Of the put, empty for none."""
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.answer: BraidError = OutcomeUnknown("the answer was lost")
        self.refuses_gets = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def get(self, key: str, **options: Any) -> Any:
        if self.refuses_gets:
            raise StoreUnavailable("not now")
        return await self._inner.get(key, **options)

    async def put(self, key: str, value: bytes, **options: Any) -> Any:
        if key != self.key:
            return await self._inner.put(key, value, **options)
        self.key = ""
        await self._inner.put(key, value, **options)
        if self.meanwhile is not None:
            await self.meanwhile()
        raise self.answer


async def opened(world: Any, kit: Any) -> tuple[Any, Any, Doubtful]:
    """A log with the numbers 0 to 4 in a full ledger, and its owner's handle."""
    handle = Doubtful(await world.handle())
    factory = ManagedLedgerFactory(world.runtime, handle, SingleStore(world.ledgers), CONFIG, kit.EntryCache(1 << 20))
    listener = kit.Listener()
    log = await factory.open(kit.NAME, listener, create=True)
    world.opened.append(log)
    await kit.fill(log, listener, range(5))
    return log, listener, handle


async def taken_over(world: Any, kit: Any) -> tuple[Any, Any]:
    """What a broker finds that opens the log now, and adds number 9 to."""
    log, listener = await world.open(config=CONFIG)
    await kit.fill(log, listener, range(9, 10))
    return log, listener


async def test_a_new_ledger_stays_that_the_next_owner_may_have_found_in_the_record(world: Any, kit: Any) -> None:
    log, listener, handle = await opened(world, kit)
    readable: list[int] = []

    async def other_owner() -> None:
        """Claims the record that lists the new ledger already; has not looked into that ledger yet."""
        record = await handle.get(f"/managed-ledgers/{kit.NAME}", fresh=True)
        readable.append(record.value.count(b'"ledgerId"'))
        changed = record.value.replace(log.owner_token.encode(), b"another")
        await handle._inner.put(record.key, changed, expected=record.version)

    handle.key, handle.meanwhile = f"/managed-ledgers/{kit.NAME}", other_owner
    await kit.fill(log, listener, range(5, 6))
    assert readable == [2], "the ledger was not listed when the other owner came"
    assert isinstance(listener.failed[-1][0], LedgerFenced)
    again, _listener = await taken_over(world, kit)
    assert [kit.number_of(entry) for entry in await kit.everything(again)] == [0, 1, 2, 3, 4, 9]


@pytest.mark.parametrize("of", ["log", "cursor"])
async def test_an_owner_in_doubt_does_not_take_its_successors_record_for_its_own(world: Any, kit: Any, of: str) -> None:
    """The update of which it does not know whether it was applied was followed by a take-over; only then it looks again."""
    log, _listener, handle = await opened(world, kit)
    cursor = await log.open_cursor("s", initial="earliest")

    async def change(value: str) -> None:
        if of == "log":
            await log.set_properties({"by": value})
        else:
            await cursor.set_properties({"by": value})

    async def away() -> None:
        handle.refuses_gets = True

    handle.key, handle.meanwhile = f"/managed-ledgers/{kit.NAME}{'' if of == 'log' else '/s'}", away
    with pytest.raises(OutcomeUnknown):
        await change("first")
    again, added = await taken_over(world, kit)
    handle.refuses_gets = False
    with pytest.raises(LedgerFenced):
        await change("second")
    found = again if of == "log" else again.cursors["s"]
    assert found.properties == {"by": "first"}
    await again.check_owner()
    await (again if of == "log" else again.cursors["s"]).set_properties({"by": "successor"})
    await kit.fill(again, added, range(10, 11))
    assert [kit.number_of(entry) for entry in await kit.everything(again)] == [0, 1, 2, 3, 4, 9, 10]


async def test_a_cursors_new_ledger_stays_that_the_next_owner_may_have_found(world: Any, kit: Any) -> None:
    log, _listener, handle = await opened(world, kit)
    cursor = await log.open_cursor("s", initial="earliest")
    key = f"/managed-ledgers/{kit.NAME}/s"

    async def other_owner() -> None:
        record = await handle.get(key, fresh=True)
        assert b'"cursorsLedgerId":-1' not in record.value
        await handle._inner.put(key, record.value.replace(log.owner_token.encode(), b"another"), expected=record.version)

    handle.key, handle.meanwhile = key, other_owner
    entries = await kit.everything(log)
    cursor.acknowledge_cumulative(Position(entries[2].ledger_id, entries[2].entry_id))
    with pytest.raises(LedgerFenced):
        await cursor.flush()
    again, _listener = await world.open(config=CONFIG)
    assert again.cursors["s"].mark_delete == Position(entries[2].ledger_id, entries[2].entry_id)


async def test_a_schemas_ledger_stays_that_somebodys_locator_may_name(world: Any, kit: Any) -> None:
    handle = Doubtful(await world.handle())
    mine = SchemaStorage(world.runtime, handle, SingleStore(world.ledgers))
    theirs = SchemaStorage(world.runtime, await world.handle(), SingleStore(world.ledgers))

    async def another_version() -> None:
        assert await theirs.put("t/ns/topic", 4, b"theirs") == 1

    handle.key, handle.meanwhile = "/schemas/t/ns/topic", another_version
    assert await mine.put("t/ns/topic", 4, b"mine") == 0
    assert [schema.data for schema in await theirs.versions("t/ns/topic")] == [b"mine", b"theirs"]


@pytest.mark.parametrize("is_other", [False, True])
async def test_an_update_that_cannot_be_read_back_is_unknown(world: Any, kit: Any, is_other: bool) -> None:
    """Not refused: it was applied."""
    handle = Doubtful(await world.handle())

    async def trouble() -> None:
        handle.refuses_gets = True
        if is_other:
            await handle._inner.put("/a", b"theirs")

    handle.key, handle.meanwhile = "/a", trouble
    with pytest.raises(OutcomeUnknown):
        await swap(handle, "/a", b"mine", ABSENT)


async def test_a_conflict_says_whether_the_update_may_have_been_applied(world: Any) -> None:
    handle = Doubtful(await world.handle())
    version = await swap(handle, "/a", b"mine", ABSENT)
    with pytest.raises(VersionConflict) as certain:
        await swap(handle, "/a", b"again", version + 1)
    assert not isinstance(certain.value, ConflictInDoubt)

    async def theirs() -> None:
        record = await handle.get("/a")
        await handle._inner.put("/a", b"theirs", expected=record.version)

    handle.key, handle.meanwhile = "/a", theirs
    with pytest.raises(ConflictInDoubt):
        await swap(handle, "/a", b"again", version)
