"""`TransactionStore` on the backends: conditions, sequences, index queries, ends of topics and subscriptions."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.unit.txn.coordination_bench import SEGMENT, Bench, ack, brokers, write

from braid.errors import BraidError, LedgerFenced, StoreUnavailable, VersionConflict
from braid.metadata.api import IndexSpan, MetadataStore, Put, Span, Synced
from braid.metadata.backends import embedded, memory
from braid.metadata.engine import Engine
from braid.model.txn import TxnId
from braid.runtime.env import Runtime
from braid.testing.conformance.metadata_world import collect, collect_names
from braid.txn import records
from braid.txn.records import AbortedTxn, TxnHeader
from braid.txn.store import Header, StoredOp, TransactionStore

ROOT, OTHER = TxnId.of(0, 1), TxnId.of(1, 1)


@pytest.fixture(params=["memory", "embedded"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    opened = memory.open_store if request.param == "memory" else partial(embedded.open_store, path=tmp_path)
    async with brokers(open_store=opened) as (made,):
        yield made


def header(state: str = "OPEN", *, timeout_ms: int = 100, finalized_ms: int | None = None) -> TxnHeader:
    assert state in ("OPEN", "COMMITTED", "ABORTED")
    return TxnHeader(state=state, timeout_ms=timeout_ms, created_ms=0, finalized_ms=finalized_ms)  # type: ignore[arg-type]


async def all_of(headers: AsyncIterator[Header]) -> list[TxnId]:
    return [each.root async for each in headers]


@pytest.mark.req("R473-7", "R473-9")
async def test_header_is_created_once_and_changed_by_version_only(bench: Bench) -> None:
    made = await bench.store.create_header(ROOT, header())
    assert await bench.store.header(ROOT) == made
    with pytest.raises(VersionConflict):
        await bench.store.create_header(ROOT, header())
    final = await bench.store.swap_header(made, header("COMMITTED", finalized_ms=50))
    with pytest.raises(VersionConflict):
        await bench.store.swap_header(made, header("ABORTED", finalized_ms=51))
    assert await bench.store.header(ROOT) == final
    with pytest.raises(VersionConflict):
        await bench.store.delete_header(made)
    await bench.store.delete_header(final)
    assert await bench.store.header(ROOT) is None
    assert bench.store.counters.header_cas == {"ok": 1, "conflict": 1, "reject": 0}


@pytest.mark.req("R473-11", "R473-46")
async def test_a_thousand_concurrent_appenders_get_numbers_of_their_own(bench: Bench) -> None:
    async def one(number: int) -> str:
        return (await bench.store.append_op(ROOT, write(position=f"1:{number}"))).key

    keys = await asyncio.gather(*map(one, range(1000)))
    assert len(set(keys)) == 1000
    ops = await bench.store.ops(ROOT)
    assert [op.key for op in ops] == sorted(keys)
    assert sorted(op.op.position for op in ops) == sorted(f"1:{number}" for number in range(1000))
    assert bench.store.counters.op_writes == 1000
    assert bench.store.counters.header_cas["conflict"] == 0


@pytest.mark.req("R473-10", "R473-11")
async def test_ops_of_sub_transactions_have_sequences_of_their_own(bench: Bench) -> None:
    """Also where one number is the beginning of another."""
    made = [await bench.store.append_op(ROOT.with_sub(sub), write()) for sub in (0, 1, 10, 100, 1, 10, 0)]
    assert len({op.key for op in made}) == len(made)
    assert sorted(await bench.store.ops(ROOT), key=lambda op: op.key) == sorted(made, key=lambda op: op.key)
    assert [op.txn.sub for op in made] == [0, 1, 10, 100, 1, 10, 0]


async def test_ops_are_deleted_by_version_and_twice_is_fine(bench: Bench) -> None:
    first, second = [await bench.store.append_op(ROOT, write()) for _ in range(2)]
    await bench.store.delete_op(first)
    await bench.store.delete_op(first)
    assert await bench.store.ops(ROOT) == [second]
    assert bench.store.counters.op_deletes == 1


@pytest.mark.req("R473-13")
async def test_writes_by_segment_is_exact(bench: Bench) -> None:
    longer, shorter = SEGMENT + "0", SEGMENT[:-1]
    mine = [await bench.store.append_op(txn, write()) for txn in (ROOT, ROOT.with_sub(3), OTHER)]
    for segment in (longer, shorter, SEGMENT.replace("/", ":")):
        await bench.store.append_op(ROOT, write(segment))
    await bench.store.append_op(ROOT, ack("s"))
    found = await bench.store.writes_in(SEGMENT)
    assert sorted(op.key for op in found) == sorted(op.key for op in mine)
    assert {op.txn for op in found} == {ROOT, ROOT.with_sub(3), OTHER}
    assert len(await bench.store.writes_in(longer)) == 1
    assert await bench.store.writes_in("segment://public/default/other/0-1-1") == []
    assert sum(bench.store.counters.queries.counts) == 3


@pytest.mark.req("R473-14", "R473-28")
async def test_acks_by_segment_and_subscription_is_exact(bench: Bench) -> None:
    mine = [await bench.store.append_op(txn, ack("s", is_cumulative=True)) for txn in (ROOT, OTHER)]
    for subscription in ("s0", "s-1", "S", "s:", "s;", "s/x", ""):
        await bench.store.append_op(ROOT, ack(subscription))
    await bench.store.append_op(ROOT, ack("s", SEGMENT + "0"))
    await bench.store.append_op(ROOT, write())
    assert await bench.store.acks_in(SEGMENT, "s") == sorted(mine, key=lambda op: op.key)
    assert len(await bench.store.all_acks_in(SEGMENT)) == 9
    assert await bench.store.count_ops() == 11


@pytest.mark.req("R473-15", "R473-17")
async def test_open_by_deadline_includes_its_boundary_and_follows_the_state(bench: Bench) -> None:
    made = {at: await bench.store.create_header(TxnId.of(0, at), header(timeout_ms=at)) for at in (9, 99, 100, 101, 1000)}
    assert await all_of(bench.store.expired(100)) == [TxnId.of(0, at) for at in (9, 99, 100)]
    assert await all_of(bench.store.expired(8)) == []
    await bench.store.swap_header(made[99], header("ABORTED", finalized_ms=5))
    await bench.store.swap_header(made[9], header(timeout_ms=500))  # renewed
    assert await all_of(bench.store.expired(100)) == [TxnId.of(0, 100)]
    assert [root.serial async for root in bench.store.open_roots()] == [100, 101, 9, 1000]
    assert [each.root.serial for each in await bench.store.open_headers(2)] == [100, 101]


@pytest.mark.req("R473-16", "R473-17")
async def test_final_by_state_and_time_includes_its_boundary(bench: Bench) -> None:
    for at in (9, 99, 100, 101):
        state = "COMMITTED" if at % 2 else "ABORTED"
        opened = await bench.store.create_header(TxnId.of(0, at), header())
        assert opened.root not in await all_of(bench.store.finished(200))
        await bench.store.swap_header(opened, header(state, finalized_ms=at))
    await bench.store.create_header(TxnId.of(0, 1000), header())
    assert [root.serial for root in await all_of(bench.store.finished(100))] == [100, 9, 99]
    assert [root.serial for root in await all_of(bench.store.finished(98))] == [9]
    assert [root.serial for root in await all_of(bench.store.finished(10**15))] == [100, 9, 99, 101]


@pytest.mark.req("R473-17")
async def test_a_reader_never_sees_record_and_index_apart(bench: Bench) -> None:
    """Headers are decided one by one while both indexes are read."""
    count = 20
    for serial in range(count):
        await bench.store.create_header(TxnId.of(0, serial), header(timeout_ms=serial))

    async def decide() -> None:
        for serial in range(count):
            found = await bench.store.header(TxnId.of(0, serial))
            assert found is not None
            await bench.store.swap_header(found, header("COMMITTED", timeout_ms=serial, finalized_ms=1))

    async def look() -> None:
        seen = 0
        while seen < count:
            async for each in bench.store.expired(1000):
                assert each.value.is_open
            finished = [each async for each in bench.store.finished(1000)]
            assert all(each.value.state == "COMMITTED" for each in finished)
            assert len(finished) >= seen
            seen = len(finished)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(decide())
        group.create_task(look())


@pytest.mark.req("R473-17")
async def test_records_and_index_entries_survive_together(tmp_path: Path) -> None:
    """A store that is opened again, as after a crash, has each record with its entries or neither."""
    opened = partial(embedded.open_store, path=tmp_path)
    async with brokers(open_store=opened) as (bench,):
        made = await bench.store.create_header(ROOT, header())
        await bench.store.create_header(OTHER, header())
        await bench.store.swap_header(made, header("COMMITTED", finalized_ms=7))
        op = await bench.store.append_op(ROOT, write())
        gone = await bench.store.append_op(ROOT, ack("s"))
        await bench.store.delete_op(gone)
    async with brokers(open_store=opened) as (bench,):
        assert await all_of(bench.store.finished(7)) == [ROOT]
        assert await all_of(bench.store.expired(100)) == [OTHER]
        assert [each.key for each in await bench.store.writes_in(SEGMENT)] == [op.key]
        assert await bench.store.all_acks_in(SEGMENT) == []


class _Partitions:
    """A handle that notes which partition each call names."""

    def __init__(self, inner: MetadataStore) -> None:
        self.inner = inner
        self.seen: list[tuple[str, str, str | None]] = []

    def __getattr__(self, name: str) -> object:
        call = getattr(self.inner, name)

        def noting(what: object, *args: object, partition: str | None = None, **options: object) -> object:
            key = what.parent if isinstance(what, Span) else str(what)
            self.seen.append((name, key, partition))
            return call(what, *args, partition=partition, **options)

        return noting


@pytest.mark.req("R473-18")
async def test_everything_of_a_transaction_has_its_root_as_partition(bench: Bench) -> None:
    noting = _Partitions(bench.faulty)
    store = TransactionStore(noting, bench.clock)  # type: ignore[arg-type]
    made = await store.create_header(ROOT, header())
    sub = ROOT.with_sub(await store.append_sub(ROOT))
    op = await store.append_op(sub, write())
    await store.ops(ROOT)
    await store.delete_op(op)
    await store.put_aborted(SEGMENT, sub, AbortedTxn(last="1:1"))
    await store.delete_aborted(SEGMENT, sub)
    await store.delete_subs(ROOT)
    final = await store.swap_header(made, header("ABORTED", finalized_ms=5))
    await store.header(ROOT)
    await store.delete_header(final)
    assert len(noting.seen) == 12
    assert {partition for _name, _key, partition in noting.seen} == {str(ROOT)}


async def test_sub_numbers_begin_at_one_and_do_not_repeat(bench: Bench) -> None:
    assert [await bench.store.append_sub(ROOT) for _ in range(3)] == [1, 2, 3]
    assert sorted(await asyncio.gather(*[bench.store.append_sub(ROOT) for _ in range(50)])) == list(range(4, 54))
    assert await bench.store.append_sub(OTHER) == 1
    await bench.store.delete_subs(ROOT)
    assert await collect_names(bench.faulty.names(Span(records.subs_of(ROOT)))) == []
    assert len(await collect_names(bench.faulty.names(Span(records.subs_of(OTHER))))) == 1


async def test_serials_are_reserved_in_blocks(bench: Bench) -> None:
    assert [await bench.store.reserve_serials(3, 10) for _ in range(3)] == [1, 11, 21]
    assert await bench.store.reserve_serials(4, 10) == 1
    results = await asyncio.gather(*[bench.store.reserve_serials(3, 10) for _ in range(5)], return_exceptions=True)
    assert sum(isinstance(each, VersionConflict) for each in results) == 4
    assert [each for each in results if not isinstance(each, BaseException)] == [31]


async def test_aborted_records_are_listed_by_segment(bench: Bench) -> None:
    for serial in (3, 1, 2):
        await bench.store.put_aborted(SEGMENT, TxnId.of(0, serial, 1), AbortedTxn(last=f"1:{serial}"))
    await bench.store.put_aborted(SEGMENT + "0", ROOT, AbortedTxn(last="9:9"))
    await bench.store.put_aborted(SEGMENT, TxnId.of(0, 3, 1), AbortedTxn(last="1:30"))
    found = {txn: value.last async for txn, value in bench.store.aborted_in(SEGMENT)}
    assert found == {TxnId.of(0, 1, 1): "1:1", TxnId.of(0, 2, 1): "1:2", TxnId.of(0, 3, 1): "1:30"}
    await bench.store.delete_aborted(SEGMENT, TxnId.of(0, 1, 1))
    await bench.store.delete_aborted(SEGMENT, TxnId.of(0, 1, 1))
    assert len([txn async for txn, _ in bench.store.aborted_in(SEGMENT)]) == 2


async def test_purging_a_subscription_and_a_segment_touches_nothing_else(bench: Bench) -> None:
    for segment in (SEGMENT, SEGMENT + "0"):
        await bench.store.append_op(ROOT, write(segment))
        await bench.store.append_op(OTHER, write(segment))
        await bench.store.append_op(ROOT, ack("s", segment))
        await bench.store.append_op(ROOT, ack("t", segment))
        await bench.store.put_aborted(segment, ROOT, AbortedTxn(last="1:1"))
    is_owner = False

    async def check_owner() -> None:
        if not is_owner:
            raise LedgerFenced("The log was taken over.")

    with pytest.raises(LedgerFenced):
        await bench.store.purge_subscription(SEGMENT, "s", check_owner)
    assert len(await bench.store.acks_in(SEGMENT, "s")) == 1
    is_owner = True
    await bench.store.purge_subscription(SEGMENT, "s", check_owner)
    assert [op.op.subscription for op in await bench.store.all_acks_in(SEGMENT)] == ["t"]
    incarnation: str | None = "a1"

    async def living() -> str | None:
        return incarnation

    # The log of that name is the one they belong to.
    await bench.store.purge_segment(SEGMENT, living, bench.coordinator.give_up)
    assert len(await bench.store.writes_in(SEGMENT)) == 2
    incarnation = None
    await bench.store.purge_segment(SEGMENT, living, bench.coordinator.give_up)
    await bench.store.purge_segment(SEGMENT, living, bench.coordinator.give_up)
    assert await bench.store.writes_in(SEGMENT) == await bench.store.all_acks_in(SEGMENT) == []
    assert [txn async for txn, _ in bench.store.aborted_in(SEGMENT)] == []
    assert await bench.store.count_ops() == 4
    assert len([txn async for txn, _ in bench.store.aborted_in(SEGMENT + "0")]) == 1


@pytest.mark.inv("INV5")
async def test_purging_a_log_takes_nothing_from_one_made_while_it_is_listed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lives is asked after the listing: what a log made before that has written is known to be its own."""
    await bench.store.create_header(ROOT, header(timeout_ms=1 << 50))
    incarnation: str | None = None
    listed = bench.store.writes_in

    async def made_meanwhile(segment: str) -> list[StoredOp]:
        nonlocal incarnation
        incarnation = "b2"
        await bench.store.append_op(ROOT, msgspec.structs.replace(write(), incarnation="b2"))
        return await listed(segment)

    async def living() -> str | None:
        return incarnation

    monkeypatch.setattr(bench.store, "writes_in", made_meanwhile)
    await bench.store.purge_segment(SEGMENT, living, bench.coordinator.give_up)
    assert [op.op.incarnation for op in await listed(SEGMENT)] == ["b2"]
    found = await bench.store.header(ROOT, fresh=True)
    assert found is not None
    assert found.value.is_open


@pytest.mark.inv("INV12")
async def test_purging_a_subscription_takes_nothing_from_an_owner_that_comes_before_it_is_listed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose the log is is asked after the listing: what the next owner accepted before that is known to be its own."""
    is_owner, listed = True, bench.store.acks_in

    async def taken_over(segment: str, subscription: str) -> list[StoredOp]:
        nonlocal is_owner
        is_owner = False
        await bench.store.append_op(ROOT, ack(subscription, segment))
        return await listed(segment, subscription)

    async def check_owner() -> None:
        if not is_owner:
            raise LedgerFenced("The log was taken over.")

    monkeypatch.setattr(bench.store, "acks_in", taken_over)
    with pytest.raises(LedgerFenced):
        await bench.store.purge_subscription(SEGMENT, "s", check_owner)
    assert len(await listed(SEGMENT, "s")) == 1


async def test_the_ops_of_a_deleted_log_stay_until_its_transactions_are_aborted(bench: Bench) -> None:
    """Else nobody would know any more, after a failure, that one of them must not be committed by halves."""
    await bench.store.create_header(ROOT, header(timeout_ms=1 << 50))
    await bench.store.append_op(ROOT, write())

    async def living() -> str | None:
        return None

    async def away(_root: TxnId) -> None:
        raise StoreUnavailable("The store is away.")

    with pytest.raises(StoreUnavailable):
        await bench.store.purge_segment(SEGMENT, living, away)
    assert len(await bench.store.writes_in(SEGMENT)) == 1
    await bench.store.purge_segment(SEGMENT, living, bench.coordinator.give_up)
    assert await bench.store.writes_in(SEGMENT) == []
    assert await bench.state(ROOT) == "ABORTED"


@pytest.mark.req("R473-12")
async def test_a_transaction_has_no_size_limit() -> None:
    """One record per operation: a hundred thousand of them, and no record that grows."""
    async with brokers() as (bench,):
        store = TransactionStore(bench.faulty.inner, bench.clock)
        op = write()
        for _ in range(50):
            await asyncio.gather(*[store.append_op(ROOT, op) for _ in range(2000)])
        largest = 0
        count = 0
        async for record in bench.faulty.scan(Span(records.ops_of(ROOT)), partition=str(ROOT)):
            largest = max(largest, len(record.value))
            count += 1
        assert count == 100_000
        assert largest < 200
        assert len(await bench.store.ops(ROOT, limit=10)) == 10


@pytest.mark.req("R473-19")
@pytest.mark.parametrize("backend", ["memory", "embedded"])
async def test_the_port_has_what_transactions_need(backend: str, tmp_path: Path) -> None:
    """Partition keys, sequences, indexes with range queries and watches on them; the conformance suite tells the rest."""
    opened: Engine
    if backend == "memory":
        opened = await memory.open_store(Runtime())
    else:
        opened = await embedded.open_store(Runtime(), path=tmp_path)
    store: MetadataStore = opened.handle("one")
    span = records.WRITES_BY_SEGMENT
    try:
        made = await store.append("/txn-op/1_0/0", b"x", partition="1_0", index={span: "a"})
        assert made.name == f"0-{1:020d}"
        assert await store.get(made.key, partition="1_0") is not None
        with pytest.raises(BraidError):
            await store.get(made.key, partition="2_0")
        assert [each.key for each in await collect(store.scan(IndexSpan(span, "a", "b")))] == [made.key]
        async with store.watch(IndexSpan(span, "a", "b")) as events:
            assert isinstance(await anext(events), Put)
            assert isinstance(await anext(events), Synced)
            await store.append("/txn-op/1_0/0", b"y", partition="1_0", index={span: "aa"})
            event = await anext(events)
            assert isinstance(event, Put)
            assert event.record.value == b"y"
    finally:
        await opened.close()
