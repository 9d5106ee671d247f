"""The fault injector tells the truth about what it did, hits what it is told to, and replays from its seed."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from braid.errors import OutcomeUnknown, StoreUnavailable, VersionConflict
from braid.metadata.api import ABSENT, MetadataStore, Put, Span
from braid.metadata.backends import memory
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.testing.conformance.metadata_world import Fold, SteppedClock, collect_names
from braid.testing.faulty_metadata import Fault, FaultyMetadata


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
async def inner(clock: SteppedClock) -> AsyncIterator[MetadataStore]:
    engine = await memory.open_store(replace(Runtime(), clock=clock))
    yield engine.handle("inner")
    await engine.close()


@pytest.fixture
def store(inner: MetadataStore, clock: SteppedClock) -> FaultyMetadata:
    return FaultyMetadata(inner, clock, random.Random(7))


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_without_faults_it_is_the_store_below(store: FaultyMetadata, inner: MetadataStore) -> None:
    made = await store.put("/a/k", b"1", expected=ABSENT, index={"i": "x"})
    assert await store.get("/a/k") == made == await inner.get("/a/k")
    assert [name async for name in store.names(Span("/a"))] == ["k"]
    assert [record async for record in store.scan(Span("/a"))] == [made]
    await store.append("/a/s", b"", partition="p")
    await store.delete_span(Span("/a", "s"), partition="p")
    async with store.follow("/a/t", partition="p") as records:
        appended = await store.append("/a/t", b"", partition="p")
        assert await anext(records) == appended
    assert await store.delete("/a/k", expected=made.version)
    assert store.session is inner.session
    assert store.capabilities is inner.capabilities
    assert store.hits == {}
    await store.close()


@pytest.mark.parametrize(
    ("fault", "error", "is_applied"),
    [
        (Fault.UNAVAILABLE, StoreUnavailable, False),
        (Fault.UNKNOWN_APPLIED, OutcomeUnknown, True),
        (Fault.UNKNOWN_DROPPED, OutcomeUnknown, False),
    ],
)
async def test_planned_fault_hits_once_and_tells_the_truth(
    store: FaultyMetadata, inner: MetadataStore, fault: Fault, error: type[Exception], is_applied: bool
) -> None:
    store.plan(fault, "put", "/a/k", skip=1)
    await store.put("/a/other", b"")
    await store.put("/a/k", b"first")
    with pytest.raises(error):
        await store.put("/a/k", b"second")
    found = await inner.get("/a/k")
    assert found is not None
    assert found.value == (b"second" if is_applied else b"first")
    await store.put("/a/k", b"third")
    assert store.hits == {fault.value: 1}
    store.plan(fault, "delete")
    with pytest.raises(error):
        await store.delete("/a/k")
    assert (await inner.get("/a/k") is None) == is_applied


async def test_late_write_lands_later_or_not_at_all(store: FaultyMetadata, inner: MetadataStore, clock: SteppedClock) -> None:
    store.faults.delay = 1.0
    tasks = Tasks("test")

    async def write(expected: int) -> None:
        with pytest.raises(OutcomeUnknown):
            await store.put("/a/k", b"late", expected=expected)

    store.plan(Fault.UNKNOWN_LATE)
    tasks.spawn(write(ABSENT), "write")
    await turns()
    clock.advance(0.5)
    await turns()
    assert await inner.get("/a/k") is None
    clock.advance(1.0)
    await turns()
    found = await inner.get("/a/k")
    assert found is not None
    store.plan(Fault.UNKNOWN_LATE)
    tasks.spawn(write(found.version), "write")
    await turns()
    clock.advance(0.5)
    await turns()
    newer = await inner.put("/a/k", b"newer")
    clock.advance(1.0)
    await turns()
    assert await inner.get("/a/k") == newer
    await tasks.close()


async def test_injected_conflict_is_a_real_one(store: FaultyMetadata, inner: MetadataStore) -> None:
    made = await store.put("/a/k", b"1", index={"i": "x"})
    store.plan(Fault.CONFLICT)
    with pytest.raises(VersionConflict):
        await store.put("/a/k", b"2", expected=made.version)
    found = await inner.get("/a/k")
    assert found is not None
    assert (found.value, found.index, found.mods) == (b"1", {"i": "x"}, 1)  # a rival rewrote it
    store.plan(Fault.CONFLICT)
    with pytest.raises(VersionConflict):
        await store.put("/a/new", b"", expected=ABSENT)
    await store.put("/a/new", b"", expected=ABSENT)
    store.plan(Fault.CONFLICT)
    await store.put("/a/k", b"3")  # an upsert cannot conflict
    assert store.hits == {Fault.CONFLICT.value: 2}


async def test_cut_refuses_and_freeze_holds(store: FaultyMetadata, inner: MetadataStore) -> None:
    store.is_cut = True
    for call in (store.get("/a/k"), store.put("/a/k", b""), store.delete("/a/k")):
        with pytest.raises(StoreUnavailable):
            await call
    with pytest.raises(StoreUnavailable):
        await collect_names(store.names(Span("/a")))
    with pytest.raises(StoreUnavailable):
        async with store.watch("/a/k"):
            pass
    store.is_cut = False
    store.freeze()
    tasks = Tasks("test")
    waiting = tasks.spawn(store.put("/a/k", b"thawed"), "put")
    await turns(50)
    assert not waiting.done()
    assert await inner.get("/a/k") is None
    store.thaw()
    assert (await waiting).value == b"thawed"


async def test_watches_lose_events_lag_and_coalesce(store: FaultyMetadata, inner: MetadataStore, clock: SteppedClock) -> None:
    async with store.watch("/a/k") as events:
        view = Fold(events)
        await view.until_synced()
        store.faults.watch_coalesce = True
        tasks = Tasks("test")
        reading = tasks.spawn(view.until(lambda records: bool(records) and records["/a/k"].value == b"19"), "read")
        for number in range(20):
            await inner.put("/a/k", b"%d" % number)
        await reading
        assert len([event for event in view.seen if isinstance(event, Put)]) < 10
        store.faults.watch_coalesce = False
        store.faults.watch_lag = 4.0
        reading = tasks.spawn(view.until(lambda records: not records), "read")
        await inner.delete("/a/k")
        await turns()
        assert not reading.done()
        clock.advance(4.0)
        await reading
        store.faults.clear()
        store.faults.watch_drop = 1.0
        reading = tasks.spawn(view.until(bool), "read")
        await inner.put("/a/k", b"unseen")
        await turns(50)
        assert not reading.done()
        assert store.hits["watch drop"] == 1
        await tasks.close()


async def test_same_seed_same_faults(inner: MetadataStore, clock: SteppedClock) -> None:
    async def outcomes(seed: int) -> list[str]:
        store = FaultyMetadata(inner, clock, random.Random(seed))
        faults = store.faults
        faults.unavailable = faults.unknown_applied = faults.unknown_dropped = 0.2
        found = []
        for _ in range(100):
            try:
                await store.put("/a/k", b"")
            except (StoreUnavailable, OutcomeUnknown) as error:
                found.append(type(error).__name__)
            else:
                found.append("done")
        assert 25 <= found.count("OutcomeUnknown") <= 55
        assert sum(store.hits.values()) == 100 - found.count("done")
        return found

    first = await outcomes(1)
    assert first == await outcomes(1)
    assert first != await outcomes(2)
