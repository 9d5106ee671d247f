"""Conformance: collections, indexes and sequences (points 3, 5 and 6 of the suite)."""

from __future__ import annotations

import asyncio

import pytest

from braid.errors import InvalidArgument
from braid.metadata.api import IndexSpan, MetadataStore, Record, Span
from braid.testing.conformance.metadata_world import StoreWorld, collect, collect_names


def names_of(records: list[Record]) -> list[str]:
    return [record.name for record in records]


class ListingCases:
    """What scans, names and appends find and make."""

    async def test_collection_holds_direct_members_only(self, world: StoreWorld) -> None:
        store = await world.handle()
        for key in ("/col/a", "/col/a/deep", "/col/a/deep/er", "/col/b", "/colb", "/col-x", "/only/deeper/k"):
            await store.put(key, key.encode())
        assert await collect_names(store.names(Span("/col"))) == ["a", "b"]
        assert names_of(await collect(store.scan(Span("/col/a")))) == ["deep"]
        assert await collect_names(store.names(Span("/only"))) == []
        assert await collect_names(store.names(Span("/none"))) == []
        assert {"colb", "col-x"} <= set(await collect_names(store.names(Span("/"))))
        assert "col" not in await collect_names(store.names(Span("/")))
        await store.delete("/col/a")
        assert await collect_names(store.names(Span("/col"))) == ["b"]
        assert names_of(await collect(store.scan(Span("/col/a")))) == ["deep"]

    async def test_bounds_are_half_open(self, world: StoreWorld) -> None:
        store = await world.handle()
        members = ["a", "b", "ba", "c", "é", "中"]
        for name in reversed(members):
            await store.put(f"/bounds/{name}", b"")
        for lo in (None, *members, "aa", ""):
            for hi in (None, *members, "zz"):
                expected = [n for n in members if (lo is None or lo <= n) and (hi is None or n < hi)]
                assert await collect_names(store.names(Span("/bounds", lo, hi))) == expected, (lo, hi)
        assert names_of(await collect(store.scan(Span("/bounds", "b"), limit=2))) == ["b", "ba"]
        assert await collect(store.scan(Span("/bounds"), limit=0)) == []

    async def test_ten_thousand_members(self, world: StoreWorld) -> None:
        store = await world.handle()
        for start in range(0, 10_000, 1000):
            await asyncio.gather(*(store.put(f"/many/{n:05d}", b"") for n in range(start, start + 1000)))
        assert await collect_names(store.names(Span("/many"))) == [f"{n:05d}" for n in range(10_000)]
        assert len(await collect(store.scan(Span("/many", "05000", "06000")))) == 1000
        await store.delete_span(Span("/many", "00010"))
        await store.delete_span(Span("/many", "00010"))
        assert await collect_names(store.names(Span("/many"))) == [f"{n:05d}" for n in range(10)]

    async def test_scan_during_changes_sees_what_stays(self, world: StoreWorld) -> None:
        store, other = await world.handle(), await world.handle()
        await asyncio.gather(*(store.put(f"/busy/{n:04d}", b"") for n in range(0, 2000, 2)))

        async def disturb() -> None:
            for n in range(1, 2000, 100):
                await other.put(f"/busy/{n:04d}", b"")
                await other.delete(f"/busy/{n - 1:04d}")

        stays = {f"{n:04d}" for n in range(0, 2000, 2) if n % 100}
        async with asyncio.TaskGroup() as group:
            disturber = group.create_task(disturb())
            while not disturber.done():
                seen = []
                async for record in store.scan(Span("/busy")):
                    seen.append(record.name)
                    if len(seen) % 100 == 0:
                        await asyncio.sleep(0)
                assert len(seen) == len(set(seen))
                assert stays <= set(seen)
                assert seen == sorted(seen)
                await asyncio.sleep(0)

    async def test_index_follows_updates_and_deletes(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        made = await a.put("/idx/k", b"1", index={"color": "red", "size": "5"})
        assert dict(made.index) == {"color": "red", "size": "5"}
        assert await collect(b.scan(IndexSpan.exactly("color", "red"), fresh=True)) == [made]
        moved = await a.put("/idx/k", b"2", index={"color": "blue", "size": "5"})
        assert await collect(b.scan(IndexSpan.exactly("color", "red"), fresh=True)) == []
        assert await collect(b.scan(IndexSpan("color", "a", "c"), fresh=True)) == [moved]
        assert await collect(b.scan(IndexSpan("size"), fresh=True)) == [moved]
        plain = await a.put("/idx/k", b"3")
        assert dict(plain.index) == {}
        assert await collect(b.scan(IndexSpan("size"), fresh=True)) == []
        await a.put("/idx/k", b"4", index={"color": "red"})
        await a.delete("/idx/k")
        assert await collect(b.scan(IndexSpan("color"), fresh=True)) == []
        assert await collect(b.scan(IndexSpan("never-used"))) == []

    async def test_index_order_and_bounds(self, world: StoreWorld) -> None:
        store = await world.handle()
        secondaries = ["", "a", "a\x01", "a~", "a\x7f", "aé", "b", "中"]
        for number, secondary in enumerate(secondaries):
            for twin in ("y", "x"):
                await store.put(f"/order/{twin}{number}", b"", index={"order": secondary})
        pairs = [(s, f"{t}{n}") for n, s in enumerate(secondaries) for t in ("x", "y")]
        pairs.sort(key=lambda pair: (pair[0].encode(), pair[1].encode()))
        found = await collect(store.scan(IndexSpan("order")))
        assert [(record.index["order"], record.name) for record in found] == pairs
        for secondary in secondaries:
            exact = await collect(store.scan(IndexSpan.exactly("order", secondary)))
            assert [record.index["order"] for record in exact] == [secondary] * 2
        assert {r.index["order"] for r in await collect(store.scan(IndexSpan("order", "a", "b")))} == {
            "a",
            "a\x01",
            "a~",
            "a\x7f",
            "aé",
        }
        assert names_of(await collect(store.scan(IndexSpan("order"), limit=3))) == [name for _, name in pairs[:3]]

    async def test_index_scan_while_records_vanish(self, world: StoreWorld) -> None:
        store, other = await world.handle(), await world.handle()
        await asyncio.gather(*(store.put(f"/vanish/{n:03d}", b"", index={"vanish": f"{n:03d}"}) for n in range(300)))

        async def remove() -> None:
            for n in range(0, 300, 10):
                await other.delete(f"/vanish/{n:03d}")

        async with asyncio.TaskGroup() as group:
            remover = group.create_task(remove())
            while not remover.done():
                found = await collect(store.scan(IndexSpan("vanish")))
                assert {f"{n:03d}" for n in range(300) if n % 10} <= {record.name for record in found}
                await asyncio.sleep(0)
        assert len(await collect(store.scan(IndexSpan("vanish"), fresh=True))) == 270

    async def test_appends_are_unique_and_grow(self, world: StoreWorld) -> None:
        handles = [await world.handle() for _ in range(2)]

        async def appender(store: MetadataStore) -> list[str]:
            return [(await store.append("/seq/s", b"x", partition="p")).key for _ in range(10)]

        made = await asyncio.gather(*(appender(store) for store in handles * 16))
        for keys in made:
            assert keys == sorted(keys)
        keys = sorted(key for keys in made for key in keys)
        # One difference is told: to describe how two long lists of similar names differ takes pytest minutes.
        wrong = next(
            (pair for pair in zip(keys, (f"/seq/s-{n:020d}" for n in range(1, 321)), strict=True) if pair[0] != pair[1]), None
        )
        assert wrong is None
        stored = names_of(await collect(handles[0].scan(Span("/seq"), fresh=True)))
        assert len(stored) == len(keys) and all(f"/seq/{name}" == key for name, key in zip(stored, keys, strict=True))

    async def test_append_by_deltas(self, world: StoreWorld) -> None:
        store = await world.handle()
        await store.append("/delta/s", b"", partition="p", deltas=(3, 0))
        record = await store.append("/delta/s", b"v", partition="p", deltas=(2, 7), index={"delta": "i"})
        assert record.key == f"/delta/s-{5:020d}-{7:020d}"
        assert names_of(await collect(store.scan(IndexSpan("delta")))) == [record.name]
        with pytest.raises(InvalidArgument):
            await store.append("/delta/s", b"", partition="p")
        for neighbour in ("/delta/s-x", "/delta/s-9", f"/delta/s-t-{90:020d}", "/delta/sz"):
            await store.put(neighbour, b"", partition="p")
        again = await store.append("/delta/s", b"", partition="p", deltas=(1, 1))
        assert again.key == f"/delta/s-{6:020d}-{8:020d}"

    async def test_trimming_with_keep_last_keeps_the_count(self, world: StoreWorld) -> None:
        store = await world.handle()
        for _ in range(5):
            await store.append("/trim/s", b"", partition="p")
        await store.delete_span(Span("/trim"), partition="p", keep_last=True)
        assert await collect_names(store.names(Span("/trim"))) == [f"s-{5:020d}"]
        await store.delete_span(Span("/trim"), partition="p", keep_last=True)
        assert (await store.append("/trim/s", b"", partition="p")).name == f"s-{6:020d}"

    async def test_appends_share_a_sequence_with_plain_puts(self, world: StoreWorld) -> None:
        store = await world.handle()
        put, appended = await asyncio.gather(
            store.put(f"/mixed/s-{7:020d}", b"", partition="p"), store.append("/mixed/s", b"", partition="p")
        )
        assert appended.key != put.key
        assert (await store.append("/mixed/s", b"", partition="p")).key > max(put.key, appended.key)
