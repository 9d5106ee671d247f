"""Conformance: sessions and ephemeral records, restart (points 7 and 12 of the suite)."""

from __future__ import annotations

import asyncio

import pytest

from braid.errors import InvalidArgument, VersionConflict
from braid.metadata.api import ABSENT, IndexSpan, MetadataStore, SessionState, Span
from braid.testing.conformance.metadata_world import PATIENCE, StoreWorld, collect, collect_names, folded


async def until_gone(observer: MetadataStore, key: str) -> None:
    """Wait until the record is seen to be gone."""
    async with folded(observer.watch(key)) as view:
        await view.until_synced()
        await view.until(lambda records: not records)


class SessionCases:
    """Who owns what, for how long."""

    async def test_ephemeral_ends_with_its_handle(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        made = await a.put("/eph/k", b"x", expected=ABSENT, ephemeral=True)
        assert made.owner == a.session.id
        assert made.mine
        seen = await b.get("/eph/k", fresh=True)
        assert seen is not None
        assert (seen.owner, seen.mine, seen.version) == (made.owner, False, made.version)
        await a.put("/eph/stays", b"")
        await a.close()
        assert a.session.state is SessionState.CLOSED
        assert await b.get("/eph/k", fresh=True) is None
        assert await b.get("/eph/stays", fresh=True) is not None

    async def test_ephemeral_ends_when_heartbeats_stop(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        session, own = a.session, b.session
        await asyncio.gather(*(a.put(f"/exp/{n}", b"", ephemeral=True) for n in range(5)))
        await b.put("/exp/other", b"", ephemeral=True)
        async with folded(b.watch(Span("/exp"))) as view:
            await view.until_synced()
            await world.pause(a, session.timeout * 2)
            await view.until(lambda records: list(records) == ["/exp/other"])
        async with asyncio.timeout(PATIENCE):
            await session.wait_lost()
        assert session.state is SessionState.LOST
        assert own.state is SessionState.CONNECTED
        assert await collect_names(b.names(Span("/exp"), fresh=True)) == ["other"]

    async def test_short_pause_keeps_the_session(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        session = a.session
        made = await a.put("/short/k", b"", ephemeral=True)
        for _ in range(5):
            await world.pause(a, session.timeout * 0.6)
        assert a.session is session
        assert session.state is SessionState.CONNECTED
        found = await b.get("/short/k", fresh=True)
        assert found is not None
        assert found.version == made.version

    async def test_lost_session_is_replaced_when_the_handle_is_used(self, world: StoreWorld) -> None:
        a, b = await world.handle(), await world.handle()
        lost = a.session
        await a.put("/again/k", b"old", ephemeral=True)
        await world.pause(a, lost.timeout * 2)
        await until_gone(b, "/again/k")
        made = await a.put("/again/k", b"new", expected=ABSENT, ephemeral=True)
        assert a.session is not lost
        assert a.session.state is SessionState.CONNECTED
        assert made.owner == a.session.id != lost.id
        assert lost.state is SessionState.LOST
        await world.pause(b, lost.timeout * 0.6)
        assert await a.get("/again/k", fresh=True) == made

    async def test_good_until_is_before_expiry(self, world: StoreWorld) -> None:
        a = await world.handle()
        session = a.session
        first = session.good_until()
        await world.pause(a, session.timeout * 0.5)
        assert session.good_until() > first
        await world.pause(a, session.timeout * 2)
        async with asyncio.timeout(PATIENCE):
            await session.wait_lost()
        assert session.good_until() < first + session.timeout * 2.5

    async def test_overwriting_transfers_ownership(self, world: StoreWorld) -> None:
        a, b, c = await world.handle(), await world.handle(), await world.handle()
        await a.put("/move/k", b"a", ephemeral=True)
        taken = await b.put("/move/k", b"b", ephemeral=True)
        assert taken.owner == b.session.id
        await a.put("/move/kept", b"a", ephemeral=True)
        await b.put("/move/kept", b"b")
        await a.close()
        assert await collect_names(c.names(Span("/move"), fresh=True)) == ["k", "kept"]
        await b.close()
        assert await collect_names(c.names(Span("/move"), fresh=True)) == ["kept"]
        kept = await c.get("/move/kept", fresh=True)
        assert kept is not None
        assert kept.owner is None

    async def test_ephemeral_cannot_be_indexed(self, world: StoreWorld) -> None:
        store = await world.handle()
        with pytest.raises(InvalidArgument):
            await store.put("/eph/indexed", b"", ephemeral=True, index={"i": "x"})

    async def test_deleted_ephemeral_of_an_old_session_is_not_taken_along(self, world: StoreWorld) -> None:
        """What another session created at the same key survives the end of the first one."""
        a, b = await world.handle(), await world.handle()
        made = await a.put("/succ/k", b"a", ephemeral=True)
        await b.delete("/succ/k", expected=made.version)
        successor = await b.put("/succ/k", b"b", expected=ABSENT, ephemeral=True)
        await world.pause(a, a.session.timeout * 2)
        await a.put("/succ/other", b"")
        assert await b.get("/succ/k", fresh=True) == successor
        await a.close()
        assert await b.get("/succ/k", fresh=True) == successor

    async def test_restart_keeps_records_and_drops_ephemerals(self, world: StoreWorld) -> None:
        store = await world.handle()
        if not world.is_durable:  # then it must forget everything, not half of it
            await store.put("/disk/k", b"v", index={"disk": "s"})
            await world.restart()
            store = await world.handle()
            assert await store.get("/disk/k") is None
            assert await collect(store.scan(IndexSpan.exactly("disk", "s"))) == []
            return
        kept = await store.put("/disk/k", b"v", partition="p", index={"disk": "s"})
        kept = await store.put("/disk/k", b"w", partition="p", index={"disk": "s"})
        await store.put("/disk/gone", b"")
        gone = await store.put("/disk/gone", b"2")
        await store.delete("/disk/gone")
        await store.append("/disk/s", b"", partition="p")
        await store.put("/disk/eph", b"", ephemeral=True)
        await world.restart()
        store = await world.handle()
        assert await store.get("/disk/k", partition="p") == kept
        assert await collect_names(store.names(Span("/disk"))) == ["k", f"s-{1:020d}"]
        again = await store.put("/disk/gone", b"3", expected=ABSENT)
        assert again.version not in (gone.version, kept.version)
        with pytest.raises(VersionConflict):
            await store.put("/disk/gone", b"4", expected=gone.version)
        assert (await store.append("/disk/s", b"", partition="p")).name == f"s-{2:020d}"
        assert [record.value for record in await collect(store.scan(IndexSpan.exactly("disk", "s")))] == [b"w"]
