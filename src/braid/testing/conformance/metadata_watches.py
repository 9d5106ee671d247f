"""Conformance: watches and followers (points 8 and 9 of the suite)."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - seeded by the case itself
from contextlib import AsyncExitStack

from braid.metadata.api import Delete, IndexSpan, MetadataStore, Put, Record, Span, Synced
from braid.testing.conformance.metadata_world import PATIENCE, Fold, StoreWorld, collect, folded, values

SEEDS = 200


class WatchCases:
    """Folding events converges on the state."""

    async def test_snapshot_then_synced_then_changes(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        first = await a.put("/watch/a", b"1")
        async with folded(b.watch(Span("/watch"))) as view:
            assert await view.step() == Put(first)
            assert await view.step() == Synced(rebuilt=False)
            second = await a.put("/watch/b", b"2")
            assert await view.step() == Put(second)
            await a.delete("/watch/a")
            assert await view.step() == Delete("/watch/a")
            await a.put("/watch/b/deeper", b"")
            await a.put("/watchful", b"")
            last = await a.put("/watch/c", b"3")
            assert await view.step() == Put(last)

    async def test_point_watch(self, world: StoreWorld) -> None:
        store = await world.handle()
        async with folded(store.watch("/point/k")) as view:
            assert await view.step() == Synced(rebuilt=False)
            await store.put("/point/other", b"")
            await store.put("/point/k/below", b"")
            made = await store.put("/point/k", b"1")
            assert await view.step() == Put(made)
            await store.delete("/point/k")
            assert await view.step() == Delete("/point/k")

    async def test_recursive_watch(self, world: StoreWorld) -> None:
        store = await world.handle()
        keys = ["/tree", "/tree/a", "/tree/a/b", "/tree/a/b/c"]
        for key in keys[::2]:
            await store.put(key, b"")
        async with folded(store.watch("/tree", recursive=True)) as view:
            await view.until_synced()
            assert sorted(view.records) == keys[::2]
            await store.put("/tree-not", b"")
            for key in keys[1::2]:
                await store.put(key, b"")
            await view.until(lambda records: sorted(records) == keys)
            for key in keys:
                await store.delete(key)
            await view.until(lambda records: not records)

    async def test_bounded_span_watch(self, world: StoreWorld) -> None:
        store = await world.handle()
        for name in "abcd":
            await store.put(f"/slice/{name}", b"")
        async with folded(store.watch(Span("/slice", "b", "d"))) as view:
            await view.until_synced()
            assert list(view.records) == ["/slice/b", "/slice/c"]
            await store.delete("/slice/a")
            await store.put("/slice/d", b"")
            await store.delete_span(Span("/slice"))
            await view.until(lambda records: not records)
            assert [event for event in view.seen if isinstance(event, Delete)] == [Delete("/slice/b"), Delete("/slice/c")]

    async def test_ephemerals_that_expire_are_seen_to_go(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        await a.put("/gone/k", b"", ephemeral=True)
        async with folded(b.watch("/gone/k")) as view, folded(a.watch("/gone/k")) as own:
            await view.until_synced()
            await own.until_synced()
            await world.pause(a, a.session.timeout * 2)
            await view.until(lambda records: not records)
            await own.until(lambda records: not records)
            await b.put("/gone/k", b"next")
            await own.until(bool)

    async def test_fold_equals_scan_with_a_writer_running(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        for seed in range(SEEDS):
            choose = random.Random(seed)
            parent = f"/fold{seed}"
            span, slice_ = Span(parent), IndexSpan(f"fold{seed}", "3", "7")
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(_write_at_random(a, parent, f"fold{seed}", choose))
                for _ in range(choose.randrange(6)):
                    await asyncio.sleep(0)
                async with folded(b.watch(span)) as by_name, folded(b.watch(slice_)) as by_index:
                    await by_name.until_synced()
                    await writer
                    await a.put(f"{parent}/~end", b"", index={f"fold{seed}": "5~end"})
                    for view in (by_name, by_index):
                        await view.until(lambda records, end=f"{parent}/~end": end in records)  # type: ignore[misc]
                        assert view.synced == 1
                    assert by_name.values() == values(await collect(b.scan(span, fresh=True))), seed
                    assert by_index.values() == values(await collect(b.scan(slice_, fresh=True))), seed

    async def test_slow_reader_converges(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        await a.put("/slow/doomed", b"")
        async with folded(b.watch(Span("/slow"))) as view:
            await view.until_synced()
            for start in range(0, 1000, 100):
                await asyncio.gather(*(a.put(f"/slow/{n % 5}", str(n).encode()) for n in range(start, start + 100)))
                await asyncio.gather(*(a.put(f"/slow/churn{n}", b"") for n in range(start, start + 100)))
                await a.delete_span(Span("/slow", "churn", "churo"))
            await a.delete("/slow/doomed")
            last = await a.put("/slow/last", b"")
            await view.until(lambda records: "/slow/last" in records)
            assert view.values() == values(await collect(a.scan(Span("/slow"))))
            assert view.records["/slow/last"].version == last.version
            assert Delete("/slow/doomed") in view.seen

    async def test_values_of_one_key_come_in_order(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        async with asyncio.TaskGroup() as group:

            async def write() -> None:
                for n in range(0, 400, 4):
                    await asyncio.gather(*(a.put(f"/inorder/{k}", b"%d" % m) for m in range(n, n + 4) for k in "ab"))

            group.create_task(write())
            seen: dict[str, list[int]] = {"/inorder/a": [], "/inorder/b": []}
            async with folded(b.watch(Span("/inorder"))) as view:
                while not all(numbers and numbers[-1] == 399 for numbers in seen.values()):
                    event = await view.step()
                    if isinstance(event, Put):
                        seen[event.record.key].append(int(event.record.value))
        for numbers in seen.values():
            assert numbers == sorted(set(numbers))

    async def test_create_delete_create_in_one_burst(self, world: StoreWorld) -> None:
        store = await world.handle()
        async with folded(store.watch(Span("/burst"))) as view:
            await view.until_synced()
            for _ in range(20):
                await asyncio.gather(store.put("/burst/k", b"1"), store.delete("/burst/k"), store.put("/burst/k", b"2"))
                await view.until(lambda records: bool(records) and records["/burst/k"].value == b"2")
                await asyncio.gather(store.delete("/burst/k"), store.put("/burst/k", b"3"), store.delete("/burst/k"))
                await view.until(lambda records: not records)

    async def test_ten_thousand_point_watches(self, world: StoreWorld) -> None:
        store = await world.handle()
        async with AsyncExitStack() as stack:
            views = [Fold(await stack.enter_async_context(store.watch(f"/points/{n}"))) for n in range(10_000)]
            for n in (0, 4321, 9999):
                await store.put(f"/points/{n}", b"x")
                await views[n].until(bool)
                assert views[n].synced == 1
        await store.put("/points/0", b"unwatched")

    async def test_cancelled_reader_loses_nothing(self, world: StoreWorld) -> None:
        store = await world.handle()
        async with store.watch(Span("/cancelled")) as events:
            view = Fold(events)
            await view.until_synced()
            async with asyncio.TaskGroup() as group:
                waiting = group.create_task(view.step())
                await asyncio.sleep(0)
                waiting.cancel()
            made = await store.put("/cancelled/k", b"")
            assert await view.step() == Put(made)

    async def test_index_watch_sees_entry_and_exit(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        await a.put("/iw/k", b"", index={"iw": "out"})
        async with folded(b.watch(IndexSpan.exactly("iw", "in"))) as view:
            assert await view.step() == Synced(rebuilt=False)
            entered = await a.put("/iw/k", b"", index={"iw": "in"})
            assert await view.step() == Put(entered)
            await a.put("/iw/far", b"", index={"iw": "inn", "other": "in"})
            await a.put("/iw/k", b"", index={"iw": "out"})
            assert await view.step() == Delete("/iw/k")
            entered = await a.put("/iw/k", b"2", index={"iw": "in"})
            assert await view.step() == Put(entered)
            await a.put("/iw/k", b"3")
            assert await view.step() == Delete("/iw/k")
            entered = await a.put("/iw/k", b"4", index={"iw": "in"})
            await view.step()
            await a.delete("/iw/k")
            assert await view.step() == Delete("/iw/k")

    async def test_follow_delivers_each_append_once_in_order(self, world: StoreWorld) -> None:
        handles = [await world.handle() for _ in range(3)]
        for _ in range(5):
            await handles[0].append("/follow/s", b"", partition="p")
        await handles[0].put("/follow/s-other", b"", partition="p")
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            readers = [
                group.create_task(_follow(handles[2], "/follow/s", None, 105)),
                group.create_task(_follow(handles[0], "/follow/s", f"/follow/s-{3:020d}", 102)),
            ]
            for store in handles[:2] * 5:
                group.create_task(_append(store, "/follow/s", 10))
        assert [record.name for record in readers[0].result()] == [f"s-{n:020d}" for n in range(1, 106)]
        assert [record.name for record in readers[1].result()] == [f"s-{n:020d}" for n in range(4, 106)]

    async def test_follow_passes_over_what_was_trimmed(self, world: StoreWorld) -> None:
        store = await world.handle()
        for _ in range(10):
            await store.append("/trimmed/s", b"", partition="p")
        async with asyncio.timeout(PATIENCE), store.follow("/trimmed/s", partition="p") as records:
            assert (await anext(records)).name == f"s-{1:020d}"
            await store.delete_span(Span("/trimmed", hi=f"s-{9:020d}"), partition="p")
            assert (await anext(records)).name == f"s-{9:020d}"
            assert (await anext(records)).name == f"s-{10:020d}"
            made = await store.append("/trimmed/s", b"", partition="p")
            assert await anext(records) == made


async def _write_at_random(store: MetadataStore, parent: str, index: str, choose: random.Random) -> None:
    for _ in range(5):
        burst = []
        for _ in range(choose.randrange(1, 8)):
            key = f"{parent}/{choose.randrange(8)}"
            if choose.random() < 0.35:
                burst.append(store.delete(key))
            elif choose.random() < 0.1:
                low = choose.randrange(8)
                burst.append(store.delete_span(Span(parent, str(low), str(low + 2))))  # type: ignore[arg-type]
            else:
                value = b"%d" % choose.randrange(1000)
                burst.append(store.put(key, value, index={index: str(choose.randrange(10))}))  # type: ignore[arg-type]
        await asyncio.gather(*burst)


async def _append(store: MetadataStore, prefix: str, count: int) -> None:
    for _ in range(count):
        await store.append(prefix, b"", partition="p")


async def _follow(store: MetadataStore, prefix: str, after: str | None, count: int) -> list[Record]:
    found: list[Record] = []
    async with store.follow(prefix, partition="p", after=after) as records:
        while len(found) < count:
            found.append(await anext(records))
    return found
