"""Ledgers that a record names and their store does not know: an error that names both, never an empty place (INV16)."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from braid.errors import LedgerLost, OutcomeUnknown
from braid.managedledger.api import SingleStore
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.lost import ASKED_AT_ONCE
from braid.managedledger.owned_record import swap
from braid.managedledger.schemas import SchemaStorage
from braid.model.positions import Position

pytestmark = pytest.mark.inv("INV16")
SKIPS = ManagedLedgerConfig(max_entries_per_ledger=5, min_ledger_age_ms=0, skip_lost_ledgers=True)
TOPIC = "persistent://t/ns/topic"


async def filled(world: Any, kit: Any) -> list[int]:
    """A closed log of three ledgers with the numbers 0 to 11; returns their ids."""
    log, listener = await world.open()
    await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(12))
    ids = [info.ledger_id for info in log.infos]
    assert len(ids) == 3
    return ids


@pytest.mark.parametrize("ended", ["closed", "crashed"])
@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_log_with_a_lost_ledger_is_refused(world: Any, kit: Any, at: int, ended: str) -> None:
    """Wherever it stands in the list: the last one was taken for one that never existed."""
    ids = await filled(world, kit)
    if ended == "closed":
        await world.opened[-1].close()
    await world.ledgers.delete(ids[at])
    record = await (await world.handle()).get(f"/managed-ledgers/{kit.NAME}")
    for _attempt in range(2):  # and stays so
        with pytest.raises(LedgerLost) as refusal:
            await world.open()
        assert f"does not know ledger {ids[at]}, which the topic {TOPIC} needs" in str(refusal.value)
        assert "MemoryLedgerStore" in str(refusal.value)
    again = await (await world.handle()).get(f"/managed-ledgers/{kit.NAME}")
    assert again.value.count(b'"ledgerId"') == record.value.count(b'"ledgerId"'), "the record forgot a ledger"


@pytest.mark.parametrize("at", [0, ASKED_AT_ONCE - 1, ASKED_AT_ONCE, ASKED_AT_ONCE + 1])
async def test_every_ledger_of_a_long_list_is_asked_for(world: Any, kit: Any, at: int) -> None:
    log, listener = await world.open(config=ManagedLedgerConfig(max_entries_per_ledger=1, min_ledger_age_ms=0))
    await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(ASKED_AT_ONCE + 3))
    ids = [info.ledger_id for info in log.infos]
    await log.close()
    await world.ledgers.delete(ids[at])
    with pytest.raises(LedgerLost, match=f"does not know ledger {ids[at]}, which the topic {TOPIC} needs"):
        await world.open()


async def test_other_logs_go_on(world: Any, kit: Any) -> None:
    ids = await filled(world, kit)
    await world.opened[-1].close()
    await world.ledgers.delete(ids[1])
    with pytest.raises(LedgerLost):
        await world.open()
    log, listener = await world.open("t/ns/persistent/other")
    await kit.fill(log, listener, range(3))
    assert log.total_entries == 3


@pytest.mark.parametrize(("at", "left"), [(0, range(5, 12)), (1, [0, 1, 2, 3, 4, 10, 11]), (2, range(10))])
async def test_who_accepts_the_loss_gets_the_rest_and_is_told(
    world: Any, kit: Any, caplog: pytest.LogCaptureFixture, at: int, left: Any
) -> None:
    ids = await filled(world, kit)
    await world.opened[-1].close()
    await world.ledgers.delete(ids[at])
    log, listener = await world.open(config=SKIPS)
    assert [kit.number_of(entry) for entry in await kit.everything(log)] == list(left)
    (line,) = [each.message for each in caplog.records if each.levelno == logging.ERROR]
    assert f"gave up ledger {ids[at]} of the topic {TOPIC}" in line
    assert ["5 entries, messages up to 4", "5 entries, messages 5 to 9", "2 entries, messages 10 to 11"][at] in line
    await kit.fill(log, listener, range(12, 14))
    assert [entry.index for entry, _context in listener.added] == [12, 13], "numbers are used twice"
    cursor = log.cursors["s"]
    got = [kit.number_of(entry) for _ in range(4) for entry in await cursor.read(100, 1 << 20)]
    assert got == [*left, 12, 13]
    await log.close()
    log, _ = await world.open()  # it was given up for good
    assert log.total_entries == len(left) + 2


async def test_a_ledger_that_gets_lost_under_a_loaded_log_is_an_error_of_the_read(world: Any, kit: Any) -> None:
    ids = await filled(world, kit)
    log = world.opened[-1]
    await world.ledgers.delete(ids[0])
    with pytest.raises(LedgerLost, match=f"does not know ledger {ids[0]}, which the topic {TOPIC} needs"):
        await log.read(Position(ids[0], 0), 10, 1 << 20)
    assert await log.read(Position(ids[1], 0), 10, 1 << 20)


async def test_a_lost_cursor_ledger_is_refused(world: Any, kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What its record has may be old: acknowledgments and the deduplication state would go back."""
    log, listener = await world.open()
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(3))
    cursor.acknowledge_cumulative(log.last_position)
    await cursor.flush()
    lost = cursor.ledger_id
    assert lost >= 0
    await world.ledgers.delete(lost)
    with pytest.raises(LedgerLost, match=f"ledger {lost}, which the subscription s of {TOPIC} needs"):
        await world.open()
    log, _ = await world.open(config=SKIPS)
    assert log.cursors["s"].mark_delete.entry_id >= -1
    assert f"gave up ledger {lost} of the subscription s of {TOPIC}" in caplog.text


async def test_a_lost_schema_ledger_is_refused(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    handle = await world.handle()
    schemas = SchemaStorage(world.runtime, handle, SingleStore(world.ledgers))
    before = {number async for number in world.ledgers.ledgers()}
    await schemas.put("t/ns/topic", 2, b"one")
    await schemas.put("t/ns/topic", 2, b"two")
    _first, lost = sorted({number async for number in world.ledgers.ledgers()} - before)
    await world.ledgers.delete(lost)
    for call in (schemas.latest("t/ns/topic"), schemas.get("t/ns/topic", 1), schemas.versions("t/ns/topic")):
        with pytest.raises(LedgerLost, match=f"ledger {lost}, which version 1 of the schema of t/ns/topic needs"):
            await call
    assert (await schemas.get("t/ns/topic", 0)).data == b"one"  # type: ignore[union-attr]
    skips = SchemaStorage(world.runtime, handle, SingleStore(world.ledgers), skip_lost_ledgers=True)
    assert [each.version for each in await skips.versions("t/ns/topic")] == [0]
    assert await skips.get("t/ns/topic", 1) is None
    assert (await skips.latest("t/ns/topic")).version == 0  # type: ignore[union-attr]
    assert await skips.put("t/ns/topic", 2, b"three") == 2, "a version number is used twice"
    assert caplog.text.count(f"gave up ledger {lost} of version 1") == 1, "clients ask for schemas all the time"


async def test_a_schema_that_is_deleted_while_it_is_read_is_no_loss(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schemas = SchemaStorage(world.runtime, await world.handle(), SingleStore(world.ledgers))
    await schemas.put("t/ns/topic", 2, b"one")
    read = schemas._read

    async def late(index: Any) -> Any:
        monkeypatch.setattr(schemas, "_read", read)
        await schemas.delete("t/ns/topic")
        return await read(index)

    monkeypatch.setattr(schemas, "_read", late)
    assert await schemas.get("t/ns/topic") is None


async def test_a_write_that_arrives_late_is_known_as_ours(world: Any) -> None:
    """It was sent, looked for in vain, sent again, and only then applied: who takes that for somebody else's write deletes a
    ledger that the record names."""
    handle = await world.handle()
    real, answers = handle.put, ["lost", "late"]

    class Late:
        get = handle.get

        async def put(self, key: str, value: bytes, *, expected: int) -> Any:
            answer = answers.pop(0) if answers else ""
            if answer == "lost":
                raise OutcomeUnknown("no verdict")
            if answer == "late":
                await real(key, value, expected=expected)  # the first one, at last
            return await real(key, value, expected=expected)

    made: Any = Late()
    version = await swap(made, "/x", b"ours", -1)
    assert (await handle.get("/x")).version == version
