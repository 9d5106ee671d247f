"""The conformance suite of `LedgerStore`: what every ledger backend must do.

Subclass `LedgerStoreConformance` in a test module and give it a fixture `store`; pytest (asyncio in auto mode) runs the rest.
The tests use the port only.
"""

from __future__ import annotations

import asyncio

import pytest

from braid.errors import (
    BraidError,
    Closed,
    EntryNotFound,
    InvalidArgument,
    LedgerClosed,
    LedgerError,
    LedgerExists,
    LedgerFenced,
    LedgerNotFound,
)
from braid.ledger.api import NO_ENTRY, LedgerReader, LedgerStore, LedgerWriter

PATIENCE = 20.0
"""Seconds after which something that must happen is declared missing."""


class RecordingListener:
    """Keeps what it is told and lets a test wait for it."""

    def __init__(self) -> None:
        self.advanced: list[int] = []
        self.failures: list[LedgerError] = []
        self._changed = asyncio.Event()

    def ledger_advanced(self, last_confirmed: int) -> None:
        assert not self.failures, "an entry was confirmed after the writer had failed"
        assert last_confirmed > self.last, "confirmations went back"
        self.advanced.append(last_confirmed)
        self._changed.set()

    def ledger_failed(self, error: LedgerError) -> None:
        assert not self.failures, "a failure was told twice"
        self.failures.append(error)
        self._changed.set()

    @property
    def last(self) -> int:
        return self.advanced[-1] if self.advanced else NO_ENTRY

    async def confirmed(self, entry_id: int) -> None:
        """Return once the entry is confirmed or the writer has failed."""
        async with asyncio.timeout(PATIENCE):
            while self.last < entry_id and not self.failures:
                self._changed.clear()
                await self._changed.wait()

    async def failed(self) -> LedgerError:
        async with asyncio.timeout(PATIENCE):
            while not self.failures:
                self._changed.clear()
                await self._changed.wait()
        return self.failures[0]


async def read_all(reader: LedgerReader) -> list[bytes]:
    """Every confirmed entry of a ledger."""
    return await reader.read(0, reader.last_confirmed) if reader.last_confirmed >= 0 else []


async def filled(store: LedgerStore, count: int, size: int = 10) -> LedgerWriter:
    """A ledger with `count` confirmed entries `b"0...", b"1...", ...`."""
    listener = RecordingListener()
    writer = await store.create(listener=listener)
    for number in range(count):
        writer.append(b"%d" % number, b"." * size)
    await listener.confirmed(count - 1)
    return writer


def entry(number: int, size: int = 10) -> bytes:
    """What `filled` wrote at `number`."""
    return b"%d" % number + b"." * size


class LedgerStoreConformance:
    """Inherit and provide the fixture `store`."""

    async def test_entries_are_numbered_from_zero_and_read_back(self, store: LedgerStore) -> None:
        listener = RecordingListener()
        writer = await store.create(listener=listener)
        assert (writer.last_pushed, writer.last_confirmed, writer.length) == (-1, -1, 0)
        assert [writer.append(b"head", b"body%d" % n) for n in range(5)] == [0, 1, 2, 3, 4]
        assert writer.last_pushed == 4
        assert writer.last_confirmed < 4, "an entry was confirmed in the loop turn that pushed it"
        assert writer.length == 45
        await listener.confirmed(4)
        assert writer.last_confirmed == 4
        reader = await store.open(writer.ledger_id, fence=False)
        assert await reader.read(1, 3) == [b"headbody1", b"headbody2", b"headbody3"]
        assert not reader.is_closed

    async def test_an_empty_entry_is_an_entry(self, store: LedgerStore) -> None:
        writer = await store.create()
        assert await writer.add(b"") == 0
        assert await writer.add(b"x") == 1
        reader = await store.open(writer.ledger_id, fence=True)
        assert await read_all(reader) == [b"", b"x"]

    async def test_confirmations_come_once_per_group(self, store: LedgerStore) -> None:
        listener = RecordingListener()
        writer = await store.create(listener=listener)
        for number in range(1000):
            writer.append(b"", b"%d" % number)
        await listener.confirmed(999)
        assert len(listener.advanced) < 50, "one call per entry instead of one per group"

    async def test_add_returns_after_confirmation(self, store: LedgerStore) -> None:
        writer = await store.create()
        for number in range(3):
            assert await writer.add(b"%d" % number) == number
            assert writer.last_confirmed == number
        assert await asyncio.gather(*[writer.add(b"x") for _ in range(10)]) == list(range(3, 13))

    async def test_ids_are_positive_and_grow(self, store: LedgerStore) -> None:
        ids = [(await store.create()).ledger_id for _ in range(5)]
        assert ids[0] > 0
        assert ids == sorted(set(ids))
        await store.delete(ids[-1])
        assert (await store.create()).ledger_id > ids[-1], "the id of a deleted ledger was reused"

    async def test_concurrent_creates_get_different_ids(self, store: LedgerStore) -> None:
        writers = await asyncio.gather(*[store.create() for _ in range(50)])
        assert len({writer.ledger_id for writer in writers}) == 50

    async def test_a_given_id_is_used_and_pushes_the_allocator(self, store: LedgerStore) -> None:
        first = await store.create()
        given = await store.create(ledger_id=first.ledger_id + 1000)
        assert given.ledger_id == first.ledger_id + 1000
        assert (await store.create()).ledger_id > given.ledger_id
        below = await store.create(ledger_id=first.ledger_id + 500)
        assert below.ledger_id == first.ledger_id + 500

    async def test_a_taken_id_is_refused(self, store: LedgerStore) -> None:
        writer = await store.create()
        with pytest.raises(LedgerExists):
            await store.create(ledger_id=writer.ledger_id)
        await store.delete(writer.ledger_id)
        with pytest.raises(LedgerExists):
            await store.create(ledger_id=writer.ledger_id)
        with pytest.raises(InvalidArgument):
            await store.create(ledger_id=0)

    async def test_metadata_of_an_open_and_a_closed_ledger(self, store: LedgerStore) -> None:
        writer = await store.create(custom={"owner": b"topic \xff", "kind": b""})
        await writer.add(b"12345")
        found = await store.metadata(writer.ledger_id)
        assert (found.ledger_id, found.is_closed) == (writer.ledger_id, False)
        assert dict(found.custom) == {"owner": b"topic \xff", "kind": b""}
        assert found.created_ms > 0
        closed = await writer.close()
        assert (closed.is_closed, closed.last_entry, closed.length) == (True, 0, 5)
        assert await store.metadata(writer.ledger_id) == closed

    async def test_close_waits_for_what_was_pushed(self, store: LedgerStore) -> None:
        listener = RecordingListener()
        writer = await store.create(listener=listener)
        for number in range(100):
            writer.append(b"", b"%d" % number)
        closing = writer.close()
        metadata = await closing
        assert (metadata.last_entry, listener.last) == (99, 99)
        assert await writer.close() == metadata
        assert not listener.failures
        with pytest.raises(LedgerClosed):
            writer.append(b"", b"late")
        with pytest.raises(LedgerClosed):
            await writer.add(b"late")

    async def test_an_empty_ledger_can_be_closed_and_opened(self, store: LedgerStore) -> None:
        writer = await store.create()
        assert (await writer.close()).last_entry == NO_ENTRY
        reader = await store.open(writer.ledger_id, fence=True)
        assert (reader.last_confirmed, reader.is_closed) == (NO_ENTRY, True)
        with pytest.raises(EntryNotFound):
            await reader.read(0, 0)

    async def test_open_without_fence_disturbs_nobody(self, store: LedgerStore) -> None:
        writer = await filled(store, 3)
        reader = await store.open(writer.ledger_id, fence=False)
        await writer.add(b"more")
        assert reader.last_confirmed == 2
        with pytest.raises(EntryNotFound):
            await reader.read(0, 3)
        assert await reader.refresh() == 3
        assert await reader.read(3, 3) == [b"more"]
        await writer.close()
        await reader.refresh()
        assert reader.is_closed
        await reader.close()

    async def test_fencing_stops_the_writer_and_settles_the_end(self, store: LedgerStore) -> None:
        listener = RecordingListener()
        writer = await store.create(listener=listener)
        await writer.add(b"one")
        pending = [writer.append(b"", b"%d" % n) for n in range(20)]
        opening = asyncio.gather(*[store.open(writer.ledger_id, fence=True) for _ in range(3)])
        readers = await opening
        with pytest.raises(LedgerFenced):
            writer.append(b"", b"late")
        with pytest.raises(LedgerFenced):
            await writer.close()
        ends = {reader.last_confirmed for reader in readers}
        assert len(ends) == 1, "two openers disagree on the end"
        assert all(reader.is_closed for reader in readers)
        end = ends.pop()
        assert listener.last <= end <= pending[-1]
        assert isinstance(await listener.failed(), LedgerFenced)
        told = listener.last
        for _ in range(5):
            await asyncio.sleep(0)
        assert listener.last == told, "an entry was confirmed after the fence"
        assert (await store.metadata(writer.ledger_id)).last_entry == end
        assert len(await read_all(readers[0])) == end + 1

    async def test_fencing_fails_an_append_at_once(self, store: LedgerStore) -> None:
        writer = await filled(store, 1)
        opening = asyncio.gather(store.open(writer.ledger_id, fence=True))
        await asyncio.sleep(0)
        with pytest.raises(LedgerFenced):
            writer.append(b"", b"late")
        await opening

    async def test_fencing_a_closed_ledger_changes_nothing(self, store: LedgerStore) -> None:
        listener = RecordingListener()
        writer = await store.create(listener=listener)
        await writer.add(b"x")
        closed = await writer.close()
        reader = await store.open(writer.ledger_id, fence=True)
        assert (reader.last_confirmed, reader.is_closed) == (0, True)
        assert await store.metadata(writer.ledger_id) == closed
        assert not listener.failures

    async def test_close_and_fence_race_to_one_end(self, store: LedgerStore) -> None:
        for close_first in (True, False):
            writer = await filled(store, 3)
            writer.append(b"", b"pending")
            jobs = [writer.close(), store.open(writer.ledger_id, fence=True)]
            results = await asyncio.gather(*(jobs if close_first else reversed(jobs)), return_exceptions=True)
            for result in results:
                assert not isinstance(result, BaseException) or isinstance(result, LedgerFenced), result
            metadata = await store.metadata(writer.ledger_id)
            assert metadata.is_closed
            reader = await store.open(writer.ledger_id, fence=False)
            assert reader.last_confirmed == metadata.last_entry
            assert len(await read_all(reader)) == metadata.last_entry + 1

    async def test_reads_are_bounded_by_bytes_but_never_empty(self, store: LedgerStore) -> None:
        writer = await filled(store, 50, size=98)
        reader = await store.open(writer.ledger_id, fence=True)
        assert len(await reader.read(0, 49, max_bytes=1)) == 1
        some = await reader.read(10, 49, max_bytes=1000)
        assert some == [entry(n, 98) for n in range(10, 20)]
        assert len(await reader.read(0, 49, max_bytes=1 << 20)) == 50

    @pytest.mark.parametrize("is_fenced", [False, True])
    async def test_lengths_are_told_without_reading(self, store: LedgerStore, is_fenced: bool) -> None:
        writer = await store.create()
        sizes = [1 + 37 * number % 401 for number in range(300)]
        for number, size in enumerate(sizes):
            await writer.add(bytes(size))
            if number == 100:
                other = await filled(store, 200, size=1000)  # what lies in a file and what is in memory changes meanwhile
                await other.close()
        reader = await store.open(writer.ledger_id, fence=is_fenced)
        for number in range(len(sizes) + 1):
            assert await reader.length_before(number) == sum(sizes[:number])
        for bad in (len(sizes) + 1, -1):
            with pytest.raises((EntryNotFound, InvalidArgument)):
                await reader.length_before(bad)
        await store.delete(writer.ledger_id)
        with pytest.raises(LedgerNotFound):
            await reader.length_before(1)

    async def test_bad_reads_are_refused(self, store: LedgerStore) -> None:
        writer = await filled(store, 3)
        reader = await store.open(writer.ledger_id, fence=False)
        with pytest.raises(EntryNotFound):
            await reader.read(2, 3)
        with pytest.raises(EntryNotFound):
            await reader.read(3, 3)
        with pytest.raises(InvalidArgument):
            await reader.read(-1, 1)
        with pytest.raises(InvalidArgument):
            await reader.read(2, 1)

    async def test_delete_removes_and_fences(self, store: LedgerStore) -> None:
        listener = RecordingListener()
        writer = await store.create(listener=listener)
        await writer.add(b"x")
        reader = await store.open(writer.ledger_id, fence=False)
        await asyncio.gather(store.delete(writer.ledger_id), store.delete(writer.ledger_id))
        await store.delete(writer.ledger_id)
        with pytest.raises(LedgerFenced):
            writer.append(b"", b"late")
        assert isinstance(await listener.failed(), LedgerFenced)
        with pytest.raises(LedgerNotFound):
            await store.metadata(writer.ledger_id)
        with pytest.raises(LedgerNotFound):
            await store.open(writer.ledger_id, fence=True)
        with pytest.raises(LedgerNotFound):
            await reader.read(0, 0)
        with pytest.raises(LedgerNotFound):
            await reader.refresh()

    async def test_unknown_ledgers_are_not_found(self, store: LedgerStore) -> None:
        for fence in (True, False):
            with pytest.raises(LedgerNotFound):
                await store.open(12345, fence=fence)
        with pytest.raises(LedgerNotFound):
            await store.metadata(12345)

    async def test_ledgers_are_listed_in_order(self, store: LedgerStore) -> None:
        writers = [await store.create() for _ in range(5)]
        await store.delete(writers[2].ledger_id)
        expected = [writer.ledger_id for writer in writers if writer is not writers[2]]
        assert [ledger_id async for ledger_id in store.ledgers()] == expected

    async def test_many_ledgers_at_once_keep_their_entries_apart(self, store: LedgerStore) -> None:
        listeners = [RecordingListener() for _ in range(300)]
        writers = await asyncio.gather(*[store.create(listener=listener) for listener in listeners])
        for number in range(10):
            for writer in writers:
                assert writer.append(b"%d:" % writer.ledger_id, b"%d" % number) == number
        for listener in listeners:
            await listener.confirmed(9)
        for writer in writers:
            reader = await store.open(writer.ledger_id, fence=False)
            assert await read_all(reader) == [b"%d:%d" % (writer.ledger_id, number) for number in range(10)]

    async def test_a_cancelled_add_changes_nothing_for_the_next(self, store: LedgerStore) -> None:
        writer = await store.create()
        waiting = asyncio.gather(writer.add(b"a"))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await writer.add(b"b") == 1
        reader = await store.open(writer.ledger_id, fence=True)
        assert await read_all(reader) == [b"a", b"b"]

    async def test_a_closed_store_refuses_everything(self, store: LedgerStore) -> None:
        listener = RecordingListener()
        writer = await store.create(listener=listener)
        last = [writer.append(b"", b"x") for _ in range(10)][-1]
        await store.close()
        assert listener.last == last, "close did not wait for what was pushed"
        with pytest.raises(BraidError):
            writer.append(b"", b"late")
        for call in (store.create(), store.open(writer.ledger_id, fence=True), store.metadata(writer.ledger_id)):
            with pytest.raises(Closed):
                await call
        await store.close()
