"""Schema storage: versions, identity, races, crashes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.errors import NotAllowed, StoreUnavailable
from braid.managedledger import schemas
from braid.managedledger.api import SingleStore
from braid.managedledger.schemas import SchemaStorage

ID = "t/ns/topic"


async def storage(world: Any, kit: Any, faults: Any = None) -> SchemaStorage:
    handle: Any = await world.handle()
    ledgers: Any = world.ledgers
    if faults is not None:
        handle, ledgers = kit.FaultyMetadata(handle, faults), kit.FaultyLedgers(ledgers, faults)
    return SchemaStorage(world.runtime, handle, SingleStore(ledgers))


async def ledger_count(world: Any) -> int:
    return len([ledger_id async for ledger_id in world.ledgers.ledgers()])


async def test_versions_start_at_0_and_the_same_schema_keeps_its_own(world: Any, kit: Any) -> None:
    store = await storage(world, kit)
    assert await store.get(ID) is None
    assert await store.put(ID, 4, b"one", {"k": "v"}, name="A") == 0
    assert await store.put(ID, 4, b"two") == 1
    assert await store.put(ID, 4, b"one") == 0
    assert await store.put(ID, 5, b"one") == 2
    assert await ledger_count(world) == 3
    again = await storage(world, kit)
    first = await again.get(ID, 0)
    assert first is not None
    assert (first.version, first.type, first.data, first.name, first.properties) == (0, 4, b"one", "A", {"k": "v"})
    latest = await again.latest(ID)
    assert latest is not None and latest.version == 2
    assert await again.get(ID, 9) is None
    assert [schema.data for schema in await again.versions(ID)] == [b"one", b"two", b"one"]


async def test_races_leave_one_ledger_per_version(world: Any, kit: Any) -> None:
    stores = [await storage(world, kit) for _ in range(6)]
    versions = await asyncio.gather(*(store.put(ID, 4, b"%d" % (i % 3)) for i, store in enumerate(stores)))
    assert sorted(set(versions)) == [0, 1, 2]
    assert versions[:3] == versions[3:]
    assert await ledger_count(world) == 3


async def test_delete(world: Any, kit: Any) -> None:
    store = await storage(world, kit)
    await store.put(ID, 4, b"one")
    assert await store.delete(ID) is True
    assert await store.delete(ID) is False
    assert await store.get(ID) is None
    assert await ledger_count(world) == 0


async def test_failed_put_leaves_no_ledger(world: Any, kit: Any) -> None:
    faults = kit.Faults()
    store = await storage(world, kit, faults)
    faults.only = "put"
    for at in range(1, 8):
        faults.arm(at, after=False, error=StoreUnavailable("away"))
        try:
            await store.put(ID, 4, b"%d" % at)
        except StoreUnavailable:
            break
    assert await ledger_count(world) == len(await store.versions(ID))


@pytest.mark.parametrize("after", [False, True])
async def test_power_cut_at_every_call_of_put(kit: Any, after: bool) -> None:
    for at in range(1, 6):
        world = await kit.memory_world()
        await (await storage(world, kit)).put(ID, 4, b"old")
        faults = kit.Faults()
        faults.arm(at, after=after)
        try:
            await (await storage(world, kit, faults)).put(ID, 4, b"new")
        except kit.PowerCut:
            pass
        store = await storage(world, kit)
        assert [schema.data for schema in await store.versions(ID)] in ([b"old"], [b"old", b"new"])
        assert await store.put(ID, 4, b"new") == 1
        await world.close()


async def test_versions_are_bounded(world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "MAX_VERSIONS", 2)
    store = await storage(world, kit)
    for data in (b"1", b"2"):
        await store.put(ID, 4, data)
    with pytest.raises(NotAllowed):
        await store.put(ID, 4, b"3")
    assert await store.put(ID, 4, b"2") == 1
