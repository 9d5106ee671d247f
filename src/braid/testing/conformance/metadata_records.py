"""Conformance: single records (points 1, 2, 4 and 11 of the suite)."""

from __future__ import annotations

import asyncio

import pytest

from braid.errors import BraidError, Closed, InvalidArgument, ValueTooLarge, VersionConflict
from braid.metadata.api import ABSENT, IndexSpan, MetadataStore, Span
from braid.metadata.names import decode_name, encode_name
from braid.testing.conformance.metadata_world import PATIENCE, StoreWorld, collect, collect_names

AWKWARD_NAMES = [
    "a",
    "A",
    "~",
    "a b",
    "é",
    "ß",
    "中文",
    "\U0001f600",
    "￿",
    "a/b",
    "100%",
    "tab\tnl\n",
    "\x00",
    "\x7f",
    "..",
    ".",
    "-",
    "a:b",
]


class RecordCases:
    """Compare-and-swap, values, partitions, errors."""

    async def test_created_record_is_read_back(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        assert await b.get("/cas/k", fresh=True) is None
        made = await a.put("/cas/k", b"one", expected=ABSENT)
        assert (made.key, made.value, made.mods, made.owner, made.mine, dict(made.index)) == (
            "/cas/k",
            b"one",
            0,
            None,
            False,
            {},
        )
        assert made.name == "k"
        assert await b.get("/cas/k", fresh=True) == made
        changed = await b.put("/cas/k", b"two", expected=made.version)
        assert (changed.value, changed.mods, changed.created_ms) == (b"two", 1, made.created_ms)
        assert changed.version != made.version
        assert await a.get("/cas/k", fresh=True) == changed

    async def test_creating_twice_is_one_conflict(self, world: StoreWorld) -> None:
        handles = [await world.handle() for _ in range(2)]
        attempts = [h.put("/cas/once", str(i).encode(), expected=ABSENT) for i, h in enumerate(handles * 20)]
        outcomes = await asyncio.gather(*attempts, return_exceptions=True)
        won = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert len(won) == 1
        assert all(isinstance(o, VersionConflict) for o in outcomes if isinstance(o, BaseException))
        assert await handles[1].get("/cas/once", fresh=True) == won[0]

    async def test_replacing_needs_the_present_version(self, world: StoreWorld) -> None:
        store = await world.handle()
        first = await store.put("/cas/v", b"1")
        second = await store.put("/cas/v", b"2")
        for wrong in (first.version, second.version + 1000, ABSENT):
            with pytest.raises(VersionConflict, match="/cas/v"):
                await store.put("/cas/v", b"x", expected=wrong)
            with pytest.raises(VersionConflict, match="/cas/v"):
                await store.delete("/cas/v", expected=wrong)
        assert await store.get("/cas/v", fresh=True) == second
        with pytest.raises(VersionConflict):
            await store.put("/cas/none", b"x", expected=second.version)
        with pytest.raises(VersionConflict):
            await store.delete("/cas/none", expected=second.version)
        assert await store.get("/cas/none", fresh=True) is None
        assert await store.delete("/cas/v", expected=second.version)
        assert not await store.delete("/cas/v")
        assert await store.get("/cas/v", fresh=True) is None

    async def test_concurrent_increments_lose_none(self, world: StoreWorld) -> None:
        handles = [await world.handle() for _ in range(3)]
        await handles[0].put("/cas/counter", b"0")

        async def increment(store: MetadataStore) -> None:
            for _ in range(100):
                while True:
                    found = await store.get("/cas/counter")
                    assert found is not None
                    try:
                        await store.put("/cas/counter", str(int(found.value) + 1).encode(), expected=found.version)
                    except VersionConflict:
                        continue
                    break

        await asyncio.gather(*(increment(store) for store in handles))
        found = await handles[0].get("/cas/counter", fresh=True)
        assert found is not None
        assert (found.value, found.mods) == (b"300", 300)

    async def test_recreated_record_refuses_old_versions(self, world: StoreWorld) -> None:
        store = await world.handle()
        seen = set()
        for _ in range(5):
            record = await store.put("/cas/again", b"x", expected=ABSENT)
            assert record.mods == 0
            seen.add(record.version)
            await store.delete("/cas/again", expected=record.version)
        last = await store.put("/cas/again", b"x")
        if store.capabilities.unique_versions:
            assert len(seen | {last.version}) == 6
            for old in seen:
                with pytest.raises(VersionConflict):
                    await store.put("/cas/again", b"y", expected=old)
                with pytest.raises(VersionConflict):
                    await store.delete("/cas/again", expected=old)

    async def test_refusal_never_runs_ahead_of_what_can_be_read(self, world: StoreWorld) -> None:
        """A conflict tells of a write; whoever was told must be able to read that write."""
        a, b = await world.handle(), await world.handle()
        for round_number in range(20):
            key = f"/cas/ahead{round_number}"

            async def lose(key: str = key) -> None:
                with pytest.raises(VersionConflict):
                    await b.put(key, b"b", expected=ABSENT)
                found = await b.get(key, fresh=True)
                assert found is not None
                assert found.value == b"a"

            await asyncio.gather(a.put(key, b"a", expected=ABSENT), lose())

            async def miss(key: str = key) -> None:
                assert await b.delete(key) is False
                assert await b.get(key, fresh=True) is None

            await asyncio.gather(a.delete(key), miss())

    async def test_fresh_reads_see_writes_of_other_handles(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        for number in range(20):
            await a.put("/fresh/k", b"%d" % number, index={"fresh": f"{number:03d}"})
            await a.put(f"/fresh/n{number:03d}", b"")
            found = await b.get("/fresh/k", fresh=True)
            assert found is not None
            assert found.value == b"%d" % number
            scanned = await collect(b.scan(Span("/fresh", lo="k", hi="l"), fresh=True))
            assert [record.value for record in scanned] == [b"%d" % number]
            indexed = await collect(b.scan(IndexSpan.exactly("fresh", f"{number:03d}"), fresh=True))
            assert [record.key for record in indexed] == ["/fresh/k"]
            names = await collect_names(b.names(Span("/fresh", lo="n"), fresh=True))
            assert names == [f"n{n:03d}" for n in range(number + 1)]

    async def test_values_up_to_the_limit(self, world: StoreWorld) -> None:
        store = await world.handle()
        limit = store.capabilities.max_value
        for size in (0, 1, limit):
            await store.put("/value/k", b"\xa5" * size)
            found = await store.get("/value/k", fresh=True)
            assert found is not None
            assert found.value == b"\xa5" * size
        with pytest.raises(ValueTooLarge):
            await store.put("/value/k", b"x" * (limit + 1))
        with pytest.raises(ValueTooLarge):
            await store.append("/value/s", b"x" * (limit + 1), partition="p")
        await store.put("/value/k", b"still works")

    async def test_names_of_every_kind(self, world: StoreWorld) -> None:
        store = await world.handle()
        texts = [*AWKWARD_NAMES, "long" * 200]
        for text in texts:
            await store.put(f"/names/{encode_name(text)}", text.encode())
        names = await collect_names(store.names(Span("/names")))
        assert sorted(decode_name(name) for name in names) == sorted(texts)
        assert names == sorted(names, key=str.encode)
        for record in await collect(store.scan(Span("/names"))):
            assert decode_name(record.name) == record.value.decode()

    @pytest.mark.parametrize("key", ["", "/", "a", "a/b", "/a/", "//a", "/a//b", "/\ud800"])
    async def test_bad_keys_are_refused(self, world: StoreWorld, key: str) -> None:
        store = await world.handle()
        for call in (store.get(key), store.put(key, b""), store.delete(key), store.append(key, b"", partition="p")):
            with pytest.raises(InvalidArgument):
                await call

    async def test_bad_arguments_are_refused(self, world: StoreWorld) -> None:
        store = await world.handle()
        long = "x" * (store.capabilities.max_name + 1)
        with pytest.raises(ValueTooLarge):
            await store.put(f"/bad/{long}", b"")
        with pytest.raises(ValueTooLarge):
            await store.put("/bad/k", b"", index={"i": long})
        with pytest.raises(ValueTooLarge):
            await store.put("/bad/k", b"", index={f"i{n}": "" for n in range(1000)})
        with pytest.raises(InvalidArgument):
            await store.put("/bad/k", b"", index={"i": "a/b"})
        with pytest.raises(InvalidArgument):
            await store.put("/bad/k", b"", index={"": "a"})
        with pytest.raises(InvalidArgument):
            await store.put("/bad/k", "text")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            await collect(store.scan(Span("/bad", lo="a/b")))
        with pytest.raises(InvalidArgument):
            await collect(store.scan(Span("bad")))
        for deltas in ((), (0,), (1, -1)):
            with pytest.raises(InvalidArgument):
                await store.append("/bad/s", b"", partition="p", deltas=deltas)
        assert await collect(store.scan(Span("/bad"))) == []

    async def test_many_partitions(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        for number in range(50):
            await a.put(f"/part/{number:02d}", b"%d" % number, partition=f"p{number}", index={"part": f"{number:02d}"})
        for number in range(50):
            found = await b.get(f"/part/{number:02d}", partition=f"p{number}", fresh=True)
            assert found is not None
            assert found.value == b"%d" % number
        assert [r.name for r in await collect(b.scan(Span("/part"), fresh=True))] == [f"{n:02d}" for n in range(50)]
        assert [r.name for r in await collect(b.scan(IndexSpan("part"), fresh=True))] == [f"{n:02d}" for n in range(50)]
        for number in range(50):
            assert await b.delete(f"/part/{number:02d}", partition=f"p{number}")
        assert await collect(a.scan(IndexSpan("part"), fresh=True)) == []

    async def test_wrong_partition_is_refused(self, world: StoreWorld) -> None:
        if not world.refuses_wrong_partition:
            pytest.skip("this backend looks elsewhere and finds nothing")
        store = await world.handle()
        made = await store.put("/part/k", b"x", partition="right")
        for wrong in ("wrong", None):
            for call in (
                store.get("/part/k", partition=wrong),
                store.put("/part/k", b"y", partition=wrong),
                store.delete("/part/k", partition=wrong),
            ):
                with pytest.raises(InvalidArgument, match="partition"):
                    await call
        with pytest.raises(InvalidArgument, match="partition"):
            await collect(store.scan(Span("/part"), partition="wrong"))
        with pytest.raises(InvalidArgument, match="partition"):
            await store.delete_span(Span("/part"), partition="wrong")
        await store.append("/part/s", b"", partition="right")
        with pytest.raises(InvalidArgument, match="partition"):
            await store.append("/part/s", b"", partition="wrong")
        async with store.watch("/part/k") as events, store.follow("/part/s", partition="wrong") as records:
            for reader in (events, records):
                with pytest.raises(InvalidArgument, match="partition"):
                    await anext(reader)
        assert await store.get("/part/k", partition="right") == made
        await store.delete("/part/k", partition="right")
        assert (await store.put("/part/k", b"", partition="other")).mods == 0

    async def test_calls_after_close_are_refused(self, world: StoreWorld) -> None:
        store, other = await world.handle(), await world.handle()
        await store.put("/closed/k", b"x")
        await store.close()
        await store.close()
        for call in (store.get("/closed/k"), store.put("/closed/k", b""), store.delete("/closed/k")):
            with pytest.raises(Closed):
                await call
        with pytest.raises(Closed):
            await collect(store.scan(Span("/closed")))
        with pytest.raises(Closed):
            store.watch("/closed/k")
        found = await other.get("/closed/k", fresh=True)
        assert found is not None

    async def test_pending_calls_end_at_close(self, world: StoreWorld) -> None:
        store, other = await world.handle(), await world.handle()
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            writes = [group.create_task(_outcome(store, f"/closing/{n:03d}")) for n in range(50)]
            reader = group.create_task(_until_closed(store))
            await asyncio.sleep(0)
            await store.close()
        assert reader.result() == "closed"
        stored = set(await collect_names(other.names(Span("/closing"), fresh=True)))
        for number, write in enumerate(writes):
            if write.result() == "written":
                assert f"{number:03d}" in stored

    async def test_cancelled_calls_disturb_nobody(self, world: StoreWorld) -> None:
        store = await world.handle()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(store.put(f"/cancel/{n:03d}", b"x")) for n in range(60)]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
        for number, task in enumerate(tasks):
            if not task.cancelled():
                assert task.result().name == f"{number:03d}"
        names = set(await collect_names(store.names(Span("/cancel"), fresh=True)))
        assert {f"{n:03d}" for n in range(60) if n % 3} <= names
        await store.put("/cancel/after", b"")


async def _outcome(store: MetadataStore, key: str) -> str:
    try:
        await store.put(key, b"x")
    except BraidError:
        return "refused"
    return "written"


async def _until_closed(store: MetadataStore) -> str:
    try:
        async with store.watch(Span("/closing")) as events:
            async for _ in events:
                pass
    except Closed:
        return "closed"
    return "ended"
