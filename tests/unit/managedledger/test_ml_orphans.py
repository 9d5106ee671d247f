"""The sweep of orphans: what no record names goes, after a second look; what may be needed stays, whatever happens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from braid.errors import BraidError, LedgerStoreReadOnly, StoreUnavailable
from braid.ledger.backends import memory as memory_ledgers
from braid.managedledger.api import SingleStore
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.factory import ManagedLedgerFactory
from braid.managedledger.labels import ledger_labels
from braid.managedledger.orphans import CHUNK, OrphanSweep
from braid.managedledger.records import CursorRecord, LedgerInfo, LogRecord, decode_record, encode_record, log_key
from braid.managedledger.schemas import SchemaStorage
from braid.metadata.backends import memory as memory_metadata
from braid.model.positions import Position
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.testing.clock import ManualClock

MINUTES = 5
WAIT = MINUTES * 60 + 1
CONFIG = ManagedLedgerConfig(max_entries_per_ledger=3, min_ledger_age_ms=0, max_entries_per_cursor_ledger=2)


class Start:
    """A process on stores that outlived another one: `begin` first, then logs, then the sweep on a clock moved by hand."""

    def __init__(self, world: Any, clock: ManualClock, store: Any, metadata: Any) -> None:
        self.world = world
        self.clock = clock
        self.sweep = OrphanSweep(clock, metadata, store, MINUTES)
        self._tasks = Tasks("test")
        self.task: asyncio.Task[None] | None = None

    async def begin(self) -> Start:
        await self.sweep.begin()
        return self

    async def first_look(self) -> None:
        self.task = self._tasks.spawn(self.sweep.run(), "sweep")
        await self.second_look()

    async def second_look(self) -> None:
        await self.clock.advance(WAIT)
        for _second in range(20):  # the steps of one look take loop turns, and a pause now and then
            await self.clock.advance(1)

    async def both_looks(self) -> None:
        await self.first_look()
        await self.second_look()

    async def close(self) -> None:
        await self._tasks.close()


class Kit:
    """Memory stores, and what the tests do to them."""

    def __init__(self, kit: Any, world: Any, clock: ManualClock) -> None:
        self.kit = kit
        self.world = world
        self.clock = clock
        self.handle = world.engine.handle("orphans")
        self.started: list[Start] = []

    async def start(self, store: Any = None, metadata: Any = None) -> Start:
        made = await Start(self.world, self.clock, store or self.world.ledgers, metadata or self.handle).begin()
        self.started.append(made)
        return made

    async def ledger(self, component: str = "managed-ledger", name: str = "", custom: dict[str, bytes] | None = None) -> int:
        labels = ledger_labels(component, name or self.kit.NAME, "i") if custom is None else custom
        return int((await self.world.ledgers.create(custom=labels)).ledger_id)

    async def ids(self) -> list[int]:
        return [ledger_id async for ledger_id in self.world.ledgers.ledgers()]

    async def named(self) -> set[int]:
        """What the records of the one log and its one cursor name."""
        found = await self.handle.get(log_key(self.kit.NAME))
        ids = {info.ledger_id for info in decode_record(LogRecord, "log", found.value).ledgers}
        cursor = await self.handle.get(f"{log_key(self.kit.NAME)}/s")
        if cursor is not None:
            ids.add(decode_record(CursorRecord, "cursor", cursor.value).cursors_ledger_id)
        return ids - {-1}

    async def open(self, start: Start | None, **options: Any) -> tuple[Any, Any]:
        listener = self.kit.Listener()
        factory = self.world.factory(config=CONFIG, on_claim=None if start is None else start.sweep.claimed, **options)
        opened = await factory.open(self.kit.NAME, listener, create=True)
        self.world.opened.append(opened)
        return opened, listener


@pytest.fixture
async def orphans(kit: Any) -> AsyncIterator[Kit]:
    clock = ManualClock()
    runtime = Runtime(clock=clock)
    metadata, ledgers = await memory_metadata.open_store(runtime), await memory_ledgers.open_store(runtime)
    made = Kit(kit, kit.World(runtime, clock, metadata, ledgers), clock)
    yield made
    for start in made.started:
        await start.close()
    await made.world.close()


async def put_log(orphans: Kit, *ids: int) -> None:
    """A log's record as a dead process left it."""
    record = LogRecord(incarnation="i", ledgers=tuple(LedgerInfo(ledger_id=each, entries=1, timestamp=1) for each in ids))
    await orphans.handle.put(log_key(orphans.kit.NAME), encode_record(record))


@pytest.mark.inv("INV3", "INV4")
async def test_orphans_go_after_the_second_look_and_listed_ones_stay(orphans: Kit, caplog: pytest.LogCaptureFixture) -> None:
    listed, orphan, gone_log = await orphans.ledger(), await orphans.ledger(), await orphans.ledger(name="t/ns/persistent/gone")
    gone_cursor, gone_schema = (
        await orphans.ledger("cursor", f"{orphans.kit.NAME}/old"),
        await orphans.ledger("schema", "t/ns/x"),
    )
    await put_log(orphans, listed)
    start = await orphans.start()
    await start.first_look()
    assert await orphans.ids() == [listed, orphan, gone_log, gone_cursor, gone_schema]
    with caplog.at_level(logging.INFO):
        await start.second_look()
    assert await orphans.ids() == [listed]
    assert f"removed ledgers {orphan}, which an earlier process left behind: {log_key(orphans.kit.NAME)}" in caplog.text
    assert start.task is not None and start.task.done()


async def test_a_cursor_and_a_schema_keep_their_ledgers(orphans: Kit) -> None:
    schemas = SchemaStorage(orphans.world.runtime, orphans.handle, SingleStore(orphans.world.ledgers))
    await schemas.put("t/ns/topic", 1, b"one")
    await schemas.put("t/ns/topic", 1, b"two")
    log, listener = await orphans.open(None)
    cursor = await log.open_cursor("s", initial="earliest")
    await orphans.kit.fill(log, listener, range(4))
    cursor.acknowledge([log.first_position])
    await cursor.flush()
    before = await orphans.ids()
    assert len(before) == 5
    await (await orphans.start()).both_looks()
    assert await orphans.ids() == before
    assert [schema.data for schema in await schemas.versions("t/ns/topic")] == [b"one", b"two"]


@pytest.mark.parametrize(
    "custom",
    [
        {},
        {"application": b"pulsar", "component": b"managed-ledger", "braid/name": b"gone"},
        ledger_labels("something-new", "gone", ""),
        {"application": b"braid", "component": b"managed-ledger"},
        {"application": b"braid", "component": b"managed-ledger", "braid/name": b"\xff"},
        ledger_labels("managed-ledger", "a//b", ""),  # no key of any record
    ],
)
async def test_labels_that_do_not_tell_protect_a_ledger(orphans: Kit, custom: dict[str, bytes]) -> None:
    ledger_id = await orphans.ledger(custom=custom)
    start = await orphans.start()
    await start.both_looks()
    assert await orphans.ids() == [ledger_id]


async def test_a_ledger_under_creation_is_never_looked_at(orphans: Kit) -> None:
    old = await orphans.ledger()
    start = await orphans.start()
    new = await orphans.ledger()  # and its record is never written, however long we wait
    for _look in range(5):
        await start.both_looks()
    assert (old in await orphans.ids(), new in await orphans.ids()) == (False, True)


async def test_a_ledger_that_is_listed_between_the_looks_stays(orphans: Kit, caplog: pytest.LogCaptureFixture) -> None:
    strange, orphan = await orphans.ledger(), await orphans.ledger()
    await put_log(orphans)
    start = await orphans.start()
    await start.first_look()
    await put_log(orphans, strange)
    await start.second_look()
    assert await orphans.ids() == [strange]
    assert orphan != strange and "was taken for an orphan" in caplog.text


@pytest.mark.parametrize("value", [b"{", b'{"formatVersion":999,"incarnation":"i"}'])
async def test_a_record_that_cannot_be_read_protects_its_ledgers(
    orphans: Kit, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ledger_id = await orphans.ledger()
    await orphans.handle.put(log_key(orphans.kit.NAME), value)
    start = await orphans.start()
    await start.both_looks()
    assert await orphans.ids() == [ledger_id]
    assert f"ledgers {ledger_id} may be orphans" in caplog.text


async def reopened(orphans: Kit, deaf_key: str) -> tuple[Start, Any, Deaf]:
    """A log with three ledgers and a cursor in a ledger, after a start; updates of one record can be left unanswered."""
    kit = orphans.kit
    log, listener = await orphans.open(None)
    cursor = await log.open_cursor("s", initial="earliest")
    await kit.fill(log, listener, range(7))
    cursor.acknowledge([log.first_position])
    await cursor.flush()  # no clean end, which would move a small position into the record
    start = await orphans.start()
    metadata = Deaf(orphans.handle, deaf_key)
    factory = ManagedLedgerFactory(
        orphans.world.runtime,
        metadata,
        SingleStore(orphans.world.ledgers),
        CONFIG,
        EntryCache(1 << 20),
        on_claim=start.sweep.claimed,
    )
    log = await factory.open(kit.NAME, kit.Listener(), create=False)
    orphans.world.opened.append(log)
    return start, log, metadata


async def interrupt(log: Any, metadata: Deaf, name: str) -> None:
    """Cancel the log's task of that name once its update is applied."""
    await metadata.applied.wait()
    (task,) = [task for task in log.tasks._running if task.get_name().endswith(name)]
    task.cancel()
    await asyncio.wait([task])
    metadata.is_deaf = False


@pytest.mark.inv("INV2")
async def test_what_a_log_may_list_again_is_not_judged_by_the_record(orphans: Kit) -> None:
    """A trim without a verdict: the record names the ledger no more, but the owner does, and writes it again."""
    start, log, metadata = await reopened(orphans, log_key(orphans.kit.NAME))
    listed = {info.ledger_id for info in log.infos}
    cursor = log.cursors["s"]
    metadata.is_deaf = True
    while entries := await cursor.read(100, 1 << 20):
        cursor.acknowledge([Position(entry.ledger_id, entry.entry_id) for entry in entries])
    await cursor.flush()
    log.request_trim()
    await interrupt(log, metadata, ":trim")
    trimmed = listed - await orphans.named()
    assert trimmed and trimmed <= {info.ledger_id for info in log.infos}, "the case is not there"
    await start.both_looks()
    assert listed <= set(await orphans.ids())
    await log.set_properties({"a": "b"})
    assert len(await orphans.kit.everything(log)) == 7


@pytest.mark.inv("INV2")
async def test_what_a_cursor_may_point_to_again_is_not_judged_by_the_record(orphans: Kit) -> None:
    """The same with a cursor's change to a new ledger: its next update points to the old one again."""
    start, log, metadata = await reopened(orphans, f"{log_key(orphans.kit.NAME)}/s")
    cursor = log.cursors["s"]
    old = cursor._store.ledger_id
    metadata.is_deaf = True
    cursor.acknowledge([Position(log.first_position.ledger_id, 1)])
    flushing = asyncio.get_running_loop().create_task(cursor.flush())
    await interrupt(log, metadata, ":cursor s")
    await asyncio.wait([flushing])
    cursor.stop()  # or it would save itself to a third ledger while we wait
    assert flushing.cancelled() or flushing.exception() is not None
    assert old >= 0 and old not in await orphans.named(), "the case is not there"
    await start.both_looks()
    assert old in await orphans.ids()


class Deaf:
    """A metadata handle that applies updates of one record and never hears the answer."""

    def __init__(self, inner: Any, key: str) -> None:
        self._inner = inner
        self._key = key
        self.is_deaf = False
        self.applied = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def put(self, key: str, value: bytes, **options: Any) -> Any:
        record = await self._inner.put(key, value, **options)
        if self.is_deaf and key == self._key:
            self.applied.set()
            await asyncio.Event().wait()
        return record


async def test_a_claim_while_the_record_is_read_counts(orphans: Kit) -> None:
    """The owner claims and drops a ledger between the start of the read and its answer."""
    listed = await orphans.ledger()
    await put_log(orphans, listed)
    start = await orphans.start()

    class Slow:
        async def get(self, key: str, **options: Any) -> Any:
            start.sweep.claimed(key, [listed])
            await put_log(orphans)
            return await orphans.handle.get(key, **options)

    start.sweep._metadata = Slow()  # type: ignore[assignment]
    await start.first_look()
    start.sweep._metadata = orphans.handle
    await start.second_look()
    assert await orphans.ids() == [listed]


async def test_a_store_that_refuses_is_asked_again(orphans: Kit, caplog: pytest.LogCaptureFixture) -> None:
    one, two = await orphans.ledger(), await orphans.ledger()
    faults = orphans.kit.Faults()
    start = await orphans.start(orphans.kit.FaultyLedgers(orphans.world.ledgers, faults))
    faults.only = "delete"
    await start.first_look()
    faults.arm(2, after=False, error=LedgerStoreReadOnly("full"))
    await start.second_look()
    assert await orphans.ids() == [two]
    assert f"ledgers {two} of {log_key(orphans.kit.NAME)}, named by no record, cannot be deleted yet: full" in caplog.text
    await start.second_look()
    assert one != two and await orphans.ids() == []


async def test_a_metadata_store_that_does_not_answer_deletes_nothing(orphans: Kit) -> None:
    ledger_id = await orphans.ledger()
    faults = orphans.kit.Faults()
    start = await orphans.start(metadata=orphans.kit.FaultyMetadata(orphans.handle, faults))
    await start.first_look()
    faults.arm(1, after=False, error=StoreUnavailable("away"))
    await start.second_look()
    assert await orphans.ids() == [ledger_id]
    await start.second_look()
    assert await orphans.ids() == []


async def test_many_orphans_are_removed_in_small_steps(orphans: Kit) -> None:
    for number in range(3 * CHUNK):
        await orphans.ledger(name=f"t/ns/persistent/{number}")
    start = await orphans.start()
    await start.both_looks()
    assert start.task is not None
    while not start.task.done():
        await orphans.clock.advance(1)
    assert await orphans.ids() == []


async def test_nothing_to_inherit_is_nothing_to_do(orphans: Kit) -> None:
    assert not await OrphanSweep(orphans.clock, orphans.handle, orphans.world.ledgers, MINUTES).begin()


async def live(orphans: Kit, faults: Any, lives: list[Any]) -> None:
    """Every way to make and leave ledgers: rolls of log and cursor, trims, schemas, deletion."""
    kit = orphans.kit
    factory = orphans.world.factory(config=CONFIG, faults=faults)
    schemas = SchemaStorage(
        orphans.world.runtime,
        kit.FaultyMetadata(orphans.handle, faults),
        SingleStore(kit.FaultyLedgers(orphans.world.ledgers, faults)),
    )
    for _life in range(2):
        listener = kit.Listener()
        log = await factory.open(kit.NAME, listener, create=True)
        lives.append(log)
        cursor = await log.open_cursor("s", initial="earliest")
        for number in range(5):
            log.add(kit.body_of(number), 1, number)
            while len(listener.added) + len(listener.failed_contexts) <= number:
                if faults.is_dead:
                    raise kit.PowerCut
                await asyncio.sleep(0)
            cursor.acknowledge([log.last_position])
            await cursor.flush()
        await log.trim()
        await schemas.put("t/ns/topic", 1, b"data %d" % _life)
        log = await factory.open(kit.NAME, kit.Listener(), create=True)  # takes over, without a clean end of the first
        lives.append(log)
        await log.delete_cursor("s")
        await log.close()
    await schemas.delete("t/ns/topic")


@pytest.mark.inv("INV3", "INV4")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("opens_first", [False, True])
async def test_after_a_power_cut_at_any_call_exactly_the_orphans_go(kit: Any, after: bool, opens_first: bool) -> None:
    found_orphans = 0
    for at in range(1, 400):
        clock = ManualClock()
        runtime = Runtime(clock=clock)
        metadata, ledgers = await memory_metadata.open_store(runtime), await memory_ledgers.open_store(runtime)
        orphans = Kit(kit, kit.World(runtime, clock, metadata, ledgers), clock)
        faults = kit.Faults()
        faults.arm(at, after=after)
        is_cut = False
        lives: list[Any] = []
        try:
            await live(orphans, faults, lives)
        except (kit.PowerCut, BraidError):
            assert faults.is_dead
            is_cut = True
        faults.is_dead = True
        for log in lives:
            await log.tasks.close()
            for cursor in log.cursors.values():
                cursor.stop()
        before = set(await orphans.ids())
        start = await orphans.start()
        if opens_first:
            log, listener = await orphans.open(start)
            await kit.fill(log, listener, range(3))
        await start.both_looks()
        if not opens_first:
            log, listener = await orphans.open(start)
        named = await orphans.named()
        schema = await orphans.handle.get("/schemas/t/ns/topic")
        if schema is not None:
            locator = msgspec.json.decode(schema.value)
            named |= {each["position"]["ledgerId"] for each in locator["versions"]}
        assert set(await orphans.ids()) == named, f"cut at call {at}: {faults.log[-1]}"
        found_orphans += bool(before - named)
        await start.close()
        await orphans.world.close()
        if not is_cut:
            assert found_orphans > 5
            return
    raise AssertionError("the life never ended")
